import random
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import torch
from compiling import compile_only, run_alone

from nanovllm.kernels.step.drafts import (
    look_up_drafts,
    look_up_drafts_reference,
    take_draws,
    take_draws_reference,
)
from nanovllm.kernels.step.input import (
    apply_deltas,
    apply_deltas_reference,
    expand_rows,
    expand_rows_reference,
    prepare_decode,
    prepare_decode_reference,
)
from nanovllm.kernels.step.state import DeviceState, StepBuffers
from nanovllm.wire.step import HEADER_SIZE, NO_LINE, SlotConstants, SlotRecord, pack_step
from tests.kernels.conftest import poison

BLOCK_SIZE = 16
TABLES = 3
WIDTH = 48
"""Width of a table on the device, of which texts reach the first MAX_BLOCKS."""
MAX_BLOCKS = 40
NUM_BLOCKS = 10000


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
    records: list[SlotRecord] = field(default_factory=list)
    given_ids: list[int] = field(default_factory=list)
    lines: list[list[int]] = field(default_factory=list)
    following_ids: list[int] = field(default_factory=list)
    places: int = 1

    @property
    def num_decode_rows(self) -> int:
        """Rows of decodes on the device."""
        return self.places * self.num_decode

    @property
    def num_rows(self) -> int:
        return len(self.slots) + self.num_decode_rows - self.num_decode

    @property
    def num_tokens(self) -> int:
        return sum(self.counts) + self.num_decode_rows - self.num_decode

    def pack(self) -> torch.Tensor:
        """Junk stands past the rows, and behind the end."""
        packed = torch.from_numpy(pack_step(
            self.max_num_seqs, slots=self.slots, starts=self.starts, counts=self.counts,
            num_decode_rows=self.num_decode, num_sample_rows=self.num_sample, num_tokens=self.num_tokens,
            block_updates=[number for update in self.updates for number in update], slot_records=self.records,
            token_ids=self.given_ids, lines=self.lines, places=self.places, following_ids=self.following_ids,
        ).copy())  # fmt: skip
        packed[HEADER_SIZE:][: 3 * self.max_num_seqs].view(3, -1)[:, len(self.slots) :] = 999
        return torch.cat((packed, torch.full((50,), 777, dtype=torch.int32)))


def random_step(
    rng: random.Random, max_num_seqs: int, decode_only: bool, num_tables: int = 1, num_drafts: int = 0
) -> Step:
    step = Step(max_num_seqs, places=rng.randint(1, 1 + num_drafts))
    step.slots = rng.sample(range(max_num_seqs), rng.randint(0, max_num_seqs))
    step.num_decode = len(step.slots) if decode_only else rng.randint(0, len(step.slots))
    step.num_sample = rng.randint(step.num_decode, len(step.slots))
    for row in range(len(step.slots)):
        count = 1 if row < step.num_decode else rng.choice([1, 2, 15, 16, 17, 300])
        step.counts.append(count)
        step.starts.append(rng.randint(0, MAX_BLOCKS * BLOCK_SIZE - count))
    places = [(slot, index) for slot in range(max_num_seqs) for index in range(num_tables * WIDTH)]
    for slot, index in rng.sample(places, rng.choice([0, 1, 5, min(300, len(places))])):
        step.updates.append((slot, index, rng.randrange(NUM_BLOCKS if num_drafts else 2**31 // BLOCK_SIZE)))
    for slot in rng.sample(range(max_num_seqs), rng.choice([0, 1, max_num_seqs])):
        constants = SlotConstants(rng.random(), rng.randint(-(2**63), 2**63 - 1))
        numbers = rng.randrange(10**6), rng.randrange(600), rng.randrange(-1, 5)
        step.records.append(SlotRecord(slot, constants, *numbers))
    numbers_of = range(-1, 1000), range(500), range(500, 1000), range(1000)
    step.lines = [rng.sample(numbers, len(step.slots)) for numbers in numbers_of]
    step.given_ids = [rng.randint(0, 10**6) for _ in range(sum(step.counts) - step.num_decode)]
    return step


def random_state(
    max_num_seqs: int, device: torch.device, num_tables: int = 1, num_drafts: int = 0, num_ids: int = 10**6
) -> DeviceState:
    """A state of the device; with many rows, its layers have memory of fixed size; of some slots there are fewer drafts
    than num_drafts."""
    ids = torch.randint(num_ids, (NUM_BLOCKS, BLOCK_SIZE), dtype=torch.int32, device=device) if num_drafts else None
    lines, spare = (1000, 4 * max_num_seqs * bool(num_drafts)) if max_num_seqs > 8 else (0, 0)
    has_adapters = max_num_seqs != 8
    sizes = (lines, num_drafts, ids, has_adapters, spare)
    state = DeviceState.allocate(max_num_seqs, num_tables, WIDTH, device, *sizes)
    if state.places_of_lines is not None and state.spare_places is not None:
        places = torch.randperm(lines + spare, dtype=torch.int32, device=device)
        state.places_of_lines.copy_(places[:lines])
        state.spare_places.copy_(places[lines:])
    if state.drafts is not None:
        many = torch.randint(num_drafts + 1, (max_num_seqs, 1), device=device)
        drafted = torch.arange(num_drafts, device=device) < many
        state.drafts.copy_(torch.where(drafted, torch.randint_like(state.drafts, num_ids), -1))
    state.block_table.random_(0, NUM_BLOCKS)
    state.last_token.random_(0, num_ids)
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


def forget_torn_ids(state: DeviceState, twin: DeviceState, buffers: StepBuffers) -> None:
    """Takes the twin's ids where two rows have the same random block: which comes last is left open on a GPU."""
    if state.ids is not None and twin.ids is not None:
        slots, times = buffers.slot_mapping[0].unique(return_counts=True)
        torn = slots[(times > 1) & (slots >= 0)].long()
        state.ids.view(-1)[torn] = twin.ids.view(-1)[torn]


def prepare_bounds(step: Step, state: DeviceState, rng: random.Random) -> None:
    """Decodes begin where the slot is; with drafts some have fewer places, or none, up to their bound."""
    computed = {record.slot: record.num_computed for record in step.records}
    for row, slot in enumerate(step.slots[: step.num_decode]):
        begin = computed.get(slot, int(state.num_computed[slot]))
        step.starts[row] = max(0, begin + rng.randint(-1, step.places)) if state.drafts is not None else begin
        if state.drafts is not None:  # in or near the step it gets to where its state is kept, or has no line for that
            step.lines[2][row] = rng.choice([NO_LINE, step.lines[2][row], step.lines[2][row]])
            step.lines[3][row] = max(0, begin + rng.randint(-1, step.places))


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("num_tables", [1, TABLES])
@pytest.mark.parametrize("case", range(6))
def test_apply_and_expand_equal_their_twins(
    case: int, num_tables: int, num_drafts: int, device: torch.device
) -> None:
    rng = random.Random(case)
    max_num_seqs = [1, 3, 8, 8, 13, 16][case]
    step = random_step(rng, max_num_seqs, decode_only=False, num_tables=num_tables, num_drafts=num_drafts)
    padding = rng.choice((0, 0, 1, 5))  # decode rows of a CUDA graph that this step does not fill
    rows, tokens = step.num_rows + padding + rng.randint(0, 3), step.num_tokens + padding + rng.randint(0, 40)
    state = random_state(max_num_seqs, device, num_tables, num_drafts)
    prepare_bounds(step, state, rng)
    packed = step.pack().to(device)
    twin_state = clone(state)
    apply_deltas(packed, max_num_seqs, state)
    apply_deltas_reference(packed, max_num_seqs, twin_state)
    assert_same(state, twin_state)
    buffers, twin_buffers = (poisoned_buffers(rows, tokens, device, num_tables) for _ in range(2))
    decode_rows = step.num_decode_rows + padding
    expand_rows(packed, max_num_seqs, state, BLOCK_SIZE, buffers.narrow(rows, tokens), decode_rows)
    expand_rows_reference(packed, max_num_seqs, twin_state, BLOCK_SIZE, twin_buffers.narrow(rows, tokens), decode_rows)
    assert_same(buffers, twin_buffers)
    forget_torn_ids(state, twin_state, twin_buffers)
    assert_same(state, twin_state)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("num_tables", [1, TABLES])
@pytest.mark.parametrize("case", range(6))
def test_prepare_decode_equals_its_twin(case: int, num_tables: int, num_drafts: int, device: torch.device) -> None:
    rng = random.Random(case)
    max_num_seqs = [1, 3, 8, 130, 17, 16][case]
    for _ in range(3):
        step = random_step(rng, max_num_seqs, True, num_tables, num_drafts)
        state = random_state(max_num_seqs, device, num_tables, num_drafts)
        prepare_bounds(step, state, rng)
        packed, bucket = step.pack().to(device), rng.randint(step.num_rows, step.places * max_num_seqs)
        twin_state = clone(state)
        buffers, twin_buffers = (poisoned_buffers(bucket, bucket, device, num_tables) for _ in range(2))
        prepare_decode(packed, max_num_seqs, state, BLOCK_SIZE, buffers.narrow(bucket, bucket))
        prepare_decode_reference(packed, max_num_seqs, twin_state, BLOCK_SIZE, twin_buffers.narrow(bucket, bucket))
        assert_same(buffers, twin_buffers)
        forget_torn_ids(state, twin_state, twin_buffers)
        assert_same(state, twin_state)


@pytest.mark.parametrize("case", range(20))
def test_twin_says_what_the_host_meant(case: int) -> None:
    rng = random.Random(1000 + case)
    num_tables = 1 + case % TABLES
    step = random_step(rng, 9, decode_only=False, num_tables=num_tables)
    packed, state = step.pack(), random_state(9, torch.device("cpu"), num_tables)
    apply_deltas_reference(packed, 9, state)
    for slot, index, block in step.updates:
        assert state.block_table[slot, index // WIDTH, index % WIDTH] == block
    for slot, constants, last, computed, adapter in step.records:
        assert (state.last_token[slot], state.num_computed[slot]) == (last, computed)
        assert state.adapters is not None and state.adapters[slot] == adapter
        assert state.temperature[slot] == torch.tensor(constants.temperature) and state.seed[slot] == constants.seed
    out = StepBuffers.allocate(12, 4000, num_tables, "cpu")
    padding = case % 3
    decode_rows = step.num_decode + padding
    for row, slot in enumerate(step.slots[: step.num_decode]):  # the device knows where it begins, the host a bound
        state.num_computed[slot] = state.num_computed[slot].clamp(max=step.starts[row])
        step.starts[row] = int(state.num_computed[slot])
    expand_rows_reference(packed, 9, state, BLOCK_SIZE, out, decode_rows)
    ends = [start + count for start, count in zip(step.starts, step.counts, strict=True)]
    assert state.num_computed[step.slots].tolist() == ends
    token, given = 0, iter(step.given_ids)
    for order, (slot, start, count) in enumerate(zip(step.slots, step.starts, step.counts, strict=True)):
        row = order
        if order >= step.num_decode:
            row, token = order + padding, max(token, decode_rows)
        assert (out.row_slot[row], out.context_lens[row], out.cu_seqlens_q[row]) == (slot, start + count, token)
        assert out.lines[:4, row].tolist() == [column[order] for column in step.lines]
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


@pytest.mark.parametrize("expand", [expand_rows, expand_rows_reference, prepare_decode, prepare_decode_reference])
def test_places_of_a_decode_follow_each_other_up_to_its_bound(expand: Any, device: torch.device) -> None:
    """A slot that is behind its bound, as that of a row that ended a step ago, writes nothing: its last block may be
    shared by then."""
    for computed, latest, drafts, live in ((10, 12, (5, 6, -1), 3), (10, 11, (5, 6, 7), 2), (12, 11, (5, 6, 7), 0)):
        state = random_state(4, device, num_drafts=3)
        state.num_computed[2], state.last_token[2] = computed, 77
        state.drafts[2] = torch.tensor(drafts)
        step = Step(4, slots=[2], starts=[latest], counts=[1], num_decode=1, num_sample=1, places=4)
        out, before = StepBuffers.allocate(5, 5, 1, device), clone(state)
        decode_rows = () if expand in (prepare_decode, prepare_decode_reference) else (5,)
        expand(step.pack().to(device), 4, state, BLOCK_SIZE, out, *decode_rows)
        assert out.row_slot.tolist() == [2] * live + [-1] * (5 - live)
        assert out.positions.tolist() == [*range(computed, computed + live)] + [0] * (5 - live)
        assert out.context_lens.tolist() == [*range(computed + 1, computed + live + 1)] + [0] * (5 - live)
        assert out.input_ids.tolist() == [77, *drafts][:live] + [0] * (5 - live)
        assert (out.slot_mapping[0] >= 0).tolist() == [True] * live + [False] * (5 - live)
        assert state.num_computed[2] == computed
        changed = (state.ids != before.ids).nonzero()
        assert {int(block) * BLOCK_SIZE + int(offset) for block, offset in changed} <= {*out.slot_mapping[0].tolist()}


def expanded(rng: random.Random, state: DeviceState) -> tuple[Step, StepBuffers]:
    """A step after sampling: what it drew often are the drafts."""
    size = state.last_token.shape[0]
    step = random_step(rng, size, decode_only=False, num_drafts=3)
    step.updates, step.records, device = [], [], state.last_token.device
    prepare_bounds(step, state, rng)
    out = StepBuffers.allocate(step.num_rows + 1, step.num_tokens, 1, device)
    expand_rows_reference(step.pack().to(device), size, state, BLOCK_SIZE, out, step.num_decode_rows)
    drawn = torch.randint(0, 4, out.tokens.shape, dtype=torch.int32, device=device)
    ids = out.input_ids[1 : step.num_decode_rows]
    drawn[: len(ids)] = torch.where(torch.rand(len(ids), device=device) < 0.7, ids, drawn[: len(ids)])
    out.tokens.copy_(drawn)
    return step, out


@pytest.mark.parametrize("rates", [None, (0.7, 0.4, 0.1)])
@pytest.mark.parametrize("case", range(8))
def test_draws_and_drafts_equal_their_twins(
    case: int, rates: tuple[float, ...] | None, device: torch.device
) -> None:
    """Texts of few ids, so that there are matches."""
    torch.manual_seed(case)
    rng, given = random.Random(case), None if rates is None else torch.tensor(rates, device=device)
    state = random_state(12, device, num_drafts=3, num_ids=4)
    step, out = expanded(rng, state)
    twin_state = clone(state)
    twin_out = replace(out, tokens=out.tokens.clone())
    num_rows = step.num_sample
    end = step.num_decode_rows + num_rows - step.num_decode
    decodes = (step.num_decode, step.places)
    take_draws(state, out, *decodes, end, given)
    take_draws_reference(twin_state, twin_out, *decodes, end, given)
    assert_same(out, twin_out)
    assert_same(state, twin_state)
    if num_rows:
        lengths = rng.choice([(1, 1), (1, 4), (2, 3), (3, 3)])
        look_up_drafts(state, out, *decodes, step.num_decode_rows, num_rows, lengths, rates is not None)
        look_up_drafts_reference(
            twin_state, twin_out, *decodes, step.num_decode_rows, num_rows, lengths, rates is not None
        )
        assert_same(state, twin_state)
        assert_same(out, twin_out)


@pytest.mark.parametrize(
    ("given", "drawn", "left"),
    [
        ([9, 3, 4], [3, 4, 5], [3, 4, 5]),
        ([9, 3, 4], [3, 7, 5], [3, 7, -1]),
        ([9, 3, 4], [8, 4, 5], [8, -1, -1]),
        ([9, 3], [3, 6, 0], [3, 6, -2]),
        ([9], [3, 3, 3], [3, -2, -2]),
        ([], [3, 3, 3], [-2, -2, -2]),
    ],
)
def test_a_draw_holds_where_all_before_it_were_drafted(given: list[int], drawn: list[int], left: list[int]) -> None:
    state, out = random_state(2, torch.device("cpu"), num_drafts=2), StepBuffers.allocate(3, 3, 1, "cpu")
    before = clone(state)
    live = len(given)
    out.row_slot[:] = torch.tensor([1] * live + [-1] * (3 - live))
    out.input_ids[:live], out.tokens[:3] = torch.tensor(given, dtype=torch.int32), torch.tensor(drawn)
    out.positions[:live] = torch.arange(live) + 20
    take_draws_reference(state, out, 1, 3, 3)
    assert out.tokens.tolist() == [*left, 0]
    tokens = [token for token in left if token >= 0]
    assert state.last_token[1] == (tokens[-1] if tokens else before.last_token[1])
    assert state.num_computed[1] == (20 + len(tokens) if tokens else before.num_computed[1])
    assert state.num_computed[0] == before.num_computed[0]


def test_drafts_follow_the_newest_of_the_longest_matches() -> None:
    state, out = random_state(1, torch.device("cpu"), num_drafts=4), StepBuffers.allocate(1, 1, 1, "cpu")
    state.block_table[0, 0, :2] = torch.tensor([5, 3])
    for text, lengths, drafts in (
        ([1, 2, 3, 9, 2, 3, 8, 7, 2, 3], (1, 4), [8, 7, 2, 3]),
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], (1, 4), [9, 2, 3, 8]),
        ([4, 6, 4, 6], (1, 4), [4, 6, 4, 6]),
        ([1, 2, 3], (1, 4), [-1] * 4),
        ([5, 1, 5], (2, 4), [-1] * 4),
        ([*range(20), 3, 4], (2, 2), [5, 6, 7, 8]),
    ):
        *known, last = text
        blocks = torch.tensor(known + [0] * (32 - len(known)), dtype=torch.int32).view(2, 16)
        state.ids[[5, 3]] = blocks
        state.num_computed[0], state.last_token[0], out.row_slot[0], out.tokens[:] = len(known), last, 0, 0
        look_up_drafts_reference(state, out, 1, 1, 1, 1, lengths)
        assert state.drafts[0].tolist() == drafts
        assert out.tokens[1] == sum(draft >= 0 for draft in drafts)


def compile_steps() -> None:
    compile_only()
    step = torch.zeros(500, dtype=torch.int32)
    for num_drafts in (0, 1, 15):
        ids = torch.zeros(4, BLOCK_SIZE, dtype=torch.int32) if num_drafts else None
        lines = 8 * (num_drafts < 15)
        state = DeviceState.allocate(16, 2, 4, "cpu", lines, num_drafts, ids, num_spare=4 * lines * bool(num_drafts))
        out = StepBuffers.allocate(32, 64, 2, "cpu")
        prepare_decode(step, 16, state, BLOCK_SIZE, out.narrow(8, 8))
        expand_rows(step, 16, state, BLOCK_SIZE, out, 8)
        for rates in (None, torch.zeros(num_drafts)) if num_drafts else ():
            take_draws(state, out, 2, 1 + num_drafts, 9, rates)
            look_up_drafts(state, out, 2, 1 + num_drafts, 8, 3, (1, 4), rates is not None)


def test_kernels_compile_for_a_gpu() -> None:
    run_alone(compile_steps)


def test_tokens_have_the_adapters_of_their_rows() -> None:
    """Decodes, chunks and padding, also of rows without tokens."""
    out = StepBuffers.allocate(8, 16, 1, "cpu").narrow(7, 14)
    out.row_slot.copy_(torch.tensor([4, 0, -1, 2, 3, -1, -1]))
    out.cu_seqlens_q.copy_(torch.tensor([0, 1, 2, 3, 6, 10, 10, 10]))
    of_slots = torch.tensor([-1, 9, 5, 6, 7], dtype=torch.int32)
    assert out.token_adapters(of_slots).tolist() == [7, -1, -1, 5, 5, 5, 6, 6, 6, 6, -1, -1, -1, -1]
