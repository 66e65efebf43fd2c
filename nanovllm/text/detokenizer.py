"""Token ids to text as they come: never half a character, linear in the output, the same text as decoding all at
once."""

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Detokenizer(Protocol):
    """Text of one output. What `push` returns, joined, and then `flush`, is the text of all tokens decoded together."""

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before: whole characters only, often "" ."""

    def flush(self) -> str:
        """Returns the bytes held back for a character that was never completed, as U+FFFD."""


def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet for bytes: printable Latin-1 characters are themselves, the rest are U+0100 and on
    (Radford et al. 2019, the encoder published with the model)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """Bytes of each token of a byte-level tokenizer, found when first asked for. Shared by all outputs."""

    _BYTE_OF = byte_of_character()

    def __init__(self, hf_tokenizer: Any) -> None:
        self._token_of: Callable[[int], str | None] = hf_tokenizer.backend_tokenizer.id_to_token
        added = hf_tokenizer.added_tokens_decoder.items()  # decode() skips those that are special without a role, too
        self.special_ids = frozenset([*hf_tokenizer.all_special_ids, *(i for i, token in added if token.special)])
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            token = self._token_of(token_id) or ""  # ids past the tokenizer's vocabulary have no text
            if all(character in self._BYTE_OF for character in token):
                found = bytes(self._BYTE_OF[character] for character in token)
            else:  # added as plain text
                found = token.encode()
            self._known[token_id] = found
        return found

    @staticmethod
    def suits(hf_tokenizer: Any) -> bool:
        """Whether decoding is nothing but joining bytes."""
        decoder = getattr(getattr(hf_tokenizer, "backend_tokenizer", None), "decoder", None)
        return type(decoder).__name__ == "ByteLevel" and not hf_tokenizer.clean_up_tokenization_spaces


class ByteDetokenizer:
    """Incremental UTF-8 decoder over the tokens' bytes, for byte-level tokenizers."""

    def __init__(self, token_bytes: TokenBytes, skip_special_tokens: bool) -> None:
        self._bytes = token_bytes
        self._skipped = token_bytes.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decoder.decode(self._bytes[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for any other tokenizer: decodes a moving window of tokens and emits what the text has gained.

    The window starts some tokens before what is new, since a token's text can depend on the one before it (a leading
    blank, say). While its text ends in U+FFFD a character may be incomplete; a character has at most four bytes, so a
    longer run is not one character, and the window is cut where its halves decode to the same text as the whole.
    """

    _MAX_PENDING = 12

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._num_context = 0
        """Leading tokens of the window whose text is out already."""
        self._context_text = ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith("\ufffd"):
            return self._cut() if len(self._ids) - self._num_context > self._MAX_PENDING else ""
        fresh = text[len(self._context_text) :]
        if fresh:
            self._move(len(self._ids))
        elif len(self._ids) - self._num_context > self._MAX_PENDING:
            del self._ids[self._num_context :]  # special tokens, say: they have no text
        return fresh

    def flush(self) -> str:
        fresh = self._decode(self._ids)[len(self._context_text) :]
        self._move(len(self._ids))
        return fresh

    def _cut(self) -> str:
        whole = self._decode(self._ids)
        for end in range(len(self._ids) - 4, self._num_context, -1):
            head = self._decode(self._ids[:end])
            if head + self._decode(self._ids[end:]) == whole:
                fresh = head[len(self._context_text) :]
                self._ids, self._num_context, self._context_text = self._ids[end:], 0, ""
                return fresh
        return ""

    def _move(self, end: int) -> None:
        """The window's tokens up to `end` become the context."""
        context = self._ids[self._num_context : end] or self._ids[:end]
        self._ids = context + self._ids[end:]
        self._num_context = len(context)
        self._context_text = self._decode(context)


def find_stop(text: str, stops: Sequence[str], num_fresh: int) -> tuple[int, str] | None:
    """Finds the stop string that the last `num_fresh` characters of the text complete: (where it begins, which one). Of
    several, the one that begins first; at the same place, the first in the list."""
    found = []
    for order, stop in enumerate(stops):
        at = text.find(stop, max(0, len(text) - num_fresh - len(stop) + 1))
        if at >= 0:
            found.append((at, order))
    if not found:
        return None
    at, order = min(found)
    return at, stops[order]


class StreamedText:
    """The text of one output as it grows, watched for stop strings."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), include_stop: bool = False) -> None:
        self._detokenizer = detokenizer
        self._stops, self._include = tuple(stops), include_stop
        self._overlap = max((len(stop) for stop in stops), default=1) - 1
        """Characters at the end that a stop string may still take back."""
        self._settled: list[str] = []
        self._num_taken = 0
        self._tail = ""
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All text so far; some of its end may still turn out to begin a stop string."""
        return "".join(self._settled) + self._tail

    def push(self, token_id: int, watch: bool = True) -> bool:
        """Takes in a token; True where its text completes a stop string. `watch` False: none is looked for."""
        fresh = self._detokenizer.push(token_id)
        if not fresh:
            return False
        self._tail += fresh
        if self._stops and watch:
            found = find_stop(self._tail, self._stops, len(fresh))
            if found is not None:
                at, self.stopped_by = found
                self._tail = self._tail[: at + (len(self.stopped_by) if self._include else 0)]
                return True
        if len(self._tail) > 64 + 2 * self._overlap:
            end = len(self._tail) - self._overlap
            self._settled.append(self._tail[:end])
            self._tail = self._tail[end:]
        return False

    def take(self, ended: bool = False) -> str:
        """Returns text that is final and was not taken before. `ended`: no more tokens come."""
        if ended:
            self.finish()
        end = len(self._tail) - (0 if ended else self._overlap)
        if end > 0:
            self._settled.append(self._tail[:end])
            self._tail = self._tail[end:]
        fresh, self._num_taken = "".join(self._settled[self._num_taken :]), len(self._settled)
        return fresh

    def finish(self) -> str:
        """No more tokens: the whole text, an incomplete character in it as U+FFFD."""
        if self.stopped_by is None:
            self._tail += self._detokenizer.flush()
        return self.text
