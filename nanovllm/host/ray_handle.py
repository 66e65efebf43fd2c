"""An engine in an actor of a Ray cluster, and its handle."""

import queue
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray

from nanovllm.host import wire
from nanovllm.host.handle import SILENCE, Handle, Lost
from nanovllm.host.program import run
from nanovllm.processes.framing import FrameBuffer

_LARGE = 1 << 16  # bytes; larger messages go through Ray's object store
_LARGE_AHEAD = 2  # large messages that the actor may not have taken yet
_AHEAD = 2  # messages that the actor takes while its engine steps
_POLL_SECONDS = 1.0


class _QueueIntake:
    """Frames from another thread, which waits while the queue is full."""

    def __init__(self) -> None:
        self._packed: queue.Queue[bytes | None] = queue.Queue(_AHEAD)
        self._buffer = FrameBuffer()
        self._frames: deque[wire.Down] = deque()

    def put(self, packed: bytes) -> None:
        """Queues packed frames; b"" means that the driver has left."""
        self._packed.put(packed)

    def next(self, seconds: float) -> wire.Down | None:
        if not self._frames:
            try:
                packed = self._packed.get(block=seconds > 0, timeout=seconds or None)
            except queue.Empty:
                return None
            if packed == b"":
                self._packed.put(packed)  # for the next call
                raise EOFError
            if packed is not None:
                self._frames += map(wire.down_decoder.decode, self._buffer.feed(packed))
        return self._frames.popleft() if self._frames else None

    def wake(self) -> None:
        with suppress(queue.Full):  # then the host wakes anyway
            self._packed.put_nowait(None)


class EngineActor:
    """Actor that runs an engine, whose ranks are beside it."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._intake = _QueueIntake()
        self._has_ended = False
        threading.Thread(target=self._run, name="nanovllm-host", daemon=True).start()

    def _run(self) -> None:
        try:
            run(lambda frame: self._said.put(wire.pack(frame)), self._intake)
        finally:
            self._has_ended = True

    @ray.method(concurrency_group="down")
    def handle(self, packed: bytes) -> None:
        """Takes frames of the driver."""
        self._intake.put(packed)

    @ray.method(concurrency_group="up")
    def poll(self) -> bytes | None:
        """Returns the engine's frames since the last call, after waiting a moment for some; None if it has ended."""
        said = []
        ended = self._has_ended
        try:
            said.append(self._said.get(timeout=0.0 if ended else _POLL_SECONDS))
            while True:
                said.append(self._said.get_nowait())
        except (queue.Empty, ValueError):
            pass
        return None if ended and not said else b"".join(said)


class RayHandle(Handle):
    """An engine in an actor, on the node of its bundle. Calls of Ray may block, so one thread starts and polls the
    actor, another one sends to it, and a third may kill it."""

    def __init__(self, start: wire.Start, placed: dict[str, Any]) -> None:
        """`placed`: options of the actor that place it on its node."""
        super().__init__(start.number)
        self._placed = placed
        self._started: Future[Any] = Future()
        """The actor, or the error of its start."""
        self._to_send: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        """Packed frames for the sending thread; b"" asks the engine to exit."""
        self._counts = threading.Lock()
        self._ended = threading.Event()
        self._said: queue.SimpleQueue[bytes | str] = queue.SimpleQueue()
        """Packed frames of the engine, and last the reason of its end as a str."""
        self._rings, self._bell = socket.socketpair()
        self._rings.setblocking(False)
        self._bell.setblocking(False)
        self.send(start)
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._listen, self._send_on)]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        return self._rings.fileno()

    def _send(self, packed: bytes) -> None:
        if not self._ended.is_set():
            self._count_unsent(len(packed))
            self._to_send.put(packed)

    def _count_unsent(self, more: int) -> None:
        with self._counts:
            self.backlog += more

    def _send_on(self) -> None:
        """Sends frames until the engine has ended, with a bound on large ones that the actor has not taken."""
        large: deque[Any] = deque()
        while self._started.exception() is None and not self._ended.is_set():
            packed = self._to_send.get()
            actor = self._started.result()
            try:
                if len(packed) < _LARGE:
                    actor.handle.remote(packed)
                else:
                    large.append(actor.handle.remote(ray.put(packed)))
                while len(large) > _LARGE_AHEAD and not self._ended.is_set():
                    if ray.wait([large[0]], timeout=_POLL_SECONDS)[0]:
                        large.popleft()
            except Exception as error:  # the engine would miss frames
                self.give_up(f"cannot be sent to: {_told(error)}")
            self._count_unsent(-len(packed))

    def receive(self) -> "list[wire.Up | Lost]":
        with suppress(BlockingIOError):
            self._rings.recv(4096)
        frames: list[wire.Up | Lost] = []
        with suppress(queue.Empty):
            while True:
                said = self._said.get_nowait()
                if isinstance(said, str):
                    frames.append(self._lost(said))
                    break
                frames += self._complete(said)
        return frames

    def _kill(self) -> None:
        self._threads.append(threading.Thread(target=self._kill_actor, daemon=True))
        self._threads[-1].start()

    def _kill_actor(self) -> None:
        """Kills the actor, once it has been started."""
        if self._started.exception() is None:
            ray.kill(self._started.result())

    def _start(self) -> None:
        options = {"concurrency_groups": {"down": 1, "up": 1}, "max_restarts": 0, "max_task_retries": 0}
        try:
            actor: Any = ray.remote(**options, **self._placed)(EngineActor)  # type: ignore[call-overload,unused-ignore]
            self._started.set_result(actor.remote())
        except Exception as error:
            self._started.set_exception(error)

    def _listen(self) -> None:
        self._start()
        reason: str | None = None
        while reason is None:
            try:
                said = ray.get(self._started.result().poll.remote(), timeout=SILENCE)
                self._heard = time.monotonic()
                if said is None:
                    reason = "ended"
                elif said:
                    self._put(said)
            except ray.exceptions.GetTimeoutError:
                reason = f"gave no sign of life for {SILENCE:.0f} s"
            except Exception as error:  # ActorDiedError, and what Ray raises where a node is lost
                reason = _told(error)
        self._ended.set()
        self._to_send.put(b"")  # ends the sending thread
        self._put(reason)

    def _put(self, said: bytes | str) -> None:
        self._said.put(said)
        with suppress(OSError):  # it rings already, or is closed
            self._bell.send(b"!")

    def request_exit(self) -> None:
        self._to_send.put(b"")

    def _close(self, patience: float) -> None:
        self._ended.wait(patience)
        self._kill()
        for thread in self._threads:
            thread.join(5.0)
        self._rings.close()
        self._bell.close()


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
