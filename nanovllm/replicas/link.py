"""The front's hold on one replica: here a child process, and a socket to it."""

import pickle
import select
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nanovllm.processes.child import end, start_linked
from nanovllm.processes.framing import framed
from nanovllm.replicas.channel import Channel, small
from nanovllm.replicas.inbox import Inbox
from nanovllm.replicas.messages import Failed, Start

_MODULE = "nanovllm.replicas.replica"
SILENCE = 60.0
"""Seconds without any sign of life, which is due every second; importing may hold a process that long."""
_ROUSE = small(("rouse",))
_MOST_UNSENT = 64 << 20  # bytes
EXIT_GRACE = 6.0
"""Seconds for a replica to end its ranks in order."""


class Lost(str):
    """The last message of every link: why its replica is gone."""


class ReplicaLink(ABC):
    """What a replica says is put into `inbox` with this link; the last is Lost."""

    def __init__(self, number: int, inbox: Inbox) -> None:
        self.number = number
        self._inbox = inbox
        self._failure: str | None = None
        """What the replica said of its end itself."""

    def _take(self, message: Any) -> None:
        if isinstance(message, Failed):
            self._failure = message.text
        if message is not None:
            self._inbox.put((self, message))

    @abstractmethod
    def pack(self, message: Any) -> Any:
        """What `send` takes, for this link and others of its kind."""

    @abstractmethod
    def send(self, packed: Any) -> None:
        """One that a lost replica does not get is answered by Lost. From one thread."""

    @abstractmethod
    def rouse(self) -> None:
        """A request is likely to be sent in a moment: a replica that sleeps wakes up meanwhile. From any thread."""

    def ask_to_leave(self) -> None:
        self.send(self.pack(("leave",)))

    @abstractmethod
    def close(self, patience: float = EXIT_GRACE) -> None:
        """Waits for the replica that was asked to leave, and kills it when its time is over. Its ranks end with it."""


class ProcessLink(ReplicaLink):
    """A replica in a process of this host."""

    def __init__(self, number: int, start: Start, inbox: Inbox, module: str = _MODULE) -> None:
        """`module`: what it runs; a benchmark puts a simulator here."""
        super().__init__(number, inbox)
        self._process, ours = start_linked(module)
        self._channel = Channel(ours)
        self._sends = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        """What waits until the replica reads. No other replica waits for that."""
        self._heard = time.monotonic()
        self._reason: str | None = None
        """Why it was given up."""
        self._is_there = True
        inbox.watch(self)
        self.send(self.pack(start))

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._channel.fileno()

    def pack(self, message: Any) -> bytes:
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)

    def send(self, packed: bytes) -> None:
        with self._sends:
            if self._is_there:
                self._unsent += map(memoryview, framed(packed))
        self.flush()
        while sum(map(len, list(self._unsent))) > _MOST_UNSENT:  # another thread may be sending some of it
            self._wait(1.0)
            self._inbox.gather()

    def rouse(self) -> None:
        with self._sends, suppress(OSError):  # its end is noticed by who reads
            if self._is_there and not self._unsent:
                self._channel.send_some(_ROUSE)

    def flush(self) -> None:
        with self._sends:
            try:
                while self._unsent:
                    self._unsent[0] = self._channel.send_some(self._unsent[0])
                    if self._unsent[0]:
                        break
                    self._unsent.popleft()
            except OSError:
                self._unsent.clear()
            self._inbox.expect_room(self, bool(self._unsent))

    def _wait(self, seconds: float) -> bool:
        """For something to read, or room to send what is unsent. Returns whether there is."""
        either = select.poll()
        either.register(self, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        return bool(either.poll(seconds * 1000))

    def read(self) -> None:
        self._heard = time.monotonic()
        try:
            for message in self._channel.receive():
                self._take(message)
        except (EOFError, OSError):
            self._end()

    def look(self, since: float) -> None:
        if self._is_there and time.monotonic() - max(self._heard, since) > SILENCE:
            self._reason = f"gave no sign of life for {SILENCE:.0f} s"
            self._process.kill()
            self._end()

    def _end(self) -> None:
        if self._is_there:
            self._inbox.forget(self)
            with self._sends:
                self._is_there = False
                self._unsent.clear()
            threading.Thread(target=self._report_end, name=f"nanovllm-replica-{self.number}", daemon=True).start()

    def _report_end(self) -> None:
        """A process may take a moment to end when its socket is closed."""
        how = self._how_it_ended() or "closed its connection"
        self._inbox.put((self, Lost(self._failure or self._reason or how)))

    def _how_it_ended(self) -> str | None:
        try:
            code = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return None
        return f"died by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"

    def close(self, patience: float = EXIT_GRACE) -> None:
        self._inbox.forget(self)
        deadline = time.monotonic() + patience
        try:
            while (rest := deadline - time.monotonic()) > 0 and self._wait(rest):
                self.flush()
                self._channel.receive()  # it may wait for us to read
        except (EOFError, OSError):
            pass
        end(self._process, deadline - time.monotonic())
        self._is_there = False
        self._channel.close()


def close_links(links: Sequence[ReplicaLink]) -> None:
    """Asks all to leave before it waits for any."""
    for link in links:
        link.ask_to_leave()
    for link in links:
        link.close()
