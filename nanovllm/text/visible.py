"""The text of one output as a client may see it: nothing that may yet turn out to begin a stop string."""

from collections.abc import Sequence

from nanovllm.text.detokenizer import Detokenizer, find_stop


class VisibleText:
    """A Detokenizer that holds back what may begin one of `stops`. The engine decides where the text ends."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], include_stop: bool) -> None:
        self._detokenizer, self._stops, self._include = detokenizer, stops, include_stop
        self._prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._longest = max(map(len, self._prefixes), default=0)
        self._last_characters = {prefix[-1] for prefix in self._prefixes}
        self._held = ""

    def push(self, token_id: int) -> str:
        fresh = self._detokenizer.push(token_id)
        return self._release(self._held + fresh) if fresh else ""

    def _release(self, text: str) -> str:
        held = 0
        if text[-1] in self._last_characters:
            for length in range(min(self._longest, len(text)), 0, -1):
                if text[-length:] in self._prefixes:
                    held = length
                    break
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def stop(self, token_id: int) -> str:
        """The last visible text, where this token completes a stop string."""
        fresh = self._detokenizer.push(token_id)
        text = self._held + fresh
        found = find_stop(text, self._stops, len(fresh))
        if found is None:
            return text
        at, stop = found
        return text[: at + (len(stop) if self._include else 0)]

    def flush(self) -> str:
        return self._held + self._detokenizer.flush()
