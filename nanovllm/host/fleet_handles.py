"""Handles of a fleet's engines, which are child processes or Ray actors: starts them, gives up silent ones and replaces
lost ones. Their frames are read by the event loop of a server (serve/engines.py) or by a thread (frame_reader.py)."""

import threading
import time
from collections.abc import Callable
from typing import Any

from nanovllm.host import wire
from nanovllm.host.fleet import Fleet
from nanovllm.host.handle import EXIT_GRACE, SILENCE, ChildHandle, Handle, Lost

_AWAY_SECONDS = 5.0  # between two checks: an owner that was away so long cannot tell who was silent


class FleetHandles:
    """Handles of all engines, and the Fleet that they form once all are ready."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        """Starts engines of this host at once, but those on Ray only by `start`. `options`: of EngineConfig."""
        self._model, self._options = model, options
        self.count = int(options.get("data_parallel_size", 1))
        backend = options.get("data_parallel_backend")
        self._on_ray = backend == "ray"
        self._has_failover = self.count > 1 or backend is not None
        self._make: Callable[[wire.Start], Handle] = ChildHandle
        self._close_cluster: Callable[[], None] = lambda: None
        self.watch: Callable[[Handle], None] = lambda handle: None
        """Called with a handle whose frames are to be read."""
        self.forget: Callable[[Handle], None] = lambda handle: None
        """Called with a handle whose frames need no longer be read."""
        self.all: list[Handle] = []
        self._ready: dict[int, wire.Ready] = {}
        self._last_look = time.monotonic()
        if not self._on_ray:
            self._start_all()

    def start(self) -> None:
        """Connects to the Ray cluster if there is one, which may take a minute. Raises as ray_cluster.reserve does."""
        if self._on_ray:
            from nanovllm.config import EngineConfig
            from nanovllm.host.ray_cluster import reserve

            self._make, self._close_cluster = reserve(EngineConfig.from_options(self._model, **self._options))
            self._start_all()

    def _start_all(self) -> None:
        try:
            for number in range(self.count):
                self.all.append(self._make(wire.Start(self._model, self._options, number)))
        except BaseException:
            self.close(patience=0)
            raise

    def take_start(self, handle: Handle, frame: wire.Up | Lost) -> list[wire.Ready] | Lost | None:
        """Handles a frame before the fleet is formed. Returns the Ready frames of all engines, by number, once there
        are all of them; Lost if an engine cannot start; else None."""
        if isinstance(frame, wire.Ready):
            self._ready[handle.number] = frame
            if len(self._ready) == self.count:
                return [self._ready[number] for number in range(self.count)]
        elif isinstance(frame, Lost):
            if self._has_failover and frame.kind is None:
                return Lost(f"replica {handle.number} could not start: {frame.reason}")
            return frame
        return None

    def form(self, ready: list[wire.Ready]) -> Fleet:
        """Forms the fleet. `ready`: as take_start returned it."""
        restart = self._restart if self._has_failover else None
        self.fleet = Fleet([one.info for one in ready], self._send, restart, self._give_up)
        return self.fleet

    def _send(self, number: int, frames: list[wire.Down]) -> None:
        self.all[number].send(*frames)

    def _restart(self, number: int) -> None:
        self.all[number] = handle = self._make(wire.Start(self._model, self._options, number))
        self.watch(handle)

    def _give_up(self, number: int, reason: str) -> None:
        self.all[number].give_up(reason)

    def take(self, handle: Handle, frame: wire.Up | Lost) -> None:
        """Hands a frame of an engine, or its loss, to the fleet."""
        is_current = self.all[handle.number] is handle
        if isinstance(frame, Lost):
            self.forget(handle)
            if self._has_failover:  # which may take seconds if its device is gone, while the others go on
                threading.Thread(target=handle.close, kwargs={"patience": 0.0}, daemon=True).start()
            if is_current:
                self.fleet.lose(handle.number, frame.reason)
        elif isinstance(frame, wire.Ready) and (
            (room := frame.info["max_model_len"]) < (most := self.fleet.requests.max_total)
        ):
            handle.give_up(f"restarted with room for {room} tokens a request, and {most} are served")
        elif is_current:
            self.fleet.take(handle.number, frame)

    def check_silence(self) -> None:
        """Gives up engines that have been silent for too long; to be called about once a second."""
        now = time.monotonic()
        away, self._last_look = now - self._last_look > _AWAY_SECONDS, now
        for handle in self.all:
            if away:
                handle.reset_silence()
            elif handle.silent_for() > SILENCE:
                handle.give_up(f"gave no sign of life for {SILENCE:.0f} s")

    def close(self, patience: float = EXIT_GRACE) -> None:
        """Ends all engines within `patience` seconds, and releases the Ray cluster."""
        deadline = time.monotonic() + patience
        for handle in self.all:
            handle.request_exit()
        for handle in self.all:
            handle.close(max(0.0, deadline - time.monotonic()))
        self._close_cluster()
