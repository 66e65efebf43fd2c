"""The server's engines, driven through one Fleet in the event loop."""

import asyncio
from collections.abc import Callable
from typing import Any

from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.step import Step
from nanovllm.host import wire
from nanovllm.host.fleet import Fleet
from nanovllm.host.fleet_handles import FleetHandles
from nanovllm.host.handle import END_SECONDS, Handle, Lost
from nanovllm.serve.streams import Streams

_LOOK_SECONDS = 1.0


class Engines:
    """Frames in, frames out, in the event loop."""

    def __init__(
        self, handles: FleetHandles, streams: Streams, on_frame: Callable[[wire.Up], None],
        on_end: Callable[[Lost], None],
    ) -> None:  # fmt: skip
        """`on_frame`: gets what is not about steps; Ready once, of all engines together. `on_end`: no engine is
        left."""
        self._handles, self._streams, self._on_frame, self._on_end = handles, streams, on_frame, on_end
        self._loop = asyncio.get_running_loop()
        self.fleet: Fleet | None = None
        """Fleet of the engines, once all are ready."""
        self._percents: dict[int, int] = {}
        self._has_ended = False
        self._calls: set[asyncio.Future[None]] = set()
        """Calls that are not answered yet."""
        self._timer: asyncio.TimerHandle | None = None

    def listen(self) -> None:
        """Starts to take in the engines' frames."""
        self._handles.watch, self._handles.forget = self._watch, self._forget
        for handle in self._handles.all:
            self._watch(handle)
        self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)

    def _watch(self, handle: Handle) -> None:
        handle.on_backlog = self._on_backlog
        self._loop.add_reader(handle.fileno(), self._read, handle)

    def _on_backlog(self, handle: Handle, waits: bool) -> None:
        if waits:
            self._loop.add_writer(handle.fileno(), handle.flush)
        else:
            self._loop.remove_writer(handle.fileno())

    def _forget(self, handle: Handle) -> None:
        if (fd := handle.fileno()) >= 0:  # else it is closed
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)

    # -- in -----------------------------------------------------------------------------------------------------

    def _read(self, handle: Handle) -> None:
        """All frames that are there are taken in first, so that each stream gets one chunk of them."""
        for frame in handle.receive():
            if self.fleet is None:
                self._take_start(handle, frame)
                continue
            self._handles.take(handle, frame)
            if self.fleet.ended is not None:
                self._end(Lost(self.fleet.ended))
        self._hand_out()
        if handle.is_ending and self._loop.remove_reader(handle.fileno()):
            self._look_at_end(handle)

    def _look_at_end(self, handle: Handle) -> None:
        """Looks until it is known how an engine has ended whose connection has."""
        self._read(handle)
        if handle.is_ending:
            self._loop.call_later(END_SECONDS, self._look_at_end, handle)

    def _hand_out(self) -> None:
        if self.fleet is None or not self.fleet.requests.out:
            return
        now = self._loop.time()
        frames, self.fleet.requests.out = self.fleet.requests.out, []
        for frame in frames:
            if isinstance(frame, Step):
                self._streams.take(frame, now)
            else:
                self._on_frame(frame)
        self._streams.flush(now)

    def _take_start(self, handle: Handle, frame: wire.Up | Lost) -> None:
        if isinstance(frame, wire.Progress):
            self._percents[handle.number] = frame.percent
            if frame.folder or frame.percent <= min(self._percents.values()):
                self._on_frame(frame)
        found = self._handles.take_start(handle, frame)
        if isinstance(found, Lost):
            self._forget(handle)
            self._end(found)
        elif found is not None:
            self._become_ready(found)

    def _become_ready(self, ready: list[wire.Ready]) -> None:
        self.fleet = self._handles.form(ready)
        infos = [one.info for one in ready]
        total = {name: sum(info[name] for info in infos) for name in ("max_num_seqs", "num_kv_tokens")}
        least = {"max_model_len": min(info["max_model_len"] for info in infos)}
        self._on_frame(wire.Ready({**infos[0], **total, **least, "data_parallel_size": len(infos)}))

    def _end(self, lost: Lost) -> None:
        """Ends the server: no engine is left."""
        if not self._has_ended:
            self._has_ended = True
            self._on_end(lost)

    def _look(self) -> None:
        """Gives up engines that are silent for too long, and looks for frames of all; called once a second. (uvloop
        tells only once of a connection that was reset, when the engine's exit code may not be there yet.)"""
        self._handles.check_silence()
        for handle in [*self._handles.all]:
            self._read(handle)
        self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)

    # -- out ----------------------------------------------------------------------------------------------------

    def abort(self, request_id: int) -> None:
        """Ends a request early."""
        if self.fleet is not None:
            self.fleet.requests.abort(request_id)
            if self.fleet.requests.out:  # it was with no engine
                self._loop.call_soon(self._hand_out)

    async def call(self, name: str, **options: Any) -> Any:
        """Runs a call of engine/calls.py and returns the engines' answer. Raises as they do, or as `fail` says."""
        assert self.fleet is not None
        pending = self.fleet.call(name, options)
        self._loop.call_soon(self._hand_out)
        if pending.waiting:
            answered: asyncio.Future[None] = self._loop.create_future()
            self._calls.add(answered)
            pending.on_done = lambda: None if answered.done() else answered.set_result(None)
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
        return min((handle.silent_for() for handle in self._handles.all), default=0.0)

    @property
    def state(self) -> EngineState:
        """State of the engines that calls change."""
        return EngineState() if self.fleet is None else self.fleet.state

    def close(self) -> None:
        """Lets the engines go: they end in order."""
        if self._timer is not None:
            self._timer.cancel()
        for handle in self._handles.all:
            self._forget(handle)
            handle.request_exit()
