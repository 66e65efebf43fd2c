"""The worker processes of one engine: spawned, watched, stopped.

Workers run `nanovllm.executor.worker`, so the caller's main module is never imported again. Each holds one end of a
socket whose other end is ours: when this process ends, they read the end of the stream and exit. When one of them ends,
or stops making progress, a thread here ends the others and keeps the reason, which every waiting call raises.

A worker hangs when it has work and makes no progress for step_timeout. Progress is a command received or done, or a
piece of a long one (a part of a weight, a graph). On a CPU, where a step may take longer, and until its libraries are
loaded, computing is progress too. A worker that compiles with Triton never hangs. While this process is stopped
(Ctrl-Z), no time counts.
"""

import os
import pickle
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, NoReturn

from nanovllm.errors import WorkerError
from nanovllm.executor.channel import CommandWriter, Word, WorkerState, create_shared_memory
from nanovllm.processes.child import end, forbid_multicast, no_standard_numbers, socket_pair, start_python
from nanovllm.processes.framing import READ_BYTES, FrameBuffer

_WATCH_INTERVAL = 0.2  # seconds between looks at workers' progress
_LONGEST_LOOK_AWAY = 1.0  # seconds that count between two looks: in a longer pause this process stood still itself
_EXIT_GRACE = 5.0  # seconds for a worker to end by itself when asked to
_CALL_TIMEOUT = 1800.0  # seconds for a rare command such as loading weights, also of a worker that makes progress
_START_PATIENCE = 60.0  # seconds that libraries, drivers and first steps may take, where step_timeout is less
_WORKER_MODULE = "nanovllm.executor.worker"


@dataclass
class _Progress:
    """Last sign of life of a worker, and the watched seconds since it changed."""

    seen: object = None
    unchanged: float = 0.0


@dataclass(frozen=True)
class _Failure:
    """First failure of a worker, raised as a new exception each time: one exception would collect everybody's
    frames."""

    kind: type[Exception]
    text: str
    note: str = ""

    def raise_it(self) -> NoReturn:
        error = self.kind(self.text)
        if self.note:
            error.add_note(self.note)
        raise error


class WorkerProcesses:
    """Ranks 1 .. size-1 and the channel to them. With size 1 there is nothing here and every call is a no-op; more need
    Linux, for memory without a name.

    No torch here: where workers start before this process imports it, all import at once.
    """

    ring: CommandWriter

    def __init__(self, size: int, step_timeout: float) -> None:
        forbid_multicast()  # before any of them starts CUDA
        self.size = size
        self.store = -1
        """File descriptor of memory without a name that every worker inherits, to meet the others (store.py)."""
        self.step_timeout = step_timeout
        self.is_starting = True
        """True until the caller says that the first step can come: the time a start takes has little to do with a
        step's."""
        self.is_loading = True
        """True until the caller says that all ranks have met and loaded."""
        self._failure: _Failure | None = None
        self._closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._controls: list[socket.socket] = []
        self._replies: list[queue.Queue[Any]] = [queue.Queue() for _ in range(1, size)]
        self._doorbells: list[int] = []
        self.on_failure: Callable[[], None] = lambda: None
        """Called once, by the watching thread, when a worker fails: ends collectives that wait."""
        self._watcher = threading.Thread(target=self._watch, name="nanovllm-watch", daemon=True)
        if size == 1:
            return
        with no_standard_numbers():
            memory = create_shared_memory()
        try:
            self.ring = CommandWriter(memory, self._doorbells)
            self._start(memory)
        finally:
            os.close(memory)

    def _start(self, memory: int) -> None:
        try:
            with no_standard_numbers():
                self.store = os.memfd_create("nanovllm-store")
            for rank in range(1, self.size):
                self._spawn(rank, memory)
            self._watcher.start()
        except BaseException:
            self.close()
            self.close_store()
            raise

    def _spawn(self, rank: int, memory: int) -> None:
        ours, theirs = socket_pair()
        with no_standard_numbers():
            bell_read, bell_write = os.pipe()
        self._controls.append(ours)
        self._doorbells.append(bell_write)
        fds = (theirs.fileno(), memory, bell_read, self.store)
        try:
            process = start_python(_WORKER_MODULE, *map(str, (rank, *fds, os.getpid())), pass_fds=fds)
        finally:
            theirs.close()
            os.close(bell_read)
        self._processes.append(process)

    # -- commands -----------------------------------------------------------------------------------------------

    def send_step(self, packed: Any) -> None:
        if self.size > 1:
            self.check()
            self.ring.send_step(packed, self.check)

    def send_call(self, method: str, *args: Any) -> None:
        if self.size > 1:
            self.check()
            self.ring.send_call(method, args, self.check)

    def replies(self) -> list[Any]:
        """Waits for the reply of each worker to the last call, in rank order. Raises WorkerError where one does not
        come."""
        replies = []
        deadline = time.monotonic() + _CALL_TIMEOUT
        for rank, inbox in enumerate(self._replies, start=1):
            while True:
                try:
                    replies.append(inbox.get(timeout=_WATCH_INTERVAL))
                    break
                except queue.Empty:
                    self.check()
                    if time.monotonic() > deadline:
                        raise WorkerError(f"rank {rank} did not answer within {_CALL_TIMEOUT:.0f} s") from None
        return replies

    def check(self) -> bool:
        """Raises WorkerError (or the user error that a worker found) where a worker has failed. True: one is compiling,
        so waiting for it is no hang."""
        if self._failure is not None:
            self._failure.raise_it()
        if self._closing:
            raise RuntimeError("this engine is closed")
        return any(self.ring.get(Word.STATE, reader) == WorkerState.COMPILING for reader in range(self.size - 1))

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def wait_for_failure(self, seconds: float) -> None:
        """Raises WorkerError if a worker is found to have failed within `seconds`: the cause of an error seen here."""
        deadline = time.monotonic() + seconds
        while self.size > 1 and time.monotonic() < deadline:
            self.check()
            time.sleep(0.01)

    # -- watching -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        streams = {control: (rank, FrameBuffer()) for rank, control in enumerate(self._controls, start=1)}
        progress = {rank: _Progress() for rank in range(1, self.size)}
        last_look = time.monotonic()
        while not self._closing and self._failure is None:
            for control in wait(list(streams), timeout=_WATCH_INTERVAL):
                assert isinstance(control, socket.socket)
                rank, stream = streams[control]
                try:
                    data = control.recv(READ_BYTES)  # never waits for the rest of a reply: who sends it may hang
                except OSError:
                    data = b""
                if not data:
                    self._fail(_Failure(WorkerError, self._death_notice(rank)))
                    return
                for message in stream.feed(data):
                    kind, value = pickle.loads(message)
                    if kind == "error":
                        self._fail(_worker_failure(rank, *value))
                        return
                    self._replies[rank - 1].put(value)
            now = time.monotonic()
            for rank in progress:
                self._check_progress(rank, progress[rank], min(now - last_look, _LONGEST_LOOK_AWAY))
            last_look = now

    def _check_progress(self, rank: int, progress: _Progress, seconds: float) -> None:
        """Notes whether the rank made progress in the last `seconds`; fails one that hangs (see above)."""
        ring, reader = self.ring, rank - 1
        state = ring.get(Word.STATE, reader)
        limit = max(self.step_timeout, _START_PATIENCE) if self.is_starting else self.step_timeout
        # Ranks wait for each other, to import and to meet: the progress of any is that of all.
        counted = range(self.size - 1) if self.is_loading else (reader,)
        consumed = ring.get(Word.CONSUMED, reader)
        seen = (limit, state, consumed, [ring.get(Word.PROGRESS, each) for each in counted])
        at_rest = state == WorkerState.IDLE and consumed == ring.num_published
        if seen != progress.seen or at_rest or state == WorkerState.COMPILING:
            progress.seen, progress.unchanged = seen, 0.0
            return
        progress.unchanged += seconds
        if progress.unchanged > limit:
            option = f"step_timeout={self.step_timeout} s"
            what = option if limit == self.step_timeout else f"{limit:.0f} s at its start ({option})"
            self._fail(_Failure(WorkerError, f"rank {rank} made no progress for {what}"))

    def _death_notice(self, rank: int) -> str:
        try:
            code = self._processes[rank - 1].wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return f"rank {rank} closed its connection"
        return f"rank {rank} died " + (f"by signal {-code}" if code < 0 else f"with exit code {code}")

    def _fail(self, reason: _Failure) -> None:
        if self._closing:
            return
        self._failure = reason
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        self.on_failure()

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all workers and waits for them; kills those that do not leave in time."""
        if self._closing:
            return
        self._closing = True
        for control in self._controls:
            with suppress(OSError):
                control.send(b"!")  # "leave": the stream does not end while a fork of this process holds it open
        if self._watcher.is_alive() and threading.current_thread() is not self._watcher:
            self._watcher.join(timeout=5.0)
        for control in self._controls:
            control.close()
        deadline = time.monotonic() + (_EXIT_GRACE if self._failure is None else 0.0)
        for process in self._processes:
            end(process, deadline - time.monotonic())
        while self._doorbells:
            os.close(self._doorbells.pop())
        if self.size > 1:
            self.ring.close()

    def close_store(self) -> None:
        """Closes the store, after `close`: what still uses the store finds its file by number."""
        store, self.store = self.store, -1
        if store >= 0:
            os.close(store)


def _worker_failure(rank: int, kind: type[Exception] | None, text: str, trace: str) -> _Failure:
    """Failure of a worker that has sent an error. `kind`: exception for a user's mistake; None for any other error."""
    if kind is None:
        return _Failure(WorkerError, f"rank {rank} failed:\n{trace}")
    return _Failure(kind, text, f"Found by rank {rank}:\n{trace}")
