"""Traffic of a steady decode step to the other ranks: bytes, slots of the ring, and the time that it takes.

Figures for 256 rows: 3,136 bytes without news and 12 for each row that takes a block, thus 3,160 on average with blocks
of 128 tokens (scripts/test tests/performance -s prints the time).
"""

import multiprocessing
import os

import numpy as np
import pytest
from simulation import SteadyDecodes, make_sequence
from timing import seconds

from nanovllm.executor.channel import SLOT_BYTES, CommandReader, CommandWriter, Word, create_shared_memory
from nanovllm.wire.step import HEADER_SIZE

NUM_ROWS, BLOCK = SteadyDecodes.num_rows, SteadyDecodes.block_size
FIXED = 4 * (HEADER_SIZE + 3 * NUM_ROWS)
UPDATE = 12
"""Bytes of a row's new block: slot, index, block."""


def test_bytes_of_a_steady_step() -> None:
    """Nothing but the fixed part, where a row's place is, and the blocks that rows take: one each in BLOCK steps."""
    decoding = SteadyDecodes()
    total = 0
    for _ in range(BLOCK):
        plan, packed = decoding.step()
        assert plan.num_decode_rows == plan.num_rows == NUM_ROWS
        assert packed.nbytes == FIXED + UPDATE * (len(plan.block_updates) // 3)
        total += packed.nbytes
    assert total == BLOCK * FIXED + NUM_ROWS * UPDATE
    assert FIXED == 3136
    assert total / BLOCK == 3160


def test_a_new_row_costs_its_tokens_and_a_record() -> None:
    decoding = SteadyDecodes()
    first = decoding.scheduler.running[0]
    decoding.scheduler.abort(first)
    before, _ = decoding.step()  # without it
    prompt = [1000 + n for n in range(300)]
    decoding.scheduler.add(make_sequence(NUM_ROWS, prompt, max_tokens=9))
    plan, packed = decoding.step()
    assert (before.num_rows, plan.num_rows, plan.num_decode_rows) == (NUM_ROWS - 1, NUM_ROWS, NUM_ROWS - 1)
    blocks = -(-len(prompt) // BLOCK) + sum(start % BLOCK == 0 for start in plan.starts[: NUM_ROWS - 1])
    assert packed.nbytes == FIXED + 4 * len(prompt) + 32 + UPDATE * blocks


def _answer(memory: int, bell: int) -> None:
    reader = CommandReader(memory, 0, bell, spin_seconds=5.0)
    while True:
        _, message = reader.receive()
        assert np.frombuffer(message, dtype=np.int32)[0] == NUM_ROWS


def test_a_steady_step_through_the_ring() -> None:
    """There and back between two processes, in one slot of the ring: a step never waits for room."""
    _, packed = SteadyDecodes().step()
    memory, (bell, doorbell) = create_shared_memory(), os.pipe()
    writer = CommandWriter(memory, [doorbell])
    worker = multiprocessing.get_context("fork").Process(target=_answer, args=(memory, bell), daemon=True)
    worker.start()

    def check() -> None:
        assert worker.is_alive()

    def round_trip() -> None:
        before = writer.num_published
        writer.send_step(packed, check)
        assert writer.num_published == before + 1, "one slot a step"
        while writer.get(Word.CONSUMED, 0) != writer.num_published:
            pass

    try:
        times = seconds(round_trip, rounds=500, warmup=100)
        print(f"{packed.nbytes} bytes there and back: {times[250] * 1e6:.1f} us")
    finally:
        worker.kill()
        worker.join()
        writer.close()
        for file in (memory, bell, doorbell):
            os.close(file)
    # Some 20 us where both processes have a core to themselves; a busy machine has none to give.
    assert times[0] < 5e-3


@pytest.mark.parametrize("rows", [1, 256, 1024])
def test_a_step_has_room_in_one_slot(rows: int) -> None:
    """Also where every row takes a block."""
    assert 4 * (HEADER_SIZE + 3 * rows) + UPDATE * rows <= SLOT_BYTES - 17
