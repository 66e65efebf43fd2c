"""A checkpoint's tokenizer and chat templates, read from its files with `tokenizers` and `jinja2` alone.

Its ids and rendered chats equal those of transformers' AutoTokenizer. From any thread; `encode` lets go of the GIL.
"""

import copy
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders

from nanovllm.errors import require_unicode
from nanovllm.text.detokenizer import ByteDetokenizer, Detokenizer, TokenBytes, WindowDetokenizer
from nanovllm.text.reranking import Reranker
from nanovllm.text.template import ChatTemplate, Messages

_SPECIAL_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_TAIL = 64
"""Last tokens of a prompt among which is one with text, if it has any."""
_FIRST_STAND_IN, _MOST_HIDDEN = 0xD800, 0x800
_STAND_INS = re.compile("[\ud800-\udfff]")
"""Half surrogate pairs stand for control tokens in messages while a template is rendered: no text holds them."""


class CheckpointTokenizer:
    """Text to token ids and back, and chats to text."""

    def __init__(self, folder: str | Path, chat_template: str | Path | None = None) -> None:
        """Reads a checkpoint's folder; `chat_template` names a file that takes the place of its templates. Raises
        FileNotFoundError where the folder holds no tokenizer.json, and ValueError where a file cannot be read."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer={str(folder)!r}: tokenizer.json is missing")
        try:
            self.backend_tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{path}: cannot be read: {error}") from error
        config = read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            config |= read_json(folder / "special_tokens_map.json")
            added = read_json(folder / "added_tokens.json")
            config["added_tokens_decoder"] = {number: {"content": name} for name, number in added.items()}
        extra = config.get("extra_special_tokens")
        named = {**config, **extra} if isinstance(extra, dict) else config
        roles = [*_SPECIAL_NAMES, *(name for name in named if name.endswith("_token") or name in (extra or ()))]
        given = {name: value for name in roles if isinstance(value := named.get(name), (str, dict)) and value}
        self.special_tokens = {name: _content(value) for name, value in given.items()}
        """Special tokens by role, as templates name them: bos_token, eos_token, ..."""
        self._add_missing_tokens(config)
        self._settle(_template_sources(folder, config, chat_template))

    @classmethod
    def of_transformers(cls, given: Any) -> "CheckpointTokenizer":
        """Makes a tokenizer from a transformers tokenizer, whose backend it takes over. Raises ValueError if that is
        not one of `tokenizers`."""
        self = cls.__new__(cls)
        if not isinstance(backend := getattr(given, "backend_tokenizer", None), Tokenizer):
            raise ValueError(f"{type(given).__name__}: must be a fast tokenizer, of the library tokenizers")
        self.backend_tokenizer = backend
        self.special_tokens = dict(given.special_tokens_map)
        sources = given.chat_template or {}
        self._settle({"default": sources} if isinstance(sources, str) else dict(sources))
        return self

    def _settle(self, templates: Mapping[str, str]) -> None:
        """Derives all other attributes from the backend. `templates`: sources by name."""
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        self.added_tokens_decoder: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        self.is_byte_level = isinstance(self.backend_tokenizer.decoder, decoders.ByteLevel)
        by_token = not self.is_byte_level and _decodes_by_token(self.backend_tokenizer.decoder)
        self._has_bytes = self.is_byte_level or by_token
        """Whether a token has the same bytes in any text, unless it begins it."""
        self._inner = [] if self.is_byte_level else self.encode("x", add_special_tokens=False)
        """Tokens of some text, after which no text begins."""
        self._token_bytes = TokenBytes(self.backend_tokenizer, None if self.is_byte_level else self._inner)
        self._guards = {name: _Guard(self, ChatTemplate(text, self.special_tokens)) for name, text in templates.items()}

    def _add_missing_tokens(self, config: dict[str, Any]) -> None:
        """Special tokens that tokenizer_config.json names and tokenizer.json does not mark as such."""
        known = {token.content for token in self.backend_tokenizer.get_added_tokens_decoder().values()}
        listed = {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}
        missing = [AddedToken(**token) for _, token in sorted(listed.items()) if token["content"] not in known]
        self.backend_tokenizer.add_tokens(missing)
        extra = config.get("extra_special_tokens")
        others = extra if isinstance(extra, list) and extra else config.get("additional_special_tokens") or []
        named = dict.fromkeys([*self.special_tokens.values(), *map(_content, others)])
        special = {t.content for t in self.backend_tokenizer.get_added_tokens_decoder().values() if t.special}
        added = [AddedToken(name, special=True, normalized=False) for name in named if name not in special]
        self.backend_tokenizer.add_special_tokens(added)

    # --- ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises ValueError where it is no Unicode text."""
        return self.encode_all([text], add_special_tokens)[0]  # a batch of one lets go of the GIL, one text does not

    def encode_all(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of texts, by a thread for each core. Raises ValueError where one is no Unicode text."""
        try:
            found = self.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError:
            for text in texts:
                require_unicode(text)
            raise
        return [list(encoding.ids) for encoding in found]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, after: Sequence[int] = ()) -> str:
        """Text of token ids, which continue the text of the prompt `after`: what both have more than that has."""
        if self._has_bytes and not self.is_byte_level:  # the library has other text for bytes that are no character
            detokenizer = self.detokenizer(skip_special_tokens, after)
            return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
        before = [] if self._begins(after, skip_special_tokens) else self._inner
        text = self._decode([*before, *token_ids], skip_special_tokens)
        return text[len(self._decode(before, skip_special_tokens)) :] if before else text

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return str(self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def _begins(self, prompt: Sequence[int], skip_special_tokens: bool) -> bool:
        """Whether a prompt has no text, so that what follows it begins one."""
        skipped = self._token_bytes.special_ids if skip_special_tokens else ()
        return not any(i not in skipped and self._token_bytes.is_known(i) for i in prompt[-_TAIL:])

    def token_text(self, token_id: int) -> str | None:
        """One token's own text within a text, special or not."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def detokenizer(self, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> Detokenizer:
        """Creates an incremental detokenizer for one output, which continues the prompt `after`; in the end its text
        equals that of `decode`."""
        begins = not self.is_byte_level and self._begins(after, skip_special_tokens)
        if self._has_bytes:
            return ByteDetokenizer(self._token_bytes, skip_special_tokens, begins)
        skipped = self._token_bytes.special_ids if skip_special_tokens else ()
        return WindowDetokenizer(lambda ids: self._decode(ids, False), () if begins else self._inner, skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes within a text, special or not; none for ids past the vocabulary."""
        return self._token_bytes[token_id]

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that the tokenizer's files name as the end of a text."""
        name = self.special_tokens.get("eos_token")
        return None if name is None else self.backend_tokenizer.token_to_id(name)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of more than n times as many has more than n tokens."""
        return max(len(token.encode()) for token in self.backend_tokenizer.get_vocab())

    @cached_property
    def reranker(self) -> Reranker:
        """Judge of documents. Raises ValueError as Reranker does."""
        return Reranker(self)

    # --- chats

    @property
    def has_chat_template(self) -> bool:
        return bool(self._guards)

    def with_template(self, source: str) -> "CheckpointTokenizer":
        """Copy with another chat template. Raises ValueError if it is no jinja2."""
        other = copy.copy(self)
        other._guards = {"default": _Guard(other, ChatTemplate(source, self.special_tokens))}
        return other

    def template(self, with_tools: bool = False) -> ChatTemplate:
        """The template for a chat with or without tools. Raises ValueError where the checkpoint has none."""
        return self._guard(with_tools).template

    def _guard(self, with_tools: bool) -> "_Guard":
        name = "tool_use" if with_tools and "tool_use" in self._guards else "default"
        if name not in self._guards:
            raise ValueError("messages: this model has no chat template; name one with --chat-template")
        return self._guards[name]

    def render_chat(self, messages: Messages, tools: Messages | None = None, **options: Any) -> str:
        """The chat as text. `options`: of ChatTemplate.render. Raises ValueError naming what the template refuses."""
        return self.template(bool(tools)).render(messages, tools, **options)

    def encode_chat(
        self,
        messages: Messages,
        tools: Messages | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        trust_special_tokens: bool = False,
        **options: Any,
    ) -> tuple[str, list[int]]:
        """The chat as text and as token ids. A special token that a message or tool spells out becomes plain text's
        ids: it cannot end a turn or begin one. `trust_special_tokens` True: it becomes the token."""
        guard, hidden = self._guard(bool(tools)), dict[str, str]()
        if not trust_special_tokens:
            (messages, tools, chat_template_kwargs), hidden = guard.hide(messages, tools, chat_template_kwargs)
        text = self.render_chat(messages, tools, chat_template_kwargs=chat_template_kwargs, **options)
        return guard.encode(text, hidden)


class _Guard:
    """Keeps control tokens that a client spells out apart from those that a template writes.

    Before rendering, each becomes one stand-in; after it, the text is cut there, and the token's text is put in as ids
    of plain text. Chats without such texts go the short way, so their ids are the ordinary ones.
    """

    def __init__(self, tokenizer: CheckpointTokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self.template = tokenizer, template
        added = tokenizer.added_tokens_decoder.values()
        special = [token.content for token in added if token.special]
        # Users and assistants may write these: "<think>" in an earlier turn is no attack. What a tool brings may not.
        others = [t.content for t in added if not t.special and t.content in template.literals and t.content.strip()]
        self._special, self._all = _any_of(special), _any_of([*special, *others])
        self._as_text = cache(self._find_as_text)
        """Ids of a control token's name as plain text."""

    def hide(self, messages: Any, tools: Any, kwargs: Any) -> tuple[tuple[Any, Any, Any], dict[str, str]]:
        """The three with stand-ins for control tokens, and these by stand-in. Raises ValueError for texts that are no
        Unicode."""
        found: dict[str, str] = {}
        hidden = (
            [self._hide(one, self._all if one.get("role") == "tool" else self._special, found) for one in messages],
            self._hide(tools, self._all, found),
            self._hide(kwargs, self._all, found),
        )
        if len(found) > _MOST_HIDDEN:
            raise ValueError(f"messages: {len(found)} different control tokens, at most {_MOST_HIDDEN} are taken")
        return hidden, {stand_in: name for name, stand_in in found.items()}

    def _hide(self, value: Any, names: re.Pattern[str], found: dict[str, str]) -> Any:
        if isinstance(value, str):
            require_unicode(value)
            return names.sub(lambda match: found.setdefault(match[0], chr(_FIRST_STAND_IN + len(found))), value)
        if isinstance(value, Mapping):
            return {self._hide(key, names, found): self._hide(item, names, found) for key, item in value.items()}
        return [self._hide(item, names, found) for item in value] if isinstance(value, (list, tuple)) else value

    def encode(self, text: str, hidden: Mapping[str, str]) -> tuple[str, list[int]]:
        """A rendered chat without stand-ins, and its ids. `hidden`: control tokens by stand-in."""
        if not hidden:
            return text, self._tokenizer.encode(text, add_special_tokens=False)
        if "ensure_ascii" in self.template.source:  # tojson may have escaped them
            escapes = {json.dumps(stand_in)[1:-1]: stand_in for stand_in in hidden}
            text = _any_of(escapes).sub(lambda found: escapes[found[0]], text)
        ids: list[int] = []
        at = 0
        for found in _STAND_INS.finditer(text):
            ids += self._piece(text[at : found.start()], at > 0) + self._as_text(hidden[found[0]])
            at = found.end()
        return _STAND_INS.sub(lambda found: hidden[found[0]], text), ids + self._piece(text[at:], at > 0)

    def _piece(self, text: str, is_inner: bool) -> list[int]:
        """Ids of a stretch between control tokens. Tokenizers that put a blank before a text put none there."""
        tokenizer = self._tokenizer
        if not text or not is_inner or tokenizer.is_byte_level:
            return tokenizer.encode(text, add_special_tokens=False) if text else []
        lead = tokenizer.encode("\n", add_special_tokens=False)
        ids = tokenizer.encode("\n" + text, add_special_tokens=False)
        return ids[len(lead) :] if ids[: len(lead)] == lead else tokenizer.encode(text, add_special_tokens=False)

    def _find_as_text(self, name: str) -> list[int]:
        """The tokenizer's parts are asked, without its search for added tokens."""
        parts = self._tokenizer.backend_tokenizer
        text = name if parts.normalizer is None else parts.normalizer.normalize_str(name)
        before = parts.pre_tokenizer
        splits = [text] if before is None else [split for split, _ in before.pre_tokenize_str(text)]
        ids = [token.id for split in splits for token in parts.model.tokenize(split)]
        if parts.token_to_id(name) in ids:
            ids = [token.id for split in splits for each in split for token in parts.model.tokenize(each)]
        return ids


def _template_sources(folder: Path, config: Mapping[str, Any], named: str | Path | None) -> dict[str, str]:
    """Chat templates by name: from the file that was asked for, else from the folder's own files, else from
    tokenizer_config.json."""
    if named is not None:
        try:
            return {"default": Path(named).read_text(encoding="utf-8")}
        except UnicodeDecodeError:
            raise ValueError(f"chat_template={str(named)!r}: must be a text in UTF-8") from None
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (single := folder / "chat_template.jinja").is_file():
        files["default"] = single
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    found = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        return {one["name"]: one["template"] for one in found}
    return {"default": found} if isinstance(found, str) else dict(found or {})


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none. Raises ValueError naming a file that is no JSON."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    return content if isinstance(content, dict) else {}


def _decodes_by_token(decoder: Any) -> bool:
    """Whether a decoder makes of a token, unless it begins the text, the same bytes in any text."""
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    return all(
        (kind := part.get("type")) in ("ByteFallback", "Fuse", "Metaspace")
        or (kind == "Replace" and len(part["pattern"].get("String", "")) == 1)
        or (kind == "Strip" and (part["content"], part["start"], part["stop"]) == (" ", 1, 0))
        for part in state.get("decoders", [state])
    )


def _content(token: Any) -> str:
    """A special token's text; files hold it alone or with its flags."""
    return str(token["content"] if isinstance(token, Mapping) else token)


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Pattern of any of the texts, the longest that is there; without texts it matches nothing. A vocabulary may have a
    thousand that begin alike (<SPECIAL_1> ...): one after the other would take them seconds for a text of beginnings,
    in which no other thread runs."""
    return re.compile(_alternatives({*texts}) if texts else "(?!)")


def _alternatives(texts: Collection[str]) -> str:
    """Expression for any of the texts that looks at each character once."""
    groups: dict[str, list[str]] = {}
    for text in filter(None, texts):
        groups.setdefault(text[0], []).append(text)
    choices = []
    for group in groups.values():
        begin = min(group, key=len)
        while not all(text.startswith(begin) for text in group):
            begin = begin[:-1]
        rest = [text[len(begin) :] for text in group]
        choices.append(re.escape(begin) + (_alternatives(rest) if len(rest) > 1 else ""))
    return f"(?:{'|'.join(choices)})" + ("?" if "" in texts else "")
