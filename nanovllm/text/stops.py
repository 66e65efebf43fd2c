"""The text of one output and the strings that stop it: in the engine, which decides where it ends, and for its clients,
who see nothing that may yet turn out to begin a stop string."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence

from nanovllm.text.detokenizer import Detokenizer


def find_stop(text: str, stops: Sequence[str], num_fresh: int) -> tuple[int, str] | None:
    """Finds the stop string that the last `num_fresh` characters of the text complete: (where it begins, which one). Of
    several, the one that begins first; at the same place, the first in the list."""
    begin = len(text) - num_fresh + 1
    places = [(text.find(stop, max(0, begin - len(stop))), order) for order, stop in enumerate(stops)]
    at, order = min((place for place in places if place[0] >= 0), default=(-1, 0))
    return None if at < 0 else (at, stops[order])


class VisibleText:
    """The text of one output as a client may see it, token by token. The engine decides where it ends."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), include_stop: bool = False,
        stop_ids: Iterable[int] = (), tags: Mapping[int, str] | None = None,
    ) -> None:  # fmt: skip
        """`stop_ids`: tokens that end the text, before themselves unless `include_stop`. `tags`: texts that the engine
        sees, by the characters that stand for them here. A request may have a thousand outputs and 4,096 characters of
        stop strings, so nothing is made here of each of their beginnings."""
        self._detokenizer, self._stops, self._include = detokenizer, stops, include_stop
        self._hidden = frozenset(() if include_stop else stop_ids)
        self._sorted = sorted(stops)
        self._longest = max(map(len, stops), default=1) - 1
        self._ends = {stop[-1] for stop in stops}
        self._inner = "".join(stop[:-1] for stop in stops)
        """All characters that the beginning of a stop string may end with."""
        self._held = ""
        self._tags = tags or {}

    @property
    def push(self) -> Callable[[int], str]:
        """Takes a token in; returns the text that is certain now and was not before."""
        return self._push if self._inner else self._detokenizer.push

    def _push(self, token_id: int) -> str:
        fresh = self._detokenizer.push(token_id)
        return self._release(self._held + fresh) if fresh else ""

    def _release(self, text: str) -> str:
        seen = self._seen(text)
        end = at = len(seen)
        if seen and seen[-1] in self._inner:
            at = max(0, end - self._longest)
            while at < end and not self._begins(seen[at:]):
                at += 1
        at = self._place(text, at)
        self._held = text[at:]
        return text[:at]

    def _seen(self, text: str) -> str:
        """The text as the engine sees it."""
        return text.translate(self._tags) if self._tags and not text.isascii() else text

    def _place(self, text: str, at: int) -> int:
        """Index of the character that is at this place of what the engine sees."""
        if not self._tags or text.isascii():
            return at
        for index, character in enumerate(text):
            if at < (width := len(self._tags.get(ord(character), character))):
                return index
            at -= width
        return len(text)

    def _begins(self, text: str) -> bool:
        """Whether a stop string begins with the text and is longer."""
        place = bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)

    def end(self, token_id: int | None, reason: str, stop_reason: int | str | None) -> str:
        """Takes the end of the output in, with its last token if it has one; returns the rest of the text."""
        by_stop = reason == "stop"
        if token_id is not None and by_stop and isinstance(stop_reason, str) and self._stops:
            return self.watch(token_id)[0] + self._held
        is_hidden = by_stop and not isinstance(stop_reason, str) and token_id in self._hidden
        last = "" if token_id is None or is_hidden else self.push(token_id)
        return last + self._held + self._detokenizer.flush()

    def watch(self, token_id: int) -> tuple[str, str | None]:
        """Takes a token in that may complete a stop string; returns the text that is certain now and was not before,
        and that string, with which the text ends."""
        fresh = self._detokenizer.push(token_id)
        text, seen = self._held + fresh, self._seen(fresh)
        found = None if self._ends.isdisjoint(seen) else find_stop(self._seen(text), self._stops, len(seen))
        if found is None:
            return self._release(text) if fresh else "", None
        at, stop = found
        self._held = ""
        return text[: self._place(text, at + (len(stop) if self._include else 0))], stop


class StreamedText:
    """All text of one output as it grows, watched for stop strings."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), include_stop: bool = False) -> None:
        self._visible = VisibleText(detokenizer, stops, include_stop)
        self._pieces: list[str] = []
        self.stopped_by: str | None = None

    def push(self, token_id: int, watch: bool = True) -> bool:
        """Takes in a token; True where its text completes a stop string. `watch` False: none is looked for."""
        piece, self.stopped_by = self._visible.watch(token_id) if watch else (self._visible.push(token_id), None)
        self._pieces.append(piece)
        return self.stopped_by is not None

    def finish(self) -> str:
        """No more tokens: the whole text, an incomplete character in it as U+FFFD."""
        if self.stopped_by is None:
            self._pieces.append(self._visible.end(None, "length", None))
        return "".join(self._pieces)
