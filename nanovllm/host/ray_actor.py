"""An engine in an actor of a Ray cluster. Its bytes are carried between a socket there and one here, so that the engine
and its handle are those of a child process."""

import socket
import subprocess
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray

from nanovllm.host.handle import SILENCE
from nanovllm.host.program import DriverLink, run

_PIECE = 1 << 20  # bytes that are carried at once
_LARGE = 1 << 16  # bytes; larger pieces go through Ray's object store
_LARGE_AHEAD = 2  # large pieces that the actor may not have taken yet
_POLL_SECONDS = 1.0


class EngineActor:
    """Actor that runs an engine, whose ranks are beside it."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair()
        threading.Thread(target=self._run, args=(theirs,), name="nanovllm-host", daemon=True).start()

    def _run(self, link: socket.socket) -> None:
        with link:
            driver = DriverLink(link)
            threading.Thread(target=driver.live, name="nanovllm-life", daemon=True).start()
            run(driver.send, driver)

    @ray.method(concurrency_group="down")
    def handle(self, data: bytes) -> None:
        """Takes bytes of the driver; none: it has left."""
        with suppress(OSError):  # the engine has ended
            self._link.sendall(data)
            if not data:
                self._link.shutdown(socket.SHUT_WR)

    @ray.method(concurrency_group="up")
    def poll(self) -> bytes:
        """Returns bytes of the engine, which come once a second at least; none: it has ended."""
        return self._link.recv(_PIECE)


class ActorProcess:
    """An actor as a process of a Handle. Calls of Ray may block, so one thread starts the actor and carries what its
    engine says, another one carries what the driver says, and a third may kill it."""

    def __init__(self, placed: dict[str, Any], link: socket.socket) -> None:
        """`placed`: options of the actor that place it on its node. `link`: to the handle."""
        self._placed, self._link = placed, link
        self._started: Future[Any] = Future()
        """The actor, or the error of its start."""
        self._how: str | None = None
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._carry_up, self._carry_down)]
        for thread in self._threads:
            thread.start()

    def _start(self) -> None:
        options = {"concurrency_groups": {"down": 1, "up": 1}, "max_restarts": 0, "max_task_retries": 0}
        try:
            actor: Any = ray.remote(**options, **self._placed)(EngineActor)  # type: ignore[call-overload,unused-ignore]
            self._started.set_result(actor.remote())
        except Exception as error:
            self._started.set_exception(error)

    def _carry_up(self) -> None:
        """Carries what the engine says until it has ended, whose actor goes then."""
        self._start()
        try:
            while said := ray.get(self._started.result().poll.remote(), timeout=SILENCE):
                self._link.sendall(said)
            how = "ended"
        except ray.exceptions.GetTimeoutError:
            how = f"gave no sign of life for {SILENCE:.0f} s"
        except Exception as error:  # ActorDiedError, and what Ray raises where a node is lost
            how = _told(error)
        self._how = self._how or how
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)  # ends the other thread, and tells the handle
        self._kill()

    def _carry_down(self) -> None:
        """Carries what the driver says until it has left, with a bound on large pieces that the actor has not taken."""
        if self._started.exception() is not None:
            return
        actor, data = self._started.result(), None
        large: deque[Any] = deque()
        try:
            while data != b"":
                data = self._link.recv(_PIECE)
                if len(data) < _LARGE:
                    actor.handle.remote(data)
                else:
                    large.append(actor.handle.remote(ray.put(data)))
                while len(large) > _LARGE_AHEAD and self._how is None:
                    if ray.wait([large[0]], timeout=_POLL_SECONDS)[0]:
                        large.popleft()
        except Exception as error:  # the engine would miss frames
            self._how = f"cannot be sent to: {_told(error)}"
            self._kill()

    def poll(self) -> str | None:
        """Returns how it has ended; None while it runs."""
        return self._how

    def wait(self, timeout: float | None = None) -> None:
        """Waits until both threads are done. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + (timeout or 0.0)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise subprocess.TimeoutExpired("actor", timeout or 0.0)
        self._link.close()

    def kill(self) -> None:
        """Kills the actor, once it has been started."""
        threading.Thread(target=self._kill, daemon=True).start()

    def _kill(self) -> None:
        if self._started.exception() is None:
            ray.kill(self._started.result())


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
