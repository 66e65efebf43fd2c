"""The server's engines, driven in the event loop."""

import asyncio
from collections.abc import Callable
from typing import Any

from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.engine_stats import EngineStats
from nanovllm.engine.step import Step
from nanovllm.host import wire
from nanovllm.host.engines import Engines
from nanovllm.host.fleet import Fleet
from nanovllm.host.handle import END_SECONDS, Lost
from nanovllm.serve.book import Book

_LOOK_SECONDS = 1.0


class Driver:
    """Frames in, frames out, in the event loop."""

    def __init__(
        self, engines: Engines, book: Book, on_frame: Callable[[wire.Up], None], on_end: Callable[[Lost], None]
    ) -> None:
        """`on_frame`: gets what is not about steps; Ready once, of all engines together. `on_end`: no engine is
        left."""
        self._engines, self._book, self._on_frame, self._on_end = engines, book, on_frame, on_end
        self._loop = asyncio.get_running_loop()
        self._calls: set[asyncio.Future[None]] = set()
        """Calls that are not answered yet."""
        self._timer: asyncio.TimerHandle | None = None
        """Lets silent engines be noticed, and how one has ended."""

    @property
    def fleet(self) -> Fleet | None:
        """Fleet of the engines, once all are ready."""
        return self._engines.fleet

    def listen(self) -> None:
        """Starts to take in the engines' frames."""
        self._loop.add_reader(self._engines.reader.fileno(), self._poll)
        self._poll()

    def _poll(self) -> None:
        """All frames that are there are taken in first, so that each stream gets one chunk of them."""
        self._engines.read()
        self._hand_out()
        if self._timer is not None:
            self._timer.cancel()
        seconds = END_SECONDS if self._engines.reader.is_ending else _LOOK_SECONDS
        self._timer = self._loop.call_later(seconds, self._poll)

    def _hand_out(self) -> None:
        now = self._loop.time()
        for frame in self._engines.take():
            if isinstance(frame, Step):
                self._book.take(frame, now)
            elif isinstance(frame, Lost):
                self._on_end(frame)
            else:
                self._on_frame(frame)
        self._book.flush(now)

    def abort(self, request_id: int) -> None:
        """Ends a request early."""
        if self.fleet is not None:
            self.fleet.requests.abort(request_id)
            if self.fleet.requests.out:  # it was with no engine
                self._loop.call_soon(self._hand_out)

    async def call(self, name: str, **options: Any) -> Any:
        """Runs a call of engine/calls.py and returns the engines' answer. Raises as they do, or as `fail` says."""
        assert self.fleet is not None
        answered: asyncio.Future[None] = self._loop.create_future()
        pending = self.fleet.call(
            name, options, on_done=lambda _: None if answered.done() else answered.set_result(None)
        )
        self._loop.call_soon(self._hand_out)
        if pending.waiting:
            self._calls.add(answered)
            try:
                await answered
            finally:
                self._calls.discard(answered)
        return pending.result()

    def fail(self, error: Exception) -> None:
        """Raised by all calls that wait."""
        for answered in self._calls:
            if not answered.done():
                answered.set_exception(error)

    @property
    def silent_for(self) -> float:
        """Seconds since the last sign of life of the engine that said something last."""
        return min((handle.silent_for() for handle in self._engines.all), default=0.0)

    @property
    def state(self) -> EngineState:
        """State of the engines that calls change."""
        return EngineState() if self.fleet is None else self.fleet.state

    @property
    def stats(self) -> EngineStats:
        """Gauges and counters of the engines."""
        return EngineStats() if self.fleet is None else self.fleet.requests.stats()

    def close(self) -> None:
        """Lets the engines go: they end in order."""
        if self._timer is not None:
            self._timer.cancel()
            self._loop.remove_reader(self._engines.reader.fileno())
        for handle in self._engines.all:
            handle.request_exit()
