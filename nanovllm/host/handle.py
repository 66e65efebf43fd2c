"""A driver's hold on an engine elsewhere; here one in a child process, and the socket to it."""

import os
import select
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from nanovllm.host import wire
from nanovllm.processes.child import end, start_linked
from nanovllm.processes.framing import READ_BYTES, FrameBuffer

MODULE = "nanovllm.host.program"
"""Program of an engine's process; a benchmark puts a simulator here."""
SILENCE = 60.0
"""Seconds without any sign of life, which is due every second; importing may hold a process that long."""
EXIT_GRACE = 6.0
"""Seconds for an engine to end its ranks in order."""
_REASON_SECONDS = 2.0  # for a process to end whose connection has
_LOOK_SECONDS = 0.001  # between two looks at it
SOCKET_BYTES = 4 << 20  # that may be on their way to the other end
_ROUSE = wire.pack(wire.Rouse())


@dataclass(frozen=True)
class Lost:
    """The last of an engine's frames, made on this side: it is gone, and why."""

    reason: str
    kind: type[Exception] | None = None
    """Exception to raise to the user for their own mistake; None for everything else."""


class Handle(ABC):
    """One engine elsewhere. One thread at a time uses it; `rouse` from any."""

    num_unsent = 0
    """Bytes that wait for the engine to read."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.on_room: Callable[[Handle, bool], None] = lambda handle, waits: None
        """Called with True where the owner is to call `flush` once `fileno` can be written to, and with False when that
        is over."""
        self._buffer = FrameBuffer()
        self._failure: wire.Failed | None = None
        """Failure that the engine told of."""
        self._reason: str | None = None
        """Reason why the engine was given up; None while it was not."""
        self._heard = time.monotonic()
        """Monotonic time of the last sign of life."""

    def send(self, frame: wire.Down) -> None:
        """Sends a frame, or keeps it until there is room; one that a lost engine does not get is answered by Lost."""
        self.send_packed(wire.pack(frame))

    @abstractmethod
    def send_packed(self, packed: bytes) -> None:
        """Sends frames that are packed already."""

    def rouse(self) -> None:  # noqa: B027 (not each has a way)
        """A request is likely to be sent in a moment. From any thread. Does nothing where that takes as long as the
        request itself."""

    @abstractmethod
    def fileno(self) -> int:
        """Readable when `receive` has something."""

    @abstractmethod
    def receive(self) -> "list[wire.Up | Lost]":
        """The frames that have come; the last of all is Lost. Does not wait."""

    def _complete(self, data: bytes) -> list[wire.Up]:
        """The frames that these bytes complete. Signs of life say nothing more, and a failure is kept for `_lost`."""
        frames: list[wire.Up] = []
        for body in self._buffer.feed(data):
            frame = wire.up_decoder.decode(body)
            if isinstance(frame, wire.Failed):
                self._failure = frame
            elif not isinstance(frame, wire.Alive):
                frames.append(frame)
        return frames

    def _lost(self, how: Callable[[], str]) -> Lost:
        """The engine's end: by the failure that it told of, as it was given up, or else as `how` finds out."""
        if (failure := self._failure) is not None:
            return Lost(failure.message, None if failure.kind is None else wire.KINDS[failure.kind])
        return Lost(self._reason or how())

    def flush(self) -> None:  # noqa: B027 (not each keeps any)
        """Sends what there was no room for."""

    def silent_for(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self._heard

    def heard(self) -> None:
        """The owner was away itself: what it did not hear meanwhile says nothing."""
        self._heard = time.monotonic()

    def give_up(self, reason: str) -> None:
        """Ends the engine; `receive` says Lost with this reason."""
        if self._reason is None:
            self._reason = reason
            self._kill()

    @abstractmethod
    def _kill(self) -> None: ...

    @abstractmethod
    def leave(self) -> None:
        """Asks the engine to end in order."""

    @abstractmethod
    def close(self, patience: float = EXIT_GRACE) -> None:
        """Waits for an engine that was asked to leave, and kills it when its time is over. Its ranks end with it.
        Does nothing the second time."""


class ChildHandle(Handle):
    """An engine in a process of this host."""

    def __init__(self, start: wire.Start) -> None:
        super().__init__(start.number)
        self.process, self._socket = start_linked(MODULE, str(os.getpid()))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._socket.setblocking(False)
        self._sends = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._waits = False
        self._is_there = True
        self._reason_due = 0.0
        """Time at which an engine whose connection has ended is lost, however it ends; 0: it has not ended."""
        self.send(start)

    @property
    def pid(self) -> int:
        return self.process.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    def send_packed(self, packed: bytes) -> None:
        with self._sends:
            if not self._is_there:
                return
            self._unsent.append(memoryview(packed))
            self.num_unsent += len(packed)
            waited = len(self._unsent) > 1
        if not waited:
            self.flush()

    def rouse(self) -> None:
        with self._sends, suppress(OSError):  # its end is noticed by who reads
            if self._is_there and not self._unsent:
                self._socket.send(_ROUSE)  # so short that it goes as a whole or not at all

    def flush(self) -> None:
        with self._sends:
            try:
                while self._unsent:
                    sent = self._socket.send(self._unsent[0])
                    self.num_unsent -= sent
                    if sent < len(self._unsent[0]):
                        self._unsent[0] = self._unsent[0][sent:]
                    else:
                        self._unsent.popleft()
            except BlockingIOError:
                pass
            except OSError:  # it is gone, as who reads will see
                self._unsent.clear()
                self.num_unsent = 0
            waits = bool(self._unsent)
        if waits != self._waits:
            self._waits = waits
            self.on_room(self, waits)

    def receive(self) -> "list[wire.Up | Lost]":
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
        return [*self._complete(data)]

    def _kill(self) -> None:
        self.process.kill()

    def _end(self) -> list[wire.Up | Lost]:
        """The connection has ended. How the process ends says more, but it may take a moment, while a device is freed
        say: until then there is nothing, and the caller looks again."""
        now = time.monotonic()
        self._reason_due = self._reason_due or now + _REASON_SECONDS
        if not self._failure and not self._reason and self.process.poll() is None and now < self._reason_due:
            time.sleep(_LOOK_SECONDS)
            return []
        with self._sends:
            self._is_there = False
            self._unsent.clear()
        return [self._lost(self._how_it_ended)]

    def _how_it_ended(self) -> str:
        code = self.process.poll()
        if code is None:
            return "closed its connection"
        return f"died by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"

    def leave(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, patience: float = EXIT_GRACE) -> None:
        if self.fileno() < 0:
            return
        self.leave()
        deadline = time.monotonic() + patience
        look = select.poll()
        look.register(self._socket, select.POLLIN)
        with suppress(OSError):
            while (rest := deadline - time.monotonic()) > 0:
                if look.poll(rest * 1000) and not self._socket.recv(READ_BYTES):  # it may wait for us to read
                    break
        end(self.process, deadline - time.monotonic())
        self._is_there = False
        self._socket.close()
