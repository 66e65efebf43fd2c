"""Forecast of when the running step ends. The next step is scheduled shortly before that, not as soon as possible, so
that it includes requests which arrive in the meantime."""

import time
from collections.abc import Callable

from nanovllm.engine.schedule import Schedule

_MARGIN = 0.001  # seconds
_MARGIN_PER_ROW = 4e-6  # seconds that the host takes to schedule and launch a row
_LOOK = 1e-4  # seconds between two looks at the device
_ROWS = 8  # steps whose numbers of rows differ by less than this share a forecast
_FORGETTING = 0.1


class StepClock:
    """Learns how long steps of decodes take. Steps with prompt tokens vary too much, so there is no wait after them."""

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """`now` (seconds) and `sleep` are replaced by tests."""
        self._now, self._sleep = now, sleep
        self._seconds: dict[int, float] = {}
        """Seconds of a step by its number of rows // _ROWS: about the minimum of recent steps."""
        self._running: int | None = None
        self._begin = 0.0

    def wait(self, has_ended: Callable[[], bool]) -> None:
        """Sleeps until it is time to schedule the next step, or until `has_ended` returns True."""
        rows = self._running
        if rows is None or (seconds := self._seconds.get(rows // _ROWS)) is None:
            return
        until = self._begin + seconds - _MARGIN - _MARGIN_PER_ROW * rows
        while (rest := until - self._now()) > 0 and not has_ended():
            self._sleep(min(rest, _LOOK))

    def note(self, schedule: Schedule | None) -> None:
        """Notes that a step has just ended and that `schedule`, if any, runs now."""
        now = self._now()
        if self._running is not None:
            size, seconds = self._running // _ROWS, now - self._begin
            before = self._seconds.get(size, seconds)
            self._seconds[size] = min(seconds, before + _FORGETTING * (seconds - before))
        decodes_only = schedule is not None and not schedule.host_token_ids
        self._running = schedule.num_decode_rows * schedule.places if schedule is not None and decodes_only else None
        self._begin = now
