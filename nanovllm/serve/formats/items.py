"""Base of formats in other dialects than chat completions: items that grow one after the other, and events of them."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from nanovllm.serve.errors import ApiError
from nanovllm.serve.formats import shapes
from nanovllm.serve.formats.chat import ChatFormat
from nanovllm.serve.http.call import Call
from nanovllm.serve.parsers import Delta
from nanovllm.serve.request import Prepared, Request, Row
from nanovllm.serve.served_model import ServedModel

Event = dict[str, Any]
"""An event's data; its "type" is the event's name."""
Kind = Literal["content", "reasoning", "arguments"]


def written(events: list[Event]) -> bytes:
    """Server-sent events; each is named by its type."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (each["type"].encode(), msgspec.json.encode(each)) for each in events)


class ItemsFormat(ChatFormat):
    """One answer: its items, as they grow and as a whole."""

    counts_events = True
    answer: dict[str, Any]
    """The answer as a whole, once it has ended."""

    def __init__(self, served: ServedModel, call: Call, prepared: Prepared) -> None:
        super().__init__(served, call, prepared)
        self.items: list[dict[str, Any]] = []
        self._open: tuple[Kind, int] | None = None
        """Kind and call of the last item, while it grows."""
        self._pieces: list[str] = []

    def head(self, row: Row) -> bytes:
        return written(self.start(self.usage(row.request)))

    def chunk(self, row: Row, text: str) -> bytes:
        return written(self.add(self.read(row, text)))

    def add(self, deltas: Iterable[Delta]) -> list[Event]:
        """Adds to the answer; returns what it has gained."""
        events: list[Event] = []
        for delta in deltas:
            kind: Kind = "arguments" if delta.kind == "call" else delta.kind
            if self._open != (kind, delta.call_index):
                events += self.end_item(True)
                self._open, self._pieces = (kind, delta.call_index), []
                events += self.begin(kind, delta)
            if delta.text:
                self._pieces.append(delta.text)
                events += self.gain(kind, delta.text)
        return events

    def end_item(self, is_complete: bool) -> list[Event]:
        """Closes the item that grows, if there is one. `is_complete` False: the answer was cut in it."""
        if self._open is None:
            return []
        kind, self._open = self._open[0], None
        return self.close(kind, "".join(self._pieces), is_complete)

    def end(self, request: Request) -> bytes:
        [row] = request.rows
        stop = None if row.end is None else row.end.stop_reason
        return written(self.finish(self.finish_reason(row) or "stop", stop, self.usage(request)))

    def failure(self, error: ApiError) -> bytes:
        return written([self.error(error)])

    def whole(self, request: Request) -> bytes:
        [row] = request.rows
        self.chunk(row, "".join(row.pieces))
        self.end(request)
        return msgspec.json.encode(self.answer)

    @abstractmethod
    def start(self, usage: shapes.Usage) -> list[Event]:
        """The answer begins."""

    @abstractmethod
    def begin(self, kind: Kind, delta: Delta) -> list[Event]:
        """Adds an item."""

    @abstractmethod
    def gain(self, kind: Kind, text: str) -> list[Event]:
        """The last item has gained text."""

    @abstractmethod
    def close(self, kind: Kind, text: str, is_complete: bool) -> list[Event]:
        """The last item has all of its text."""

    @abstractmethod
    def finish(self, reason: str, stop: int | str | None, usage: shapes.Usage) -> list[Event]:
        """The answer ends."""

    @abstractmethod
    def error(self, error: ApiError) -> Event:
        """The answer cannot go on."""
