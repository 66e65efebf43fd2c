"""The front's hold on one replica: here a child process, a socket to it, and a thread that listens."""

import os
import pickle
import queue
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from typing import Any

from nanovllm.replicas.messages import Failed, Start
from nanovllm.startup.child import no_standard_numbers, start_python

_MODULE = "nanovllm.replicas.replica"
SILENCE = 60.0
"""Seconds without any sign of life, which is due every second; importing may hold a process that long."""
EXIT_GRACE = 6.0
"""Seconds for a replica to end its ranks in order."""


class Lost(str):
    """The last message of every link: why its replica is gone."""


class ReplicaLink(ABC):
    """What a replica says is put into `inbox` with this link; the last is Lost."""

    def __init__(self, number: int, inbox: "queue.SimpleQueue[Any]") -> None:
        self.number = number
        self._inbox = inbox
        self._failure: str | None = None
        """What the replica said of its end itself."""

    def _take(self, message: Any) -> None:
        if isinstance(message, Failed):
            self._failure = message.text
        if message is not None:
            self._inbox.put((self, message))

    def _listen_in_thread(self) -> None:
        self._listener = threading.Thread(target=self._listen, name=f"nanovllm-replica-{self.number}", daemon=True)
        self._listener.start()

    @abstractmethod
    def _listen(self) -> None:
        """Takes in what the replica says, up to Lost."""

    @abstractmethod
    def pack(self, message: Any) -> Any:
        """What `send` takes, for this link and others of its kind."""

    @abstractmethod
    def send(self, packed: Any) -> None:
        """One that a lost replica does not get is answered by Lost. From one thread."""

    def ask_to_leave(self) -> None:
        self.send(self.pack(("leave",)))

    @abstractmethod
    def close(self, patience: float = EXIT_GRACE) -> None:
        """Waits for the replica that was asked to leave, and kills it when its time is over. Its ranks end with it."""


class ProcessLink(ReplicaLink):
    """A replica in a process of this host."""

    def __init__(
        self, number: int, start: Start, inbox: "queue.SimpleQueue[Any]", module: str = _MODULE
    ) -> None:
        """`module`: what it runs; a benchmark puts a simulator here."""
        super().__init__(number, inbox)
        with no_standard_numbers():
            self._socket, theirs = Pipe()
        try:
            self._process = start_python(module, str(theirs.fileno()), pass_fds=(theirs.fileno(),))
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._listen_in_thread()
        self.send(self.pack(start))

    @property
    def pid(self) -> int:
        return self._process.pid

    def pack(self, message: Any) -> bytes:
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)

    def send(self, packed: bytes) -> None:
        try:
            self._socket.send_bytes(packed)
        except OSError:
            pass

    def _listen(self) -> None:
        reason = "closed its connection"
        try:
            while True:
                if not self._socket.poll(SILENCE):
                    reason = f"gave no sign of life for {SILENCE:.0f} s"
                    self._process.kill()  # `send` may wait for it to read
                    break
                self._take(self._socket.recv())
        except (EOFError, OSError):
            reason = self._how_it_ended() or reason
        self._inbox.put((self, Lost(self._failure or reason)))

    def _how_it_ended(self) -> str | None:
        try:
            code = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return None
        return f"died by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"

    def close(self, patience: float = EXIT_GRACE) -> None:
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._listener.join(5.0)
        self._socket.close()


def close_links(links: Sequence[ReplicaLink]) -> None:
    """Asks all to leave before it waits for any."""
    for link in links:
        link.ask_to_leave()
    for link in links:
        link.close()
