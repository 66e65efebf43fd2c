"""The server's engines: started as children or on a Ray cluster, driven through one Fleet in the event loop."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from nanovllm.engine.calls import EngineState
from nanovllm.host import wire
from nanovllm.host.fleet import Fleet
from nanovllm.host.handle import MODULE, SILENCE, ChildHandle, Handle, Lost, close_all
from nanovllm.serve.streams import Streams

logger = logging.getLogger("nanovllm.serve")
_LOOK_SECONDS = 1.0
_AWAY_SECONDS = 5.0  # without a look: what was not heard then says nothing


class Launch:
    """The handles of all engines, and how one that was lost is started again."""

    def __init__(self, model: str, options: dict[str, Any], module: str = MODULE) -> None:
        """Starts engines of this host at once, while the server imports; those of Ray by `start`. `module`: what
        children run."""
        self._model, self._options, self._module = model, options, module
        self.count = int(options.get("data_parallel_size", 1))
        self.has_failover = self.count > 1 or options.get("data_parallel_backend") is not None
        self._on_ray = options.get("data_parallel_backend") == "ray"
        self._make: Callable[[wire.Start], Handle] = lambda start: ChildHandle(start, self._module)
        self._close_cluster: Callable[[], None] = lambda: None
        self.handles: list[Handle] = [] if self._on_ray else [self.make(number) for number in range(self.count)]

    def start(self) -> None:
        """Reaches the Ray cluster where there is one to be, which may take a minute. Raises as start_ray does."""
        if self._on_ray:
            from nanovllm.config import EngineConfig
            from nanovllm.host.ray_start import reserve

            config = EngineConfig.from_options(self._model, **self._options)
            self._make, self._close_cluster = reserve(config)
            self.handles = [self.make(number) for number in range(self.count)]

    def make(self, number: int, num_blocks: int | None = None) -> Handle:
        """`num_blocks`: of the KV cache, as was counted on, where the engine takes the place of one that was lost."""
        options = self._options if num_blocks is None else {**self._options, "num_kvcache_blocks": num_blocks}
        return self._make(wire.Start(self._model, options, number))

    def close(self) -> None:
        """Ends all engines, those of one process waiting for none of the others."""
        close_all(self.handles)
        self._close_cluster()


class Engines:
    """Frames in, frames out, in the event loop."""

    def __init__(
        self, launch: Launch, streams: Streams, on_frame: Callable[[wire.Up], None],
        on_end: Callable[[Lost], None],
    ) -> None:  # fmt: skip
        """`on_frame`: gets what is not about steps; Ready once, of all engines together. `on_end`: no engine is
        left."""
        self._launch, self._streams, self._on_frame, self._on_end = launch, streams, on_frame, on_end
        self._loop = asyncio.get_running_loop()
        self.fleet: Fleet | None = None
        """Fleet of the engines, once all are ready."""
        self._ready: dict[int, wire.Ready] = {}
        self._percents: dict[int, int] = {}
        self._has_ended = False
        self._calls: set[asyncio.Future[None]] = set()
        """Calls that are not answered yet."""
        self._last_look = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def listen(self) -> None:
        """Starts to take in the engines' frames."""
        for handle in self._launch.handles:
            self._watch(handle)
        self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)

    def _watch(self, handle: Handle) -> None:
        handle.on_room = self._on_room
        self._loop.add_reader(handle.fileno(), self._read, handle)

    def _on_room(self, handle: Handle, waits: bool) -> None:
        if waits:
            self._loop.add_writer(handle.fileno(), handle.flush)
        else:
            self._loop.remove_writer(handle.fileno())

    def _forget(self, handle: Handle) -> None:
        self._loop.remove_reader(handle.fileno())
        self._loop.remove_writer(handle.fileno())

    # -- in -----------------------------------------------------------------------------------------------------

    def _read(self, handle: Handle) -> None:
        """All frames that are there are taken in first, so that each stream gets one chunk of them."""
        fleet, now = self.fleet, self._loop.time()
        for frame in handle.receive():
            if isinstance(frame, Lost):
                self._lose(handle, frame)
            elif fleet is None:
                self._take_start(handle.number, frame)
                fleet = self.fleet
            else:
                fleet.take(handle.number, frame)
        self._hand_out(now)
        self._streams.flush(now)

    def _hand_out(self, now: float) -> None:
        if self.fleet is None or not self.fleet.out:
            return
        frames, self.fleet.out = self.fleet.out, []
        for frame in frames:
            if isinstance(frame, wire.Step):
                self._streams.take(frame, now)
            else:
                self._on_frame(frame)

    def _take_start(self, number: int, frame: wire.Up) -> None:
        if isinstance(frame, wire.Progress):
            self._percents[number] = frame.percent
            if frame.folder or frame.percent <= min(self._percents.values()):
                self._on_frame(frame)
        elif isinstance(frame, wire.Ready):
            self._ready[number] = frame
            if len(self._ready) == self._launch.count:
                self._become_ready()

    def _become_ready(self) -> None:
        infos = [self._ready[number].info for number in range(self._launch.count)]
        restart = self._restart if self._launch.has_failover else None
        self.fleet = Fleet(infos, self._send, restart)
        total = {name: sum(info[name] for info in infos) for name in ("max_num_seqs", "num_kv_tokens")}
        least = {"max_model_len": min(info["max_model_len"] for info in infos)}
        self._on_frame(wire.Ready({**infos[0], **total, **least, "data_parallel_size": len(infos)}))

    def _lose(self, handle: Handle, lost: Lost) -> None:
        self._forget(handle)
        if self.fleet is not None:
            if self._launch.has_failover:
                handle.close(patience=0)
            self.fleet.lose(handle.number, lost.reason)
            if self.fleet.ended is None:
                return
            lost = Lost(self.fleet.ended)
        elif self._launch.count > 1 and lost.kind is None:
            lost = Lost(f"replica {handle.number} could not start: {lost.reason}")
        if not self._has_ended:
            self._has_ended = True
            self._on_end(lost)

    def _restart(self, number: int) -> None:
        info = self._ready[number].info
        handle = self._launch.make(number, info["num_kv_tokens"] // info["block_size"])
        self._launch.handles[number] = handle
        self._watch(handle)

    def _look(self) -> None:
        """Gives up engines that are silent for too long; called once a second."""
        now = self._loop.time()
        away = now - self._last_look > _AWAY_SECONDS
        self._last_look = now
        for handle in self._launch.handles:
            if away:
                handle.heard()
            elif handle.silent_for() > SILENCE:
                handle.give_up(f"gave no sign of life for {SILENCE:.0f} s")
        self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)

    # -- out ----------------------------------------------------------------------------------------------------

    def _send(self, number: int, frames: list[wire.Down]) -> None:
        handle = self._launch.handles[number]
        for frame in frames:
            handle.send(frame)

    def add(self, request_id: int, prompt: bytes, params: dict[str, Any]) -> None:
        """Queues a request; `bind` sends it."""
        assert self.fleet is not None
        self.fleet.add(request_id, prompt, params)

    def bind(self) -> None:
        """Sends what was added, as far as engines have room."""
        assert self.fleet is not None
        self.fleet.bind()

    def abort(self, request_id: int) -> None:
        """Ends a request early."""
        if self.fleet is not None:
            self.fleet.abort(request_id)
            if self.fleet.out:  # it was with no engine
                self._loop.call_soon(self._hand_out_late)

    def _hand_out_late(self) -> None:
        now = self._loop.time()
        self._hand_out(now)
        self._streams.flush(now)

    async def call(self, name: str, **options: Any) -> Any:
        """Runs a call of engine/calls.py and returns the engines' answer. Raises as they do, or as `fail` says."""
        assert self.fleet is not None
        pending = self.fleet.call(name, options)
        self._loop.call_soon(self._hand_out_late)
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
        return min((handle.silent_for() for handle in self._launch.handles), default=0.0)

    @property
    def state(self) -> EngineState:
        """State of the engines that calls change."""
        return EngineState() if self.fleet is None else self.fleet.state

    def close(self) -> None:
        """Lets the engines go: they end in order."""
        if self._timer is not None:
            self._timer.cancel()
        for handle in self._launch.handles:
            self._forget(handle)
            handle.leave()
