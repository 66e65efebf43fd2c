"""Token ids to text as they come: never half a character, linear in the output, the same text as decoding all at once.

tokenizers.decoders.DecodeStream does not: it decodes a run of half characters again with each token (4,000 of them take
seconds), fails on some outputs of byte-fallback tokenizers or changes their text, and cannot say what it holds back at
the end.
"""

import codecs
import re
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from tokenizers import Tokenizer


class Detokenizer(Protocol):
    """Text of one output. What `push` returns, joined, and then `flush`, is what the text of prompt and output decoded
    together has more than the prompt's."""

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


class TokenBytes(dict[int, bytes]):
    """Bytes of each token, found when first asked for. Shared by all outputs."""

    _BYTE_OF = byte_of_character()
    _FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
    """Token of one byte in vocabularies of characters."""

    def __init__(self, tokenizer: Tokenizer, inner: Sequence[int] | None) -> None:
        """`inner`: tokens of some text, after which no text begins; None: the tokenizer is byte-level."""
        self._tokenizer, self._inner = tokenizer, inner
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._find(token_id, self._inner)
        return found

    def first(self, token_id: int) -> bytes:
        """Bytes of a token that begins a text, from which SentencePiece's decoders take a blank."""
        return self[token_id] if self._inner is None else self._find(token_id, ())

    def is_known(self, token_id: int) -> bool:
        """Whether the vocabulary has this id."""
        return self._tokenizer.id_to_token(token_id) is not None

    def _find(self, token_id: int, before: Sequence[int] | None) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""  # ids past the vocabulary have no text
        if before is not None:
            begin, whole = (
                self._tokenizer.decode(ids, skip_special_tokens=False) for ids in ([*before], [*before, token_id])
            )
            text, byte = whole[len(begin) :], self._FALLBACK.fullmatch(token)
            return bytes.fromhex(byte[1]) if byte and text and text != token else text.encode()
        if all(character in self._BYTE_OF for character in token):
            return bytes(self._BYTE_OF[character] for character in token)
        return token.encode()  # added as plain text


class ByteDetokenizer:
    """Incremental UTF-8 decoder over the tokens' bytes, for tokenizers whose tokens have the same bytes in any text,
    but for the token that begins it."""

    def __init__(self, token_bytes: TokenBytes, skip_special_tokens: bool, begins: bool = True) -> None:
        """`begins`: the output begins a text."""
        self._bytes, self._begins = token_bytes, begins
        self._skipped = token_bytes.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if self._begins:
            self._begins = not self._bytes.is_known(token_id)
            return self._decoder.decode(self._bytes.first(token_id))
        return self._decoder.decode(self._bytes[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for any other tokenizer: decodes a moving window of tokens and emits what the text has gained.

    The window starts some tokens before what is new, since a token's text can depend on the one before it (a leading
    blank, say): at first with tokens before the output. While its text ends in U+FFFD a character may be incomplete; a
    character has at most four bytes, so a longer run is not one character, and the window is cut where its halves
    decode to the same text as the whole.
    """

    _MAX_PENDING = 12

    def __init__(
        self, decode: Callable[[list[int]], str], before: Sequence[int] = (), skipped: Collection[int] = ()
    ) -> None:
        """`before`: tokens that come before the output; `skipped`: tokens that have no text."""
        self._decode, self._skipped = decode, skipped
        self._ids = [*before]
        self._num_context = len(self._ids)
        """Leading tokens of the window whose text is out already."""
        self._context_text = decode(self._ids) if before else ""

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith("\ufffd"):
            return self._cut() if len(self._ids) - self._num_context > self._MAX_PENDING else ""
        fresh = text[len(self._context_text) :]
        if fresh:
            self._move(len(self._ids))
        elif len(self._ids) - self._num_context > self._MAX_PENDING:
            del self._ids[self._num_context :]  # ids past the vocabulary have no text
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
