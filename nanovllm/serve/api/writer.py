"""Base of answers in other dialects than chat completions: items that grow one after the other."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Literal

from nanovllm.serve.parsers import Delta

Event = dict[str, Any]
"""An event's data; its "type" is the event's name."""
Kind = Literal["content", "reasoning", "arguments"]


class Writer(ABC):
    """One answer: its items, as they grow and as a whole."""

    whole: dict[str, Any]
    """The answer, once it is finished."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: tuple[Kind, int] | None = None
        """Kind and call of the last item, while it grows."""
        self._pieces: list[str] = []

    def write(self, deltas: Iterable[Delta]) -> list[Event]:
        """Adds to the answer; returns what it has gained, as events."""
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

    @abstractmethod
    def begin(self, kind: Kind, delta: Delta) -> list[Event]:
        """Adds an item."""

    @abstractmethod
    def gain(self, kind: Kind, text: str) -> list[Event]:
        """The last item has gained text."""

    @abstractmethod
    def close(self, kind: Kind, text: str, is_complete: bool) -> list[Event]:
        """The last item has all of its text."""
