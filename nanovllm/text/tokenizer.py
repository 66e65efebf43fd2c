"""Text to token ids and back. transformers is imported only here, and only when a tokenizer is wanted."""

import copy
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.errors import require_known, require_unicode, short
from nanovllm.text.detokenizer import ByteDetokenizer, Detokenizer, TokenBytes, WindowDetokenizer

_TEMPLATE_OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template", "tools", "documents")

_PROBE = "a text that is shown"


class Tokenizer:
    """A Hugging Face tokenizer, loading in the background from the moment this object is made."""

    def __init__(self, config: EngineConfig, given: Any = None) -> None:
        """`given`: a transformers tokenizer, of which this one is a copy; None: it is loaded from its folder."""
        self._folder = config.tokenizer or config.model
        self._skip = config.skip_tokenizer_init
        self._given = given
        self._tokenizer: Any = None
        self._of_user: Any = None
        self._lock = threading.Lock()
        self._loses: dict[str, bool] = {}
        """Results of _loses_texts by chat template."""
        self._token_bytes: TokenBytes | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._load, name="nanovllm-tokenizer", daemon=True)
        if not self._skip:
            self._thread.start()

    def _load(self) -> None:
        try:
            if self._given is not None:
                self._tokenizer = copy.deepcopy(self._given)
                return
            import transformers  # noqa: F401

            # Looked up again: the library replaces its module at the end of its import. A thread that waited for
            # another engine's import has the first module in hand.
            self._tokenizer = sys.modules["transformers"].AutoTokenizer.from_pretrained(self._folder)
            if self._tokenizer.chat_template is None:  # older files have that of a processor of images apart
                self._tokenizer.chat_template = _template_of_processor(Path(self._folder))
            # The engine knows its own bound and names it; the library's warns of an index error that never comes.
            seen: dict[str, bool] = getattr(self._tokenizer, "deprecation_warnings", {})
            seen["sequence-length-is-longer-than-the-specified-maximum"] = True
        except Exception as error:
            self._error = error

    @property
    def of_user(self) -> Any:
        """A transformers tokenizer for the caller to use as they like; raises as `hf` does. A call with truncation or
        padding changes a transformers tokenizer, also for other threads. So this is another object than `hf`."""
        hf = self.hf
        with self._lock:
            if self._of_user is None:
                self._of_user = copy.deepcopy(hf)
            return self._of_user

    @property
    def hf(self) -> Any:
        """The engine's own transformers tokenizer: not to be handed out (see of_user). Raises ValueError where
        skip_tokenizer_init leaves none."""
        if self._skip:
            raise ValueError("skip_tokenizer_init=True: prompts must be lists of token ids")
        self._thread.join()
        if self._error is not None:
            raise ValueError(f"tokenizer={self._folder!r}: cannot be loaded: {short(self._error)}") from self._error
        return self._tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises ValueError where it is no Unicode text."""
        try:
            return list(self.hf.encode(text, add_special_tokens=add_special_tokens))
        except TypeError:  # the library says no more about half a surrogate pair
            require_unicode(text)
            raise

    @property
    def is_there(self) -> bool:
        """Whether there is a tokenizer at all."""
        return not self._skip

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; empty under skip_tokenizer_init."""
        return "" if self._skip else self.hf.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str | None:
        """One token's own text, special or not; None under skip_tokenizer_init."""
        return None if self._skip else self.hf.decode([token_id])

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Creates an incremental detokenizer for one output; in the end its text equals that of `decode`."""
        hf = self.hf
        if not TokenBytes.suits(hf):
            return WindowDetokenizer(lambda ids: hf.decode(ids, skip_special_tokens=skip_special_tokens))
        if self._token_bytes is None:
            self._token_bytes = TokenBytes(hf)
        return ByteDetokenizer(self._token_bytes, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str:
        """Text of a chat that ends where the assistant is to speak, or to go on (continue_final_message=True);
        `encode` without special tokens gives its token ids. Raises TypeError for an option that neither transformers
        nor the template knows."""
        hf = self._of_user or self.hf  # the caller may have set a template of their own
        options.setdefault("add_generation_prompt", not options.get("continue_final_message"))
        with _rendering():
            template = hf.get_chat_template(options.get("chat_template"), options.get("tools"))
        require_known("chat", "keyword", options, [*_TEMPLATE_OPTIONS, *re.findall(r"[A-Za-z_]\w*", template)])
        if self._loses_texts(hf, template):
            messages = [_in_parts(message) for message in messages]
        with _rendering():
            return str(hf.apply_chat_template(messages, tokenize=False, **options, **(chat_template_kwargs or {})))

    def _loses_texts(self, hf: Any, template: str) -> bool:
        """Whether a content that is one text goes missing, without an error, as with templates that look for images."""
        if template not in self._loses:
            chat = [{"role": "user", "content": _PROBE}]
            try:
                text = hf.apply_chat_template(chat, chat_template=template, tokenize=False)
                self._loses[template] = _PROBE not in text
            except Exception:  # whatever a template raises
                self._loses[template] = False
        return self._loses[template]


def _template_of_processor(folder: Path) -> Any:
    path = folder / "chat_template.json"
    return json.loads(path.read_text(encoding="utf-8")).get("chat_template") if path.is_file() else None


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


@contextmanager
def _rendering() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a template raises
        raise ValueError(f"messages: the chat template cannot render them: {short(error)}") from error
