"""Tags that models write around reasoning and tool calls: single tokens of most vocabularies, plain text in others."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.text.checkpoint import CheckpointTokenizer
from nanovllm.text.detokenizer import Detokenizer

_FIRST_STAND_IN = 0xD800
"""The first of the half surrogate pairs that stand for tags: no text that a model writes holds one."""


@dataclass(frozen=True)
class Tag:
    """One tag of one tokenizer."""

    name: str
    """Name as chat templates write it: "<think>"."""
    token_id: int | None
    """Token of the tag; None where it is plain text."""
    text: str
    """Text that a Reader sees: one stand-in for a token, so that the same text in plain tokens is no tag; else its
    name."""
    lark: str
    """Name of the tag in a grammar."""

    def text_before(self, rule: str) -> str:
        """The rule, of this name, of any text up to the tag, and the tag."""
        return f"{rule}{'[lazy]' if self.token_id is None else ''}: TEXT {self.lark}"


class Tags(dict[str, Tag]):
    """The tags of one tokenizer, made when first asked for."""

    def __init__(self, tokenizer: CheckpointTokenizer) -> None:
        self._ids = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}

    def __missing__(self, name: str) -> Tag:
        token_id = self._ids.get(name)
        text, lark = name, json.dumps(name)
        if token_id is not None:
            text, lark = chr(_FIRST_STAND_IN + len(self)), f"<[{token_id}]>"
        tag = self[name] = Tag(name, token_id, text, lark)
        return tag


class MarkedDetokenizer:
    """A Detokenizer that shows tags as a Reader wants them, also where special tokens are skipped, and counts the
    tokens of the reasoning."""

    def __init__(self, inner: Detokenizer, tags: Sequence[Tag], thinks: Sequence[Tag], in_reasoning: bool) -> None:
        """`thinks`: none, or the tag that opens reasoning and those that end it; `in_reasoning`: the prompt has opened
        it."""
        self._inner = inner
        self._marks = {tag.token_id: tag.text for tag in tags if tag.token_id is not None}
        self._opening = thinks[0].token_id if thinks else None
        self._ends = [tag.token_id for tag in thinks[1:]]
        self._in_reasoning = in_reasoning
        self._num_tokens = 0
        self._is_blank = True
        """Whether nothing but blanks has come."""
        self._reasoning_end: int | None = None

    def push(self, token_id: int) -> str:
        self._num_tokens += 1
        mark = self._marks.get(token_id)
        if mark is None:
            text = self._inner.push(token_id)
            self._is_blank = self._is_blank and not text.strip()
            return text
        if token_id == self._opening and self._is_blank:
            self._in_reasoning, self._is_blank = True, False
        elif token_id in self._ends and self._in_reasoning and self._reasoning_end is None:
            self._reasoning_end = self._num_tokens
        return self._inner.flush() + mark

    def flush(self) -> str:
        return self._inner.flush()

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens up to the tag that ends the reasoning, it included."""
        if self._reasoning_end is not None:
            return self._reasoning_end
        return self._num_tokens if self._in_reasoning else 0
