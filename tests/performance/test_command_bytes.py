"""Bytes of a step on its way to the other ranks."""

import pytest
from simulation import Simulation, decoding

from nanovllm.executor.channel import SLOT_BYTES
from nanovllm.wire.step import HEADER_SIZE, RECORD_SIZE, dummy_step

NUM_ROWS, BLOCK = 32, 4
FIXED = 4 * (HEADER_SIZE + 3 * NUM_ROWS)
UPDATE = 12
"""Bytes of a row's new block: slot, index, block."""


def test_a_steady_step_is_its_rows_and_the_blocks_that_they_take() -> None:
    """One each in BLOCK steps. A new request adds its tokens and a record."""
    simulation = Simulation(num_blocks=1000, block_size=BLOCK, depth=1, max_num_seqs=NUM_ROWS)
    decoding(simulation, NUM_ROWS - 1, max_tokens=100)
    total = 0
    for _ in range(BLOCK):
        schedule = simulation.step()
        assert schedule is not None and schedule.num_decode_rows == schedule.num_rows == NUM_ROWS - 1
        total += schedule.pack(NUM_ROWS).nbytes
    assert total == BLOCK * FIXED + (NUM_ROWS - 1) * UPDATE
    simulation.add([9] * 30)
    schedule = simulation.step()
    assert schedule is not None and (schedule.num_rows, schedule.num_prefill_tokens) == (NUM_ROWS, 30)
    assert schedule.pack(NUM_ROWS).nbytes == FIXED + 4 * (30 + RECORD_SIZE + len(schedule.block_updates))


@pytest.mark.parametrize("rows", [1, 256, 1024])
def test_a_step_has_room_in_one_slot(rows: int) -> None:
    """Also where every row takes a block."""
    assert 4 * (HEADER_SIZE + 3 * rows) + UPDATE * rows <= SLOT_BYTES - 17


def test_no_row_of_the_largest_step_is_longer_than_the_context() -> None:
    for tokens, rows, longest in ((100, 8, 13), (5, 5, 1), (1000, 8, 20)):
        assert dummy_step(8, tokens, max_model_len=20)[[0, 3, 6]].tolist() == [rows, min(tokens, 8 * 20), longest]
