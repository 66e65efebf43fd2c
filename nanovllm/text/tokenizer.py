"""The tokenizer of an engine. transformers is imported only for a checkpoint without tokenizer.json, and where a caller
asks for one of its tokenizers."""

import copy
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.errors import require_known, short
from nanovllm.text.checkpoint import CheckpointTokenizer, read_json
from nanovllm.text.no_tokenizer import NoTokenizer
from nanovllm.text.template import Messages

_IMPORTING = threading.Lock()  # the parts of transformers are imported when they are asked for, by one thread at a time
_TEMPLATE_OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template", "tools", "documents")


class Tokenizer:
    """Loads a checkpoint's tokenizer in the background, from the moment this object is made."""

    def __init__(self, config: EngineConfig, given: Any = None) -> None:
        """`given`: a transformers tokenizer, of which the engine takes a copy; None: it is loaded from its folder."""
        self._folder = config.tokenizer or config.model
        self._given = given
        self._of_user: Any = None
        self._lock = threading.Lock()
        self._own: Future[CheckpointTokenizer] = Future()
        self.is_there = not config.skip_tokenizer_init
        """Whether there is a tokenizer at all."""
        if self.is_there:
            threading.Thread(target=self._load, name="nanovllm-tokenizer", daemon=True).start()
        else:
            self._own.set_result(NoTokenizer())

    def _load(self) -> None:
        try:
            if self._given is None and (Path(self._folder) / "tokenizer.json").is_file():
                self._own.set_result(CheckpointTokenizer(self._folder))
            else:
                self._own.set_result(CheckpointTokenizer.of_transformers(self._transformers()))
        except Exception as error:
            self._own.set_exception(error)

    def _transformers(self) -> Any:
        """A transformers tokenizer that nobody else has."""
        if self._given is not None:
            return copy.deepcopy(self._given)
        with _IMPORTING:
            import transformers  # noqa: F401

            # Looked up again: the library replaces its module at the end of its import. A thread that waited for an
            # import of the program's own has the first module in hand.
            found = sys.modules["transformers"].AutoTokenizer.from_pretrained(self._folder)
        if found.chat_template is None:  # older files have that of a processor of images apart
            found.chat_template = read_json(Path(self._folder) / "chat_template.json").get("chat_template")
        # The engine knows its own bound and names it; the library's warns of an index error that never comes.
        seen: dict[str, bool] = getattr(found, "deprecation_warnings", {})
        seen["sequence-length-is-longer-than-the-specified-maximum"] = True
        return found

    @property
    def own(self) -> CheckpointTokenizer:
        """The engine's tokenizer, once it is loaded. Raises ValueError where it cannot be; under skip_tokenizer_init
        it refuses text."""
        if (error := self._own.exception()) is not None:
            raise ValueError(f"tokenizer={self._folder!r}: cannot be loaded: {short(error)}") from error
        return self._own.result()

    @property
    def of_user(self) -> Any:
        """A transformers tokenizer for the caller to use as they like, apart from the engine's: a call with truncation
        or padding changes it. Raises ValueError under skip_tokenizer_init, and as `own` does."""
        if not self.is_there:
            raise ValueError("skip_tokenizer_init=True: there is no tokenizer")
        _ = self.own
        with self._lock:
            if self._of_user is None:
                self._of_user = self._transformers()
            return self._of_user

    def render_chat(
        self, messages: Messages, chat_template_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> str:
        """Text of a chat that ends where the assistant is to speak, or to go on (continue_final_message=True); `encode`
        without special tokens gives its token ids. `options`: _TEMPLATE_OPTIONS, and variables of the template. Raises
        TypeError for any other; ValueError as ChatTemplate.render."""
        given = {name: options.pop(name) for name in _TEMPLATE_OPTIONS if name in options}
        given.setdefault("add_generation_prompt", not given.get("continue_final_message"))
        source = given.pop("chat_template", None) or getattr(self._of_user, "chat_template", None)
        own = self.own.with_template(source) if isinstance(source, str) else self.own
        template = own.template(with_tools=bool(given.get("tools")))
        require_known("chat", "keyword", options, [*_TEMPLATE_OPTIONS, *template.variables])
        values = {**(chat_template_kwargs or {}), **options}
        return template.render(messages, chat_template_kwargs=values, seconds=float("inf"), **given)
