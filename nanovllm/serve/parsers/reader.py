"""Text as it comes, told apart into reasoning, content and tool calls.

A family's reader is a generator that takes text from a `Source` and yields where it needs more. What it puts out,
joined by kind and call, depends on the whole text alone and not on how it was cut.
"""

import json
import re
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Literal, NamedTuple

Steps = Generator[None, None, None]
"""A reader at work; each yield asks for more text."""


class Delta(NamedTuple):
    """Piece that an output has gained."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    """"call": a tool call has begun; its arguments follow as pieces of one JSON text."""
    text: str
    call_index: int = 0
    """Number of the call within the message."""
    name: str = ""
    id: str = ""


class Malformed(Exception):
    """Raised where the text after a tag is no call."""


class Source:
    """Text that has come and was not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self.taken: str | None = None
        """Text read of a call whose name is not known yet; it becomes content if it turns out to be no call."""

    def take(self, count: int) -> str:
        piece, self.text = self.text[:count], self.text[count:]
        if self.taken is not None:
            self.taken += piece
        return piece

    def until(self, tags: Sequence[str], emit: Callable[[str], None]) -> Generator[None, None, str]:
        """Emits all text before the first of `tags`, and returns it; "" at the end of all text."""
        while True:
            found = [(at, tag) for tag in tags if (at := self.text.find(tag)) >= 0]
            if found:
                at, tag = min(found)
                emit(self.text[:at])
                self.text = self.text[at + len(tag) :]
                return tag
            held = 0 if self.ended else _begun(self.text, tags)
            emit(self.text[: len(self.text) - held])
            self.text = self.text[len(self.text) - held :]
            if self.ended:
                return ""
            yield

    def blanks(self) -> Steps:
        """Skips white space."""
        while True:
            self.take(len(self.text) - len(self.text.lstrip()))
            if self.text or self.ended:
                return
            yield

    def expect(self, *texts: str, takes: bool = True) -> Generator[None, None, str]:
        """Takes the first of `texts` that comes behind blanks; `takes` False: leaves it there. Raises Malformed where
        something else does."""
        yield from self.blanks()
        while True:
            for text in texts:
                if self.text.startswith(text):
                    return self.take(len(text)) if takes else text
            begins = any(text.startswith(self.text) for text in texts)
            if begins and self.ended:
                self.take(len(self.text))
            if self.ended or not begins:
                raise Malformed
            yield

    def matching(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Takes what matches up to the first character that does not."""
        out = ""
        while True:
            found = pattern.match(self.text)
            out += self.take(found.end()) if found else ""
            if self.text or self.ended:
                return out
            yield

    def string(self) -> Generator[None, None, str]:
        """Takes a JSON string behind blanks."""
        pieces: list[str] = []
        yield from self.blanks()
        if not self.text.startswith('"'):
            raise Malformed
        yield from self.value(pieces.append)
        try:
            return str(json.loads("".join(pieces)))
        except ValueError:
            raise Malformed from None

    def value(self, emit: Callable[[str], None]) -> Steps:
        """Takes one JSON value behind blanks and emits its text as it comes."""
        yield from self.blanks()
        scan = _Value()
        while True:
            end = scan.end_in(self.text)
            emit(self.take(len(self.text) if end is None else end))
            if end is not None or self.ended:
                return
            yield


class _Value:
    """Finder of the end of a JSON value, looked for in pieces of text."""

    _OUTSIDE, _INSIDE, _BARE = re.compile(r'[{}\[\]"]'), re.compile(r'["\\]'), re.compile(r"[,}\]\s]")

    def __init__(self) -> None:
        self._depth = 0
        self.in_string = self._escaped = self._bare = self._begun = False

    def end_in(self, text: str) -> int | None:
        """The index after the value's last character, if it is in this piece."""
        at = 0
        if text and not self._begun:
            self._begun, self._bare = True, text[0] not in '{["'
        if self._bare:
            found = self._BARE.search(text)
            return found.start() if found else None
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (self._INSIDE if self.in_string else self._OUTSIDE).search(text, at)
            if found is None:
                return None
            at = found.end()
            character = found[0]
            if self.in_string:
                self._escaped = character == "\\"
                self.in_string = self._escaped
            elif character == '"':
                self.in_string = True
            else:
                self._depth += 1 if character in "{[" else -1
            if not self.in_string and self._depth <= 0:
                return at
        return None


def ends_in_string(text: str) -> bool:
    """Whether a text is the beginning of a JSON value, and ends within a string of it."""
    scan, text = _Value(), text.lstrip()
    return text[:1] in ("{", "[", '"') and scan.end_in(text) is None and scan.in_string


def _begun(text: str, tags: Sequence[str]) -> int:
    """Characters at the end of `text` that may begin one of `tags`."""
    longest = 0
    for tag in tags:
        at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
        while at >= 0 and not tag.startswith(text[at:]):
            at = text.find(tag[0], at + 1)
        longest = max(longest, len(text) - at) if at >= 0 else longest
    return longest


class Output:
    """Deltas that a reader has read."""

    def __init__(self, stand_ins: Mapping[int, str]) -> None:
        """`stand_ins`: tags by the code point that shows them, put back where they are text after all."""
        self.deltas: list[Delta] = []
        self.num_calls = 0
        self.calls_complete = True
        """Whether the last call has been read to its end."""
        self._stand_ins = stand_ins
        self._kind: Literal["content", "reasoning"] = "content"
        self._held = ""
        self._strips = False

    def begin(self, kind: Literal["content", "reasoning"], strips: bool = False) -> None:
        """Sets the kind of the text that follows. Line breaks held back before it are dropped; `strips` True: those
        that it begins with, too."""
        self._kind, self._strips, self._held = kind, strips, ""

    def text(self, text: str) -> None:
        """Line breaks at its end are held back: before a tag they are no content."""
        if self._strips:
            text = text.lstrip("\n")
            self._strips = not text
        text = self._held + text
        kept = text.rstrip("\n")
        self._held = text[len(kept) :]
        self._add(kept)

    def call(self, name: str) -> None:
        self._held = ""
        self.deltas.append(Delta("call", "", self.num_calls, name, f"call_{secrets.token_hex(12)}"))
        self.num_calls += 1
        self.calls_complete = False

    def arguments(self, text: str) -> None:
        if text:
            self.deltas.append(Delta("arguments", self._shown(text), self.num_calls - 1))

    def finish(self) -> None:
        """Releases the text that was held back, now that nothing follows."""
        held, self._held = self._held, ""
        self._add(held)

    def _add(self, text: str) -> None:
        if text:
            self.deltas.append(Delta(self._kind, self._shown(text)))

    def _shown(self, text: str) -> str:
        return text if text.isascii() else text.translate(self._stand_ins)


class Reader:
    """One output, read as it comes."""

    def __init__(self, program: Callable[[Source, Output], Steps], output: Output) -> None:
        self._source, self.output = Source(), output
        self._steps: Steps | None = program(self._source, output)
        self._advance()

    def push(self, text: str) -> list[Delta]:
        """Takes in what the output has gained; returns what became of it."""
        self._source.text += text
        self._advance()
        return self._drain()

    def finish(self) -> list[Delta]:
        """The output has ended: what was held back."""
        self._source.ended = True
        self._advance()
        self.output.finish()
        return self._drain()

    def _advance(self) -> None:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        if self._steps is None:  # all after the last call
            self.output.text(self._source.text)
            self._source.text = ""

    def _drain(self) -> list[Delta]:
        deltas, self.output.deltas = self.output.deltas, []
        return deltas


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours of one kind and call made one: the message, where `deltas` are all of it."""
    out: list[Delta] = []
    for delta in deltas:
        if out and delta.kind != "call" and (delta.kind, delta.call_index) == (out[-1].kind, out[-1].call_index):
            out[-1] = out[-1]._replace(text=out[-1].text + delta.text)
        else:
            out.append(delta)
    return out
