"""Kernels of a model that drafts, what it is given after a step and what becomes of its draws, equal their twins."""

import random
from dataclasses import fields, replace

import pytest
import torch
from compiling import compile_only, run_alone

from nanovllm.kernels.sampling.gumbel import Draws, gumbel_argmax, gumbel_argmax_reference, keys_to_tokens
from nanovllm.kernels.step.drafts import take_draws_reference
from nanovllm.kernels.step.model_drafts import (
    follow_rows,
    follow_rows_reference,
    place_drafts,
    place_drafts_reference,
)
from nanovllm.kernels.step.state import DeviceState, DraftRows, StepBuffers
from tests.kernels.test_step_input_kernel import BLOCK_SIZE, MAX_BLOCKS, assert_same, clone, expanded, random_state

SIZE, HIDDEN, NUM_DRAFTS = 12, 8, 3
MOST = MAX_BLOCKS * BLOCK_SIZE - 3


def copy_of(rows: DraftRows) -> DraftRows:
    return DraftRows(**{field.name: getattr(rows, field.name).clone() for field in fields(rows)})


def assert_rows_same(rows: DraftRows, twin: DraftRows) -> None:
    """Asserts it where there are rows; what others have is not read."""
    live = rows.slot >= 0
    for field in fields(rows):
        found, wanted = getattr(rows, field.name), getattr(twin, field.name)
        if found.shape == live.shape and field.name not in ("slot", "row_slot", "index"):
            found, wanted = found[live], wanted[live]
        assert torch.equal(found, wanted), field.name


@pytest.mark.parametrize("case", range(8))
def test_kernels_equal_their_twins(case: int, device: torch.device) -> None:
    torch.manual_seed(case)
    rng = random.Random(case)
    state = random_state(SIZE, device, num_drafts=NUM_DRAFTS, num_ids=4)
    step, out = expanded(rng, state)
    step.following_ids = [rng.random() < 0.7 for _ in range(step.num_sample)]
    step.following_ids += [rng.randrange(1000) for _ in range(len(step.slots) - step.num_sample)]
    packed, decode_rows = step.pack().to(device), step.num_decode_rows
    end = decode_rows + step.num_sample - step.num_decode
    take_draws_reference(state, out, step.num_decode, step.places, end)
    rows = DraftRows.allocate(SIZE, HIDDEN, torch.float32, device)
    twin, twin_out = copy_of(rows), replace(out, next_ids=out.next_ids.clone())
    follow_rows(packed, SIZE, state, out, rows, decode_rows, BLOCK_SIZE, MOST)
    follow_rows_reference(packed, SIZE, state, twin_out, twin, decode_rows, BLOCK_SIZE, MOST)
    assert_rows_same(rows, twin)
    assert_same(out, twin_out)
    offsets = torch.randint(50, (1500,), device=device).cumsum(0)
    for place in range(NUM_DRAFTS):
        logits = torch.randn(SIZE, 1600, device=device)
        draws = Draws(rows.row_slot, state.temperature, state.seed, rows.sample_positions)
        keys = gumbel_argmax(logits, draws, 0, 1500, offsets)
        tokens = keys_to_tokens(keys)
        assert torch.equal(tokens, keys_to_tokens(gumbel_argmax_reference(logits, draws, 0, 1500, offsets)))
        halves = [gumbel_argmax(logits[:, at : at + 800], draws, at, 1500, offsets) for at in (0, 800)]
        assert torch.equal(tokens, keys_to_tokens(torch.maximum(*halves))), "two ranks draw what one does"
        other = clone(state)
        place_drafts(keys, rows, state, place, 0, BLOCK_SIZE)
        place_drafts_reference(keys, twin, other, place, 0, BLOCK_SIZE)
        assert_rows_same(rows, twin)
        assert_same(state, other)


def test_a_row_that_has_no_block_for_its_next_entry_drafts_no_more() -> None:
    state = DeviceState.allocate(2, 1, 4, "cpu", 0, NUM_DRAFTS)
    state.block_table[1, 0] = torch.tensor([7, 5, 9, 9])
    rows = DraftRows.allocate(1, HIDDEN, torch.float32, "cpu")
    for latest, expected in ((31, [3, 4, -1]), (47, [3, 4, 5])):
        rows.slot[0] = rows.row_slot[0] = 1
        rows.positions[0], rows.latest[0] = 30, latest
        for place in range(NUM_DRAFTS):
            place_drafts_reference(~torch.tensor([3 + place]), rows, state, place, 0, BLOCK_SIZE)
        assert state.drafts is not None and state.drafts[1].tolist() == expected
    assert state.drafts[0].tolist() == [-1] * NUM_DRAFTS


def compile_kernels() -> None:
    compile_only()
    state, rows = DeviceState.allocate(16, 2, 4, "cpu", 0, 3), DraftRows.allocate(16, HIDDEN, torch.bfloat16, "cpu")
    step, out = torch.zeros(500, dtype=torch.int32), StepBuffers.allocate(32, 64, 2, "cpu")
    follow_rows(step, 16, state, out, rows, 8, BLOCK_SIZE, MOST)
    draws = Draws(rows.row_slot, state.temperature, state.seed, rows.sample_positions)
    gumbel_argmax(torch.zeros(16, 4096, dtype=torch.bfloat16), draws, 0, 4096, torch.zeros(4096, dtype=torch.int64))
    place_drafts(torch.zeros(16, dtype=torch.int64), rows, state, 1, 1, BLOCK_SIZE)


def test_kernels_compile_for_a_gpu() -> None:
    run_alone(compile_kernels)
