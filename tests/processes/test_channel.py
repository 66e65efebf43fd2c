"""The command ring by itself: sizes, order, sleep and wake-up, and what a command costs."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nanovllm.executor.channel import (
    NUM_SLOTS,
    SLOT_BYTES,
    STEP,
    CommandReader,
    CommandWriter,
    Word,
    create_shared_memory,
)

ROOM = SLOT_BYTES - 17  # bytes of a message in one slot
SIZES = (0, 1, 4096, ROOM - 1, ROOM, ROOM + 1, 2 * ROOM, NUM_SLOTS * SLOT_BYTES, 3 * NUM_SLOTS * SLOT_BYTES + 5)


class Ring:
    """A writer here and its readers, each with a doorbell."""

    def __init__(self, num_readers: int = 1) -> None:
        self.memory = create_shared_memory()
        self.bells = [os.pipe() for _ in range(num_readers)]
        self.writer = CommandWriter(self.memory, [write for _, write in self.bells])

    def reader(self, index: int = 0, spin_seconds: float = 0.0) -> CommandReader:
        return CommandReader(self.memory, index, self.bells[index][0], spin_seconds)

    def close(self) -> None:
        self.writer.close()
        os.close(self.memory)
        for pair in self.bells:
            for fd in pair:
                os.close(fd)


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring(num_readers=2)
    yield ring
    ring.close()


def never() -> None:
    """`check` of a writer whose readers are well."""


def in_thread(function: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def payload(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("spin_seconds", [0.0, 0.2])
def test_any_size_gets_through_in_order_to_every_reader(ring: Ring, spin_seconds: float) -> None:
    """Steps and calls in turn."""
    received: list[list[object]] = [[], []]

    def read(index: int) -> None:
        reader = ring.reader(index, spin_seconds)
        for _ in range(2 * len(SIZES)):
            kind, message = reader.receive()
            received[index].append(bytes(message) if kind == STEP else message)
        del message  # a view of the reader's own copy
        reader.close()

    threads = [in_thread(read, index) for index in range(2)]
    messages = [payload(size).tobytes() for size in SIZES]
    for sent in messages:
        ring.writer.send_step(sent, never)
        ring.writer.send_call("add", (len(sent), sent), never)
    for thread in threads:
        thread.join(timeout=30)
    assert received == [[each for sent in messages for each in (sent, ("add", (len(sent), sent)))]] * 2
    assert [ring.writer.get(Word.CONSUMED, index) for index in range(2)] == [ring.writer.num_published] * 2


def test_a_sleeper_wakes_at_once(ring: Ring) -> None:
    arrivals: list[float] = []

    def read() -> None:
        reader = ring.reader()
        for _ in range(10):
            reader.receive()
            arrivals.append(time.perf_counter())

    single = CommandWriter(ring.memory, [ring.bells[0][1]])  # nobody reads as the second reader here
    thread, delays = in_thread(read), []
    for turn in range(10):
        time.sleep(0.05)  # long enough for the reader to fall asleep
        sent = time.perf_counter()
        single.send_step(b"wake up", never)
        while len(arrivals) <= turn and thread.is_alive():
            time.sleep(1e-4)
        delays.append(arrivals[turn] - sent)
    thread.join(timeout=5)
    assert sorted(delays)[len(delays) // 2] < 0.05  # an unheard bell would cost a second
    single.close()


def test_a_full_ring_asks_whether_to_go_on_waiting(ring: Ring) -> None:
    class ReaderDiedError(Exception):
        pass

    def check() -> None:
        raise ReaderDiedError

    with pytest.raises(ReaderDiedError):
        ring.writer.send_step(payload(2 * NUM_SLOTS * SLOT_BYTES), check)
    assert ring.writer.get(Word.CONSUMED, 0) < ring.writer.num_published, "a reader that takes nothing out is behind"


def test_a_reader_that_has_gone_does_not_break_the_writer(ring: Ring) -> None:
    thread = in_thread(lambda: ring.reader().receive())
    ring.writer.send_step(b"1", never)
    thread.join(timeout=5)
    ring.writer.put(Word.SLEEPING, 0, 1)  # it has gone to sleep for ever
    os.close(ring.bells[0][0])
    ring.writer.send_step(b"2", never)
    ring.bells[0] = (os.dup(ring.bells[0][1]), ring.bells[0][1])


def test_doorbells_beyond_the_first_1024_files() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    try:
        ring = Ring()
        reader = ring.reader()
        thread = in_thread(reader.receive)
        time.sleep(0.05)
        ring.writer.send_step(b"ring", never)
        thread.join(timeout=0.9)
        assert not thread.is_alive()
        ring.close()
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("counts", [True, False])
def test_work_is_what_a_process_computes_where_that_counts(ring: Ring, counts: bool) -> None:
    reader = ring.reader(1)
    reader.counts_work = counts

    def work_while(function: Any, *args: Any) -> int:
        """Amount of work that another thread reports while this one calls `function`."""
        in_thread(reader.report_work).join()
        before = ring.writer.get(Word.PROGRESS, 1)
        function(*args)
        in_thread(reader.report_work).join()
        return ring.writer.get(Word.PROGRESS, 1) - before

    def compute() -> None:
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            pass

    assert work_while(in_thread(compute).join) < 1e7, "nobody waits for the threads beside this one, which sleeps"
    assert (work_while(compute) > 2e8) is counts
    reader.close()


def test_a_slot_is_read_between_two_fences(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Arm nothing else orders the load of the counter before the loads of what it announces, and these before the
    store that gives the slot back."""
    order: list[str] = []
    reader = ring.reader()
    fence, slot = reader._fence, reader._slot
    monkeypatch.setattr(reader, "_fence", lambda: (order.append("fence"), fence())[1])
    monkeypatch.setattr(reader, "_slot", lambda sequence: (order.append("slot"), slot(sequence))[1])
    for _ in range(2):
        ring.writer.send_step(payload(3 * ROOM), never)
        reader.receive()
    assert "slot" in order
    for at, step in enumerate(order):
        assert step == "fence" or order[at - 1] == order[at + 1] == "fence"
    assert order[0] == "fence"
