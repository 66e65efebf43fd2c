"""Handle of an engine in another process, for its driver."""

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from nanovllm.host import wire
from nanovllm.processes.child import Process, end, socket_pair, start_python
from nanovllm.processes.framing import READ_BYTES, FrameBuffer

MODULE = "nanovllm.host.program"
"""Module that an engine's process runs. Benchmarks replace it by a simulator."""
SILENCE = 60.0
"""Seconds without a sign of life after which an engine is given up. One is due every second."""
START_SILENCE = 300.0
"""The same while engines start: loading a library from a slow disk holds the interpreter, which sends nothing."""
END_SECONDS = 0.01
"""Seconds between two looks at an engine that `is_ending`."""
EXIT_GRACE = 6.0
"""Seconds for an engine to end its ranks and exit."""
SOCKET_BYTES = 4 << 20  # send buffer of a socket
_EXIT_SECONDS = 2.0  # for a process to end after its connection has
_ROUSE = wire.pack(wire.Rouse())


@dataclass(frozen=True)
class Lost:
    """End of an engine and its reason: the last item that its handle returns."""

    reason: str
    kind: type[Exception] | None = None
    """Exception to raise if it was the user's mistake, else None."""


class Handle:
    """An engine in another process. For one thread at a time; `rouse` and `close` may be called from any."""

    def __init__(self, start: wire.Start, start_process: Callable[[socket.socket], Process] | None = None) -> None:
        """`start_process`: takes over the engine's end of the connection; None: starts a child process. A thread calls
        it: that may take long where memory is short."""
        self.number = start.number
        self._socket, theirs = socket_pair()
        starter = ThreadPoolExecutor(1)
        self._started: Future[Process] = starter.submit(start_process or partial(_start_process, MODULE), theirs)
        starter.shutdown(wait=False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._socket.setblocking(False)
        self._buffer = FrameBuffer()
        self._sends, self._closes = threading.Lock(), threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self.backlog = 0
        """Bytes that have not been sent yet, because the engine is slow to read."""
        self.waits = False
        """Whether `flush` is to be called when `fileno` becomes writable."""
        self._is_there = True
        self._exit_due = 0.0
        """Time until which the exit code of a process without a connection is awaited; 0 while there is one."""
        self._failure: wire.Failed | None = None
        """Failure that the engine has reported."""
        self._reason: str | None = None
        """Reason why it was given up; None if it was not."""
        self._heard = time.monotonic()
        """Monotonic time of the last sign of life."""
        self.send(start)

    @property
    def process(self) -> Process:
        """The process, once it has been started. Raises the error of its start."""
        return self._started.result()

    def fileno(self) -> int:
        """File descriptor that is readable when `receive` has something."""
        return self._socket.fileno()

    # -- to the engine ------------------------------------------------------------------------------------------

    def send(self, *frames: wire.Down) -> None:
        """Queues frames and sends as much as possible without waiting. Frames to a lost engine are dropped."""
        packed = b"".join(map(wire.pack, frames))
        with self._sends:
            if not self._is_there:
                return
            self._unsent.append(memoryview(packed))
            self.backlog += len(packed)
            waited = len(self._unsent) > 1
        if not waited:
            self.flush()

    def rouse(self) -> None:
        """Wakes an idle engine before a request is sent, which is faster than the request itself. From any thread."""
        with self._sends, suppress(OSError):  # its end is found out by `receive`
            if self._is_there and not self._unsent:
                self._socket.send(_ROUSE)  # so short that it goes as a whole or not at all

    def flush(self) -> None:
        """Sends more of the backlog."""
        with self._sends:
            try:
                while self._unsent:
                    sent = self._socket.send(self._unsent[0])
                    self.backlog -= sent
                    if sent < len(self._unsent[0]):
                        self._unsent[0] = self._unsent[0][sent:]
                    else:
                        self._unsent.popleft()
            except BlockingIOError:
                pass
            except OSError:  # it is gone, which `receive` will find out
                self._unsent.clear()
                self.backlog = 0
            self.waits = bool(self._unsent)

    # -- from the engine ----------------------------------------------------------------------------------------

    def receive(self) -> list[wire.Up | Lost]:
        """Returns the frames that have arrived, without waiting and without signs of life. The last one ever is
        Lost."""
        if not self._is_there:
            return []
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return self._end()
        self._heard = time.monotonic()
        frames: list[wire.Up | Lost] = []
        for body in self._buffer.feed(data):
            frame = wire.up_decoder.decode(body)
            if isinstance(frame, wire.Failed):
                self._failure = frame
            elif not isinstance(frame, wire.Alive):
                frames.append(frame)
        return frames

    @property
    def is_ending(self) -> bool:
        """Whether its connection has ended, and it is not known yet how the engine has. `fileno` stays readable
        meanwhile: the owner looks at it now and then instead."""
        return self._is_there and self._exit_due > 0

    def _end(self) -> list[wire.Up | Lost]:
        """Handles the end of the connection. The reason is the failure that the engine reported, or why it was given
        up, or how its process ended, which may take a moment to exit, for example while its device is freed. Until
        then nothing is returned, and the handle `is_ending`."""
        now = time.monotonic()
        self._exit_due = self._exit_due or now + _EXIT_SECONDS
        if (error := self._started.exception()) is not None:
            self._reason = f"cannot be started: {error}"
        if not self._failure and not self._reason and self.process.poll() is None and now < self._exit_due:
            return []
        with self._sends:
            self._is_there = False
            self._unsent.clear()
        if (failure := self._failure) is not None:
            return [Lost(failure.message, None if failure.kind is None else wire.KINDS[failure.kind])]
        return [Lost(self._reason or _how_it_ended(self.process.poll()))]

    def silent_for(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self._heard

    def reset_silence(self) -> None:
        """Counts silence from now on, because the owner has not listened for a while."""
        self._heard = time.monotonic()

    # -- its end ------------------------------------------------------------------------------------------------

    def give_up(self, reason: str) -> None:
        """Kills the engine; `receive` will return Lost with this reason."""
        if self._reason is None:
            self._reason = reason
            self._started.add_done_callback(lambda started: None if started.exception() else started.result().kill())

    def request_exit(self) -> None:
        """Asks the engine to exit."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, patience: float = EXIT_GRACE) -> None:
        """Waits up to `patience` seconds for the engine to exit, then kills it. Its ranks end with it. Does nothing the
        second time. From any thread."""
        with self._closes:
            if self.fileno() >= 0:
                self.request_exit()
                self._close(time.monotonic() + patience)

    def _close(self, deadline: float) -> None:
        look = select.poll()
        look.register(self._socket, select.POLLIN)
        with suppress(OSError):
            while (rest := deadline - time.monotonic()) > 0:
                if look.poll(rest * 1000) and not self._socket.recv(READ_BYTES):  # it may be waiting for us to read
                    break
        if self._started.exception() is None:
            end(self.process, deadline - time.monotonic())
        self._is_there = False
        self._socket.close()


def _how_it_ended(code: int | str | None) -> str:
    """`code`: what its process says of its end."""
    if isinstance(code, str):
        return code
    if code is None:
        return "closed its connection"
    return f"died by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"


def _start_process(module: str, link: socket.socket) -> "subprocess.Popen[bytes]":
    """Starts an engine's process with its end of the connection, which is closed here: the other end tells of both."""
    with link:
        return start_python(module, str(link.fileno()), str(os.getpid()), pass_fds=(link.fileno(),))
