"""Where the front takes in what its replicas say.

The thread that waits for it reads the sockets itself, so that a token on its way wakes no other thread before.
"""

import os
import select
import threading
import time
from collections import deque
from typing import Any, Protocol

from nanovllm.replicas.channel import Bell

_LOOK_SECONDS = 1.0  # between two looks for replicas that say nothing
_AWAY_SECONDS = 5.0  # without a caller: what was not heard then says nothing


class Source(Protocol):
    """A replica's socket."""

    def fileno(self) -> int: ...

    def read(self) -> None:
        """Puts in what has come."""

    def flush(self) -> None:
        """Sends what there was no room for."""

    def look(self, since: float) -> None:
        """Gives the replica up where it has been silent for too long; listened to from `since` on (time.monotonic)."""


class Inbox:
    """Events in their order. Any thread may put some in, and one at a time takes them out."""

    def __init__(self) -> None:
        self._events: deque[Any] = deque()
        self._sources: dict[int, Source] = {}
        self._full: set[int] = set()
        """Sockets that something waits to be sent through."""
        self._bell = Bell()
        self._poll = select.epoll()
        self._poll.register(self._bell, select.EPOLLIN)
        self._reads = threading.Lock()
        self._waits = False
        self._since = self._next_look = time.monotonic()

    def put(self, event: Any) -> None:
        self._events.append(event)
        if self._waits:
            self._bell.ring()

    def watch(self, source: Source) -> None:
        """From here on it is read when there is something to read, its end included."""
        self._sources[source.fileno()] = source
        self._poll.register(source, select.EPOLLIN)

    def forget(self, source: Source) -> None:
        """Before its socket is closed; harmless when it is done already."""
        if self._sources.get(source.fileno()) is source:
            self.expect_room(source, False)
            del self._sources[source.fileno()]
            self._poll.unregister(source)

    def expect_room(self, source: Source, expects: bool) -> None:
        """Whether it is to be flushed when its socket has room again."""
        fd = source.fileno()
        if self._sources.get(fd) is source and expects != (fd in self._full):
            self._poll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if expects else 0))
            (self._full.add if expects else self._full.remove)(fd)

    def take(self, timeout: float = 0.0, spin_until: float = 0.0) -> list[Any]:
        """The events that are there; waits up to `timeout` seconds for one, or for a part of one. Before `spin_until`
        (time.monotonic) it looks without a pause instead."""
        with self._reads:
            self._read(0.0 if time.monotonic() < spin_until else timeout)
            while not self._events and time.monotonic() < spin_until:
                os.sched_yield()  # where cores are few, the replica needs this one
                self._read(0.0)
            return [self._events.popleft() for _ in range(len(self._events))]

    def gather(self) -> None:
        """Reads what has come, and takes nothing out."""
        with self._reads:
            self._read(0)

    def has_events(self) -> bool:
        """From any thread."""
        if not self._events and self._reads.acquire(blocking=False):
            try:
                self._read(0)
            finally:
                self._reads.release()
        return bool(self._events)

    def _read(self, timeout: float) -> None:
        if (now := time.monotonic()) > self._next_look:
            if now > self._next_look + _AWAY_SECONDS:
                self._since = now
            self._next_look = now + _LOOK_SECONDS
            for each in list(self._sources.values()):
                each.look(self._since)
        self._waits = timeout > 0
        found = self._poll.poll(0 if self._events else timeout)  # one may have come in before _waits was true
        self._waits = False
        for fd, states in found:
            if fd == self._bell.fileno():
                self._bell.hush()
                continue
            source = self._sources.get(fd)  # None: forgotten by what another said
            if source is not None and states & select.EPOLLOUT:
                source.flush()
            if source is not None and states & ~select.EPOLLOUT:
                source.read()

    def close(self) -> None:
        """After the last source is forgotten."""
        self._poll.close()
        self._bell.close()
