"""The front's hold on one replica: a child process, a socket to it, and a thread that listens."""

import os
import pickle
import queue
import signal
import subprocess
import threading
from multiprocessing.connection import Pipe
from typing import Any

from nanovllm.replicas.messages import Failed, Start
from nanovllm.startup.child import no_standard_numbers, start_python

_MODULE = "nanovllm.replicas.replica"
_SILENCE = 60.0  # seconds without any sign of life, which is due every second; importing may hold the process that long
_EXIT_GRACE = 6.0  # seconds for a replica to end its ranks in order


class Lost(str):
    """The last message of every link: why its replica is gone."""


class ReplicaLink:
    """A replica process. What it says is put into `inbox` with this link; the last is Lost. `send` from one thread."""

    def __init__(self, number: int, start: Start, inbox: "queue.SimpleQueue[Any]") -> None:
        self.number = number
        self._inbox = inbox
        self._failure: str | None = None
        with no_standard_numbers():
            self._socket, theirs = Pipe()
        try:
            self._process = start_python(_MODULE, str(theirs.fileno()), pass_fds=(theirs.fileno(),))
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._listener = threading.Thread(target=self._listen, name=f"nanovllm-replica-{number}", daemon=True)
        self._listener.start()
        self.send(start)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Any) -> None:
        """One that a lost replica does not get is answered by Lost."""
        try:
            self._socket.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:
            pass

    def _listen(self) -> None:
        reason = "closed its connection"
        try:
            while True:
                if not self._socket.poll(_SILENCE):
                    reason = f"gave no sign of life for {_SILENCE:.0f} s"
                    break
                message = self._socket.recv()
                if isinstance(message, Failed):
                    self._failure = message.text
                if message is not None:
                    self._inbox.put((self, message))
        except (EOFError, OSError):
            pass
        self._inbox.put((self, Lost(self._failure or self._how_it_ended() or reason)))

    def _how_it_ended(self) -> str | None:
        try:
            code = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return None
        return f"died by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"

    def ask_to_leave(self) -> None:
        self.send(("leave",))

    def close(self, patience: float = _EXIT_GRACE) -> None:
        """Waits for the process that was asked to leave, and kills it when its time is over. Its ranks end with it."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._listener.join(5.0)
        self._socket.close()


def close_links(links: list[ReplicaLink]) -> None:
    """Asks all to leave before it waits for any."""
    for link in links:
        link.ask_to_leave()
    for link in links:
        link.close()
