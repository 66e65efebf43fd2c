"""The command ring: rank 0 writes, every worker reads, through one piece of shared memory without a name.

    | header: slots published, and Words of each reader | slot 0 | slot 1 | ... |

A message is cut into as many slots as it needs, so its size is not bounded by the memory. The writer publishes a slot
by advancing a counter after the data is in place; a reader spins on that counter for a moment, then goes to sleep on a
pipe that the writer rings. The memory is an unlinked file: whatever dies, nothing remains.
"""

import mmap
import os
import pickle
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Any

from nanovllm.processes.fence import Fence

MAX_READERS = 8
NUM_SLOTS = 8
SLOT_BYTES = 128 * 1024
_SLOT_PREFIX = 16  # bytes of the message that remain, counted from this slot; bytes of it in this slot
# Each word has a cache line to itself: readers and writer do not disturb each other.
_HEADER_WORDS = 8 * (1 + 4 * MAX_READERS)
_HEADER_BYTES = 8 * _HEADER_WORDS
_TOTAL_BYTES = _HEADER_BYTES + NUM_SLOTS * SLOT_BYTES

_LONGEST_SLEEP = 1.0  # seconds that a reader sleeps at most, should it miss its bell

STEP, CALL = 0, 1


class Word(IntEnum):
    """Words that the header has for each reader."""

    SLEEPING = 0
    """1 while the reader sleeps and must be woken."""
    CONSUMED = 1
    """Slots that it has taken out."""
    STATE = 2
    """A WorkerState."""
    PROGRESS = 3
    """Counter that a worker raises while it is busy with a long command."""


class WorkerState(IntEnum):
    """State that a worker reports of itself; processes.py says what counts as a hang in which state."""

    CALLING = 0
    """Starting, loading or carrying out a rare call. Fresh memory says so: a worker starts this way."""
    IDLE = 1
    STEPPING = 2
    COMPILING = 3


def create_shared_memory() -> int:
    """File descriptor of fresh memory for one ring; it has no name, and goes when its last holder goes."""
    fd = os.memfd_create("nanovllm")
    os.ftruncate(fd, _TOTAL_BYTES)
    return fd


class _Ring:
    """The shared memory as both sides see it."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _TOTAL_BYTES)
        self._bytes = memoryview(self._memory)
        self._words = self._bytes[:_HEADER_BYTES].cast("q")
        self._fence = Fence()

    def get(self, word: Word, reader: int) -> int:
        return self._words[8 * (1 + word * MAX_READERS + reader)]

    def put(self, word: Word, reader: int, value: int) -> None:
        self._words[8 * (1 + word * MAX_READERS + reader)] = value

    def _slot(self, sequence: int) -> memoryview:
        begin = _HEADER_BYTES + (sequence % NUM_SLOTS) * SLOT_BYTES
        return self._bytes[begin : begin + SLOT_BYTES]

    def close(self) -> None:
        """Lets the memory go. From a signal handler in mid-send it goes when the interrupted send lets go of it."""
        with suppress(BufferError):
            self._words.release()
            self._bytes.release()
            self._memory.close()


class CommandWriter(_Ring):
    """Writing end of the ring, on rank 0."""

    def __init__(self, fd: int, doorbells: list[int]) -> None:
        """`doorbells`: one writable file descriptor a reader."""
        super().__init__(fd)
        self._doorbells = doorbells
        self.num_published = 0
        """Slots published so far."""

    def send_step(self, packed: Any, check: Callable[[], object]) -> None:
        """Sends a packed step (anything with the buffer protocol). `check` is called while waiting and may raise."""
        self._send(STEP, memoryview(packed).cast("B"), check)

    def send_call(self, method: str, args: tuple[Any, ...], check: Callable[[], object]) -> None:
        """Sends a pickled call of a method of every worker's runner."""
        self._send(CALL, memoryview(pickle.dumps((method, args), protocol=pickle.HIGHEST_PROTOCOL)), check)

    def _send(self, kind: int, payload: memoryview, check: Callable[[], object]) -> None:
        room = SLOT_BYTES - _SLOT_PREFIX - 1
        remaining, offset = len(payload), 0
        while True:
            self._wait_for_room(check)
            size = min(remaining, room)
            slot = self._slot(self.num_published)
            slot[:_SLOT_PREFIX].cast("q")[0] = remaining
            slot[:_SLOT_PREFIX].cast("q")[1] = size
            slot[_SLOT_PREFIX] = kind
            slot[_SLOT_PREFIX + 1 : _SLOT_PREFIX + 1 + size] = payload[offset : offset + size]
            remaining, offset = remaining - size, offset + size
            self._publish()
            if remaining == 0:
                break

    def _wait_for_room(self, check: Callable[[], object]) -> None:
        while any(
            self.num_published - self.get(Word.CONSUMED, reader) >= NUM_SLOTS
            for reader in range(len(self._doorbells))
        ):
            check()
            time.sleep(50e-6)

    def _publish(self) -> None:
        self._fence()
        self.num_published += 1
        self._words[0] = self.num_published
        self._fence()
        for reader, doorbell in enumerate(self._doorbells):
            if self.get(Word.SLEEPING, reader):
                self.put(Word.SLEEPING, reader, 0)
                with suppress(BrokenPipeError):  # the reader is gone; `check` knows why, or will in a moment
                    os.write(doorbell, b"!")


class CommandReader(_Ring):
    """A worker's end."""

    def __init__(self, fd: int, reader: int, doorbell: int, spin_seconds: float = 0.0) -> None:
        """`doorbell`: readable file descriptor. `spin_seconds`: how long to spin before going to sleep."""
        super().__init__(fd)
        self._reader = reader
        self._doorbell = doorbell
        self._bell = select.poll()  # select() ends at file 1023, and ours have the numbers they have in the caller
        self._bell.register(doorbell, select.POLLIN)
        self.spin_seconds = spin_seconds
        self._consumed = 0
        self.counts_work = True
        """Whether computing is progress: not on a GPU, where waiting for the device computes too."""
        # Of this thread alone: the one that reports polls for as long as the process lives.
        self._work_clock = time.pthread_getcpuclockid(threading.get_ident())

    def receive(self) -> tuple[int, Any]:
        """The next message: (STEP, its bytes) or (CALL, (method, args)). Waits as long as it takes."""
        parts: list[bytes] = []
        while True:
            self._wait()
            slot = self._slot(self._consumed)
            remaining, size = slot[:_SLOT_PREFIX].cast("q")
            kind = slot[_SLOT_PREFIX]
            parts.append(bytes(slot[_SLOT_PREFIX + 1 : _SLOT_PREFIX + 1 + size]))
            self._fence()
            self._consumed += 1
            self.put(Word.CONSUMED, self._reader, self._consumed)
            if remaining == size:
                break
        payload = parts[0] if len(parts) == 1 else b"".join(parts)
        return (STEP, memoryview(payload)) if kind == STEP else (CALL, pickle.loads(payload))

    def _wait(self) -> None:
        words, seen = self._words, self._consumed
        deadline = time.perf_counter() + self.spin_seconds
        pure_spins = 1000  # about 50 us, then let others have the core between looks
        while words[0] == seen:
            if pure_spins:
                pure_spins -= 1
            elif time.perf_counter() < deadline:
                os.sched_yield()
            else:
                self._sleep(seen)
        self._fence()  # the slot is read after the counter that announces it

    def _sleep(self, seen: int) -> None:
        self.put(Word.SLEEPING, self._reader, 1)
        self._fence()
        if self._words[0] == seen:
            self._bell.poll(_LONGEST_SLEEP * 1000)
        self.put(Word.SLEEPING, self._reader, 0)
        if self._bell.poll(0):
            os.read(self._doorbell, 4096)

    @property
    def state(self) -> WorkerState:
        """State that this worker reports."""
        return WorkerState(self.get(Word.STATE, self._reader))

    @state.setter
    def state(self, value: WorkerState) -> None:
        self.put(Word.STATE, self._reader, value)

    def report_progress(self) -> None:
        """Says that one more piece of a long command is done: a weight loaded, a graph captured."""
        self.put(Word.PROGRESS, self._reader, self.get(Word.PROGRESS, self._reader) + 1)

    def report_work(self) -> None:
        """Reports the CPU time of the thread that made this reader as a heartbeat, if that counts. Runs in another
        thread, so that it is reported in the midst of work. (On a CPU a rank that waits for others sleeps, so its time
        stands still.)"""
        if self.counts_work:
            self.put(Word.PROGRESS, self._reader, time.clock_gettime_ns(self._work_clock))
