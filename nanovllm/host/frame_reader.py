"""Frames of several engines, read by a thread that waits for them, or when an event loop says that there are some."""

import os
import select
import socket
import time
from collections import deque
from contextlib import suppress

from nanovllm.host import wire
from nanovllm.host.handle import END_SECONDS, Handle, Lost


class FrameReader:
    """Reader of several handles. For one thread at a time; `ring` may be called from any. Its `fileno` is readable when
    `read` has something to do."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._rung, self._bell = socket.socketpair()
        for end in (self._rung, self._bell):
            end.setblocking(False)
        self._poll.register(self._rung, select.EPOLLIN)
        self.handles: dict[int, Handle] = {}
        """Handles by file descriptor."""
        self.frames: deque[tuple[Handle, wire.Up | Lost]] = deque()
        """Frames that have been read; the owner takes them out."""
        self._ending: list[Handle] = []
        """Handles whose connection has ended, and not yet how it did."""
        self._waiting: set[int] = set()
        """File descriptors with more to send."""
        self.spin_until = 0.0
        """Monotonic time until which `read` polls instead of sleeping."""

    def fileno(self) -> int:
        return self._poll.fileno()

    @property
    def is_ending(self) -> bool:
        """Whether `read` is to be called every END_SECONDS, until it is known how an engine has ended."""
        return bool(self._ending)

    def watch(self, handle: Handle) -> None:
        """Reads this handle from now on."""
        self.handles[handle.fileno()] = handle
        self._poll.register(handle.fileno(), select.EPOLLIN)
        self.note_sent(handle)

    def note_sent(self, handle: Handle) -> None:
        """Sends the rest of what a handle could not send at once."""
        if handle.waits != ((fd := handle.fileno()) in self._waiting) and fd in self.handles:
            self._waiting ^= {fd}
            self._poll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if handle.waits else 0))

    def _forget(self, handle: Handle) -> None:
        if self.handles.pop(handle.fileno(), None) is not None:
            self._waiting.discard(handle.fileno())
            self._poll.unregister(handle.fileno())

    def ring(self) -> None:
        """Ends a wait in `read`."""
        with suppress(OSError):  # it rings already, or is closed
            self._bell.send(b"!")

    def read(self, timeout: float) -> None:
        """Reads what has arrived into `frames`; waits up to `timeout` seconds for something."""
        spins = timeout > 0 and time.monotonic() < self.spin_until
        while True:
            if self._ending:
                timeout, ending, self._ending = min(timeout, END_SECONDS), self._ending, []
                for handle in ending:
                    self._receive(handle)
            for fd, events in self._poll.poll(0 if spins or self.frames else timeout):
                if fd == self._rung.fileno():
                    self._rung.recv(4096)
                elif (found := self.handles.get(fd)) is not None:
                    if events & select.EPOLLOUT:
                        found.flush()
                        self.note_sent(found)
                    if events & ~select.EPOLLOUT:
                        self._receive(found)
            if self.frames or not spins or time.monotonic() > self.spin_until:
                return
            os.sched_yield()  # if cores are few, the engine needs this one

    def _receive(self, handle: Handle) -> None:
        frames = handle.receive()
        self.frames.extend((handle, frame) for frame in frames)
        if handle.is_ending:
            self._ending.append(handle)
        if handle.is_ending or any(isinstance(frame, Lost) for frame in frames[-1:]):
            self._forget(handle)

    def close(self) -> None:
        for handle in list(self.handles.values()):
            self._forget(handle)
        self._poll.close()
        self._bell.close()
        self._rung.close()
