import random
from dataclasses import dataclass, field, fields, replace

import pytest
import torch

from nanovllm.kernels.step.input import (
    DeviceState,
    StepBuffers,
    apply_deltas,
    apply_deltas_reference,
    expand_rows,
    expand_rows_reference,
    prepare_decode,
    prepare_decode_reference,
)
from nanovllm.wire.step import HEADER_SIZE, SlotConstants, pack_step
from tests.kernels.conftest import poison

BLOCK_SIZE = 16
TABLES = 3
WIDTH = 48
"""Width of a table on the device, of which texts reach the first MAX_BLOCKS."""
MAX_BLOCKS = 40


@dataclass
class Step:
    """A step as the host means it."""

    max_num_seqs: int
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_decode: int = 0
    num_sample: int = 0
    updates: list[tuple[int, int, int]] = field(default_factory=list)
    records: list[tuple[int, SlotConstants, int, int]] = field(default_factory=list)
    given_ids: list[int] = field(default_factory=list)
    lines: list[list[int]] = field(default_factory=list)

    def pack(self) -> torch.Tensor:
        """Junk stands past the rows, and behind the end."""
        packed = torch.from_numpy(pack_step(
            self.max_num_seqs, slots=self.slots, starts=self.starts, counts=self.counts,
            num_decode_rows=self.num_decode, num_sample_rows=self.num_sample, num_tokens=sum(self.counts),
            block_updates=[number for update in self.updates for number in update], slot_records=self.records,
            token_ids=self.given_ids, lines=self.lines,
        ).copy())  # fmt: skip
        packed[HEADER_SIZE:][: 3 * self.max_num_seqs].view(3, -1)[:, len(self.slots) :] = 999
        return torch.cat((packed, torch.full((50,), 777, dtype=torch.int32)))


def random_step(rng: random.Random, max_num_seqs: int, decode_only: bool, num_tables: int = 1) -> Step:
    step = Step(max_num_seqs)
    step.slots = rng.sample(range(max_num_seqs), rng.randint(0, max_num_seqs))
    step.num_decode = len(step.slots) if decode_only else rng.randint(0, len(step.slots))
    step.num_sample = rng.randint(step.num_decode, len(step.slots))
    for row in range(len(step.slots)):
        count = 1 if row < step.num_decode else rng.choice([1, 2, 15, 16, 17, 300])
        step.counts.append(count)
        step.starts.append(rng.randint(0, MAX_BLOCKS * BLOCK_SIZE - count))
    places = [(slot, index) for slot in range(max_num_seqs) for index in range(num_tables * WIDTH)]
    for slot, index in rng.sample(places, rng.choice([0, 1, 5, min(300, len(places))])):
        step.updates.append((slot, index, rng.randint(0, 2**31 // BLOCK_SIZE - 1)))
    for slot in rng.sample(range(max_num_seqs), rng.choice([0, 1, max_num_seqs])):
        constants = SlotConstants(rng.random(), rng.randint(-(2**63), 2**63 - 1))
        step.records.append((slot, constants, rng.randrange(10**6), rng.randrange(600)))
    step.lines = [[rng.randrange(-1, 1000) for _ in step.slots] for _ in range(4)]
    step.lines[3] = [abs(number) for number in step.lines[3]]
    step.given_ids = [rng.randint(0, 10**6) for _ in range(sum(step.counts) - step.num_decode)]
    return step


def random_state(max_num_seqs: int, device: torch.device, num_tables: int = 1) -> DeviceState:
    """A state of the device; with many rows, its layers have memory of fixed size."""
    state = DeviceState.allocate(max_num_seqs, num_tables, WIDTH, device, num_lines=1000 if max_num_seqs > 8 else 0)
    state.block_table.random_(0, 10000)
    state.last_token.random_(0, 10**6)
    state.num_computed.random_(0, MAX_BLOCKS * BLOCK_SIZE)
    state.temperature.uniform_()
    state.seed.random_()
    return state


def clone(state: DeviceState) -> DeviceState:
    tensors = {name: value.clone() for name, value in vars(state).items() if isinstance(value, torch.Tensor)}
    return replace(state, **tensors)


def poisoned_buffers(rows: int, tokens: int, device: torch.device, num_tables: int = 1) -> StepBuffers:
    """Buffers with a margin that must stay poisoned."""
    buffers = StepBuffers.allocate(rows + 5, tokens + 5, num_tables, device)
    for f in fields(buffers):
        getattr(buffers, f.name).copy_(poison(*getattr(buffers, f.name).shape, dtype=torch.int32, device=device))
    return buffers


def assert_same(actual: DeviceState | StepBuffers, expected: DeviceState | StepBuffers) -> None:
    for f in fields(actual):
        found, wanted = getattr(actual, f.name), getattr(expected, f.name)
        assert torch.equal(found, wanted) if isinstance(found, torch.Tensor) else found == wanted, f.name


@pytest.mark.parametrize("num_tables", [1, TABLES])
@pytest.mark.parametrize("case", range(6))
def test_apply_and_expand_equal_their_twins(case: int, num_tables: int, device: torch.device) -> None:
    rng = random.Random(case)
    max_num_seqs = [1, 3, 8, 8, 13, 16][case]
    step = random_step(rng, max_num_seqs, decode_only=False, num_tables=num_tables)
    padding = rng.choice((0, 0, 1, 5))  # decode rows of a CUDA graph that this step does not fill
    rows, tokens = len(step.slots) + padding + rng.randint(0, 3), sum(step.counts) + padding + rng.randint(0, 40)
    packed, state = step.pack().to(device), random_state(max_num_seqs, device, num_tables)
    twin_state = clone(state)
    apply_deltas(packed, max_num_seqs, state)
    apply_deltas_reference(packed, max_num_seqs, twin_state)
    assert_same(state, twin_state)
    buffers, twin_buffers = (poisoned_buffers(rows, tokens, device, num_tables) for _ in range(2))
    decode_rows = step.num_decode + padding
    expand_rows(packed, max_num_seqs, state, BLOCK_SIZE, buffers.narrow(rows, tokens), decode_rows)
    expand_rows_reference(packed, max_num_seqs, twin_state, BLOCK_SIZE, twin_buffers.narrow(rows, tokens), decode_rows)
    assert_same(buffers, twin_buffers)
    assert_same(state, twin_state)


@pytest.mark.parametrize("num_tables", [1, TABLES])
@pytest.mark.parametrize("case", range(6))
def test_prepare_decode_equals_its_twin(case: int, num_tables: int, device: torch.device) -> None:
    rng = random.Random(case)
    max_num_seqs = [1, 3, 8, 130, 17, 16][case]
    for _ in range(3):
        step = random_step(rng, max_num_seqs, decode_only=True, num_tables=num_tables)
        packed, bucket = step.pack().to(device), rng.randint(len(step.slots), max_num_seqs)
        state = random_state(max_num_seqs, device, num_tables)
        twin_state = clone(state)
        buffers, twin_buffers = (poisoned_buffers(bucket, bucket, device, num_tables) for _ in range(2))
        prepare_decode(packed, max_num_seqs, state, BLOCK_SIZE, buffers.narrow(bucket, bucket))
        prepare_decode_reference(packed, max_num_seqs, twin_state, BLOCK_SIZE, twin_buffers.narrow(bucket, bucket))
        assert_same(state, twin_state)
        assert_same(buffers, twin_buffers)


@pytest.mark.parametrize("case", range(20))
def test_twin_says_what_the_host_meant(case: int) -> None:
    rng = random.Random(1000 + case)
    num_tables = 1 + case % TABLES
    step = random_step(rng, 9, decode_only=False, num_tables=num_tables)
    packed, state = step.pack(), random_state(9, torch.device("cpu"), num_tables)
    apply_deltas_reference(packed, 9, state)
    for slot, index, block in step.updates:
        assert state.block_table[slot, index // WIDTH, index % WIDTH] == block
    for slot, constants, last, computed in step.records:
        assert (state.last_token[slot], state.num_computed[slot]) == (last, computed)
        assert state.temperature[slot] == torch.tensor(constants.temperature) and state.seed[slot] == constants.seed
    out = StepBuffers.allocate(12, 4000, num_tables, "cpu")
    padding = case % 3
    decode_rows = step.num_decode + padding
    for row, slot in enumerate(step.slots[: step.num_decode]):  # the device knows where it begins, the host a bound
        step.starts[row] = min(step.starts[row], int(state.num_computed[slot]))
    expand_rows_reference(packed, 9, state, BLOCK_SIZE, out, decode_rows)
    ends = [start + count for start, count in zip(step.starts, step.counts, strict=True)]
    assert state.num_computed[step.slots].tolist() == ends
    token, given = 0, iter(step.given_ids)
    for order, (slot, start, count) in enumerate(zip(step.slots, step.starts, step.counts, strict=True)):
        row = order
        if order >= step.num_decode:
            row, token = order + padding, max(token, decode_rows)
        assert (out.row_slot[row], out.context_lens[row], out.cu_seqlens_q[row]) == (slot, start + count, token)
        assert out.lines[:, row].tolist() == [column[order] for column in step.lines]
        for position in range(start, start + count):
            assert out.positions[token] == position
            for table, places in zip(state.block_table[slot], out.slot_mapping, strict=True):
                block = int(table[position // BLOCK_SIZE])
                assert places[token] == block * BLOCK_SIZE + position % BLOCK_SIZE
            expected = int(state.last_token[slot]) if order < step.num_decode else next(given)
            assert out.input_ids[token] == expected
            token += 1
        assert out.logits_indices[row] == (token - 1 if order < step.num_sample else 0)
    rows, token = len(step.slots) + padding, sum(step.counts) + padding
    unused = slice(step.num_decode, decode_rows)
    assert (out.row_slot[unused] == -1).all() and (out.slot_mapping[:, unused] == -1).all()
    assert (out.row_slot[rows:] == -1).all() and (out.context_lens[rows:] == 0).all()
    assert (out.cu_seqlens_q[rows:] == token).all() and (out.slot_mapping[:, token:] == -1).all()
    assert (out.positions[token:] == 0).all() and (out.input_ids[token:] == 0).all()
