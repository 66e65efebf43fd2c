"""A fleet's engines, which are child processes or Ray actors: starts them, takes in their frames, gives up silent ones
and replaces lost ones; for the event loop of a server (serve/driver.py) and for threads (fleet_engine.py)."""

import threading
import time
from collections.abc import Callable
from typing import Any

from nanovllm.host import wire
from nanovllm.host.fleet import Fleet
from nanovllm.host.frame_reader import FrameReader
from nanovllm.host.handle import EXIT_GRACE, SILENCE, START_SILENCE, Handle, Lost

_LOOK_SECONDS = 1.0  # between two looks for silent engines
_AWAY_SECONDS = 5.0  # between two checks: an owner that was away so long cannot tell who was silent


class Engines:
    """Handles of all engines, and the Fleet that they form once all are ready. For one thread at a time."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        """Starts engines of this host at once, but those on Ray only by `start`. `options`: of EngineConfig."""
        self._model, self._options = model, options
        self.count = int(options.get("data_parallel_size", 1))
        backend = options.get("data_parallel_backend")
        self._on_ray = backend == "ray"
        self._has_failover = self.count > 1 or backend is not None
        self._make: Callable[[wire.Start], Handle] = Handle
        self._close_cluster: Callable[[], None] = lambda: None
        self.all: list[Handle] = []
        self.fleet: Fleet | None = None
        """Fleet of the engines, once all are ready."""
        self.ready: dict[int, wire.Ready] = {}
        """Last Ready of each engine, by its number."""
        self.reader = FrameReader()
        """Reader of all handles, whose `fileno` an event loop can watch."""
        self._percents: dict[int, int] = {}
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
                self.all.append(self._start(number))
        except BaseException:
            self.close(patience=0)
            raise

    def _start(self, number: int) -> Handle:
        handle = self._make(wire.Start(self._model, self._options, number))
        self.reader.watch(handle)
        return handle

    def _restart(self, number: int) -> None:
        self.all[number] = self._start(number)

    def _send(self, number: int, frames: list[wire.Down]) -> None:
        self.all[number].send(*frames)
        self.reader.note_sent(self.all[number])

    # -- frames -------------------------------------------------------------------------------------------------

    def read(self, timeout: float = 0.0) -> bool:
        """Reads what has arrived, after a wait of up to `timeout` seconds for something; returns whether `take` has
        something to do. Gives up engines that are silent for too long; to be called about once a second."""
        if time.monotonic() - self._last_look > _LOOK_SECONDS:
            self._check_silence()
        self.reader.read(timeout)
        return bool(self.reader.frames)

    def take(self) -> list[wire.Up | Lost]:
        """Handles what was read. Returns what the owner has to know: results of requests, Progress, Ready (once, of all
        engines together), and Lost where no engine is left, or where one cannot start."""
        found: list[wire.Up | Lost] = []
        while self.reader.frames:
            handle, frame = self.reader.frames.popleft()
            if self.fleet is None:
                found += self._take_start(handle, frame)
            elif self._take(self.fleet, handle, frame) is not None:
                found.append(Lost(self.fleet.ended or ""))
        if self.fleet is not None and self.fleet.requests.out:
            out, self.fleet.requests.out = self.fleet.requests.out, []
            found[:0] = out
        return found

    def _take_start(self, handle: Handle, frame: wire.Up | Lost) -> list[wire.Up | Lost]:
        if isinstance(frame, wire.Progress):
            self._percents[handle.number] = frame.percent
            return [frame] if frame.folder or frame.percent <= min(self._percents.values()) else []
        if isinstance(frame, wire.Ready):
            self.ready[handle.number] = frame
            return [self._form()] if len(self.ready) == self.count else []
        if isinstance(frame, Lost) and self._has_failover and frame.kind is None:
            frame = Lost(f"replica {handle.number} could not start: {frame.reason}")
        return [frame]

    def _form(self) -> wire.Ready:
        infos = [self.ready[number].info for number in range(self.count)]
        restart = self._restart if self._has_failover else None
        self.fleet = Fleet(infos, self._send, restart, lambda number, reason: self.all[number].give_up(reason))
        total = {name: sum(info[name] for info in infos) for name in ("max_num_seqs", "num_kv_tokens")}
        least = {"max_model_len": min(info["max_model_len"] for info in infos)}
        return wire.Ready({**infos[0], **total, **least, "data_parallel_size": len(infos)})

    def _take(self, fleet: Fleet, handle: Handle, frame: wire.Up | Lost) -> str | None:
        """Hands a frame of an engine, or its loss, to the fleet; returns why no engine is left, if none is."""
        is_current = self.all[handle.number] is handle
        if isinstance(frame, Lost):
            if self._has_failover:  # which may take seconds if its device is gone, while the others go on
                threading.Thread(target=handle.close, kwargs={"patience": 0.0}, daemon=True).start()
            if is_current:
                fleet.lose(handle.number, frame.reason)
        elif is_current:
            most = fleet.requests.max_total
            if isinstance(frame, wire.Ready) and (room := frame.info["max_model_len"]) < most:
                handle.give_up(f"restarted with room for {room} tokens a request, and {most} are served")
                return None
            if isinstance(frame, wire.Ready):
                self.ready[handle.number] = frame
            fleet.take(handle.number, frame)
        return fleet.ended

    def _check_silence(self) -> None:
        now = time.monotonic()
        away, self._last_look = now - self._last_look > _AWAY_SECONDS, now
        limit = START_SILENCE if self.fleet is None else SILENCE
        for handle in self.all:
            if away:
                handle.reset_silence()
            elif handle.silent_for() > limit:
                handle.give_up(f"gave no sign of life for {limit:.0f} s")

    def close(self, patience: float = EXIT_GRACE) -> None:
        """Ends all engines within `patience` seconds, and releases the Ray cluster."""
        deadline = time.monotonic() + patience
        self.reader.close()
        for handle in self.all:
            handle.request_exit()
        for handle in self.all:
            handle.close(max(0.0, deadline - time.monotonic()))
        self._close_cluster()
