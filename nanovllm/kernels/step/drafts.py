"""Drafts: taken in where the model draws the same, and made by looking up what followed the same tokens before.

A decode has a row of the step for each of its places: its last token, and what was drafted to follow. What the model
draws at a place holds if all drafts up to it are what was drawn before them. So the tokens are those of plain decoding:
a draw is keyed by seed, position and id, whoever else is in the step.

Lookup: Saxena, Prompt Lookup Decoding, 2023.
"""

import torch

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.sampling.rng import WORD, random_words, random_words_reference, row_key, row_key_reference
from nanovllm.kernels.step.state import DeviceState, StepBuffers

_POSITIONS = tl.constexpr(1 << 26)
"""Bound of positions: above it a key has the length of a match."""


@triton.jit(do_not_specialize=["num_decodes", "places", "end"])
def _take_draws_kernel(ROW_SLOT, POSITIONS, INPUT_IDS, TOKENS, LINES, LAST_TOKEN, NUM_COMPUTED, SEED, OF_LINES,
                       SPARE, RATES, lines_stride, num_decodes, places, end, BLOCK: tl.constexpr):  # fmt: skip
    """take_draws of ROW_SLOT, POSITIONS, INPUT_IDS, TOKENS int32 [rows], LINES (see StepBuffers) and LAST_TOKEN,
    NUM_COMPUTED, SEED [S]; OF_LINES, SPARE: see copy_lines. A lane has one decode, of `places` rows."""
    decode = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = decode < num_decodes
    slot = tl.load(ROW_SLOT + decode * places, mask=there, other=-1)
    position = tl.load(POSITIONS + decode * places, mask=there, other=0)
    holds, token, gained, last = slot >= 0, tl.zeros_like(slot) - 1, tl.zeros_like(slot), tl.zeros_like(slot)
    if RATES is not None:
        k0, k1 = row_key(tl.load(SEED + slot, mask=holds, other=0), position)
        chance = random_words(k0, k1, tl.zeros_like(slot)).to(tl.uint32, bitcast=True).to(tl.float32) / 4294967296.0
    for place in range(places):
        row = decode * places + place
        is_live = tl.load(ROW_SLOT + row, mask=there, other=-1) >= 0
        is_right = tl.load(INPUT_IDS + row, mask=there, other=-2) == token
        if RATES is not None:
            is_right = chance < tl.load(RATES + place - 1, mask=place > 0, other=1.0)
        holds = holds & is_live & (is_right | (place == 0))
        token = tl.load(TOKENS + row, mask=there, other=-1)
        tl.store(TOKENS + row, tl.where(holds, token, tl.where(is_live, -1, -2)), mask=there)
        last = tl.where(holds, token, last)
        gained += holds.to(tl.int32)
    tl.store(LAST_TOKEN + slot, last, mask=gained > 0)
    tl.store(NUM_COMPUTED + slot, position + gained, mask=gained > 0)
    if OF_LINES is not None:
        moved = gained > 0
        own = LINES + decode * places
        line = OF_LINES + tl.load(own + 4 * lines_stride, mask=moved, other=0)
        spare = SPARE + decode * places + gained - 1
        before, after = tl.load(line, mask=moved, other=0), tl.load(spare, mask=moved, other=0)
        keep = tl.load(own + 5 * lines_stride, mask=moved, other=-1)
        after_rows = tl.load(own + 6 * lines_stride, mask=moved, other=0) - position
        passed = moved & (keep >= 0) & (after_rows >= 0) & (after_rows < gained)
        freed = tl.load(OF_LINES + keep, mask=passed, other=0)
        is_early = passed & (after_rows > 0)
        early = SPARE + decode * places + after_rows - 1
        tl.store(OF_LINES + keep, tl.where(is_early, tl.load(early, mask=is_early, other=0), before), mask=passed)
        tl.store(early, freed, mask=is_early)
        tl.store(line, after, mask=moved)
        tl.store(spare, tl.where(passed & (after_rows == 0), freed, before), mask=moved)
    if tl.program_id(0) == 0:
        tl.store(TOKENS + end, 0)


def take_draws(
    state: DeviceState, out: StepBuffers, num_decodes: int, places: int, end: int, rates: torch.Tensor | None = None
) -> None:
    """Takes what the first num_decodes * places rows of a step drew, `out.tokens`, those of a decode one after another:
    a draw holds where each row before it drew the id that the next row was given. Others become -1, and -2 in rows that
    computed nothing. Moves the decodes' slots on, and their lines to where the state after the last draw that holds is:
    what was there before becomes spare. Where a decode gets past the tokens after which its state is to be kept, the
    line for that moves to where that state is, likewise. Writes 0 into out.tokens[end], where look_up_drafts counts.

    rates: float32 [k]: at place i a draft counts as right, whatever it is, in so large a share of cases. For
    measurements; then texts are not those of plain decoding."""
    _take_draws_kernel[(max(1, triton.cdiv(num_decodes, 32)),)](
        out.row_slot, out.positions, out.input_ids, out.tokens, out.lines, state.last_token, state.num_computed,
        state.seed, state.places_of_lines, state.spare_places, rates, out.lines.stride(0), num_decodes, places, end,
        BLOCK=32, num_warps=1,
    )  # fmt: skip


@triton.jit
def _text(TABLE, IDS, position, mask, BLOCK_SIZE: tl.constexpr):
    """Ids at these positions of a text that has the blocks TABLE."""
    block = tl.load(TABLE + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    return tl.load(IDS + block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask, other=-1)


@triton.jit(do_not_specialize=["num_decodes", "places", "first_chunk_row", "least", "end"])
def _look_up_kernel(ROW_SLOT, LAST_TOKEN, NUM_COMPUTED, BLOCK_TABLE, IDS, DRAFTS, TOKENS, table_stride, num_decodes,
                    places, first_chunk_row, least, end, K: tl.constexpr, K_PADDED: tl.constexpr, MOST: tl.constexpr,
                    FILL: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """look_up_drafts of ROW_SLOT, TOKENS int32 [rows], LAST_TOKEN, NUM_COMPUTED int32 [S], BLOCK_TABLE [S,
    table_stride], IDS int32 [blocks, BLOCK_SIZE] and DRAFTS int32 [S, K]. A program has one row that gained a token."""
    index = tl.program_id(0)
    row = tl.where(index < num_decodes, index * places, first_chunk_row + index - num_decodes)
    slot = tl.load(ROW_SLOT + row)
    if slot >= 0:
        table = BLOCK_TABLE + slot.to(tl.int64) * table_stride
        length = tl.load(NUM_COMPUTED + slot)
        last = tl.load(LAST_TOKEN + slot)
        best = tl.full([BLOCK], -1, tl.int32)
        begin = length * 0
        while begin < length:
            position = begin + tl.arange(0, BLOCK)
            equal = position < length
            matched = tl.zeros([BLOCK], tl.int32)
            for back in tl.static_range(MOST):
                own = last
                if back > 0:
                    own = _text(table, IDS, length - back, length >= back, BLOCK_SIZE)
                there = equal & (position >= back)
                equal = there & (_text(table, IDS, position - back, there, BLOCK_SIZE) == own)
                matched += equal.to(tl.int32)
            best = tl.maximum(best, tl.where(matched >= least, matched * _POSITIONS + position, -1))
            begin += BLOCK
        key = tl.max(best, 0)
        found = key >= 0
        position = tl.where(found, key % _POSITIONS, 0)
        lanes = tl.arange(0, K_PADDED)
        source = position + 1 + lanes % tl.maximum(length - position, 1)
        draft = _text(table, IDS, source, found & (source < length), BLOCK_SIZE)
        draft = tl.where(found & (source < length), draft, tl.where(found | FILL, last, -1))
        tl.store(DRAFTS + slot * K + lanes, draft, mask=lanes < K)
        tl.atomic_add(TOKENS + end, tl.where(found | FILL, K, 0), sem="relaxed")


def look_up_drafts(
    state: DeviceState, out: StepBuffers, num_decodes: int, places: int, first_chunk_row: int, num_rows: int,
    lengths: tuple[int, int], fill: bool = False,
) -> None:  # fmt: skip
    """Drafts state.drafts [slot] for the rows of a step that gained tokens: decodes, each at the first of its places,
    and from first_chunk_row on the others of all `num_rows`.

    They are what followed the newest of the longest earlier matches of the row's last tokens, of lengths[0] to
    lengths[1] of them; where the text ends it goes on as after the match. -1 where nothing matches, or with `fill` the
    last token. To the word of out.tokens behind those rows the number of drafted tokens is added."""
    assert state.drafts is not None and state.ids is not None
    num_drafts, block_size = state.drafts.shape[1], state.ids.shape[1]
    _look_up_kernel[(num_rows,)](
        out.row_slot, state.last_token, state.num_computed, state.block_table, state.ids, state.drafts, out.tokens,
        state.block_table.stride(0), num_decodes, places, first_chunk_row, lengths[0],
        first_chunk_row + num_rows - num_decodes, K=num_drafts, K_PADDED=triton.next_power_of_2(num_drafts),
        MOST=lengths[1], FILL=fill, BLOCK_SIZE=block_size, BLOCK=1024, num_warps=8,
    )  # fmt: skip


def take_draws_reference(
    state: DeviceState, out: StepBuffers, num_decodes: int, places: int, end: int, rates: torch.Tensor | None = None
) -> None:
    """Plain twin of `take_draws`."""
    shape = num_decodes, places
    rows = slice(num_decodes * places)
    slots, draws, given = (part[rows].view(shape) for part in (out.row_slot, out.tokens, out.input_ids))
    is_live, first = slots >= 0, slots[:, 0].clamp(min=0).long()
    positions = out.positions[: num_decodes * places : places]
    holds = is_live.clone()
    if rates is None:
        holds[:, 1:] &= given[:, 1:] == draws[:, :-1]
    else:
        k0, k1 = row_key_reference(state.seed[first], positions)
        words = random_words_reference(k0, k1, torch.zeros_like(first)) & WORD
        holds[:, 1:] &= (words.float() / 2**32)[:, None] < rates[: places - 1]
    holds = holds.long().cumprod(1).bool()
    gained = holds.sum(1)
    drawn = gained > 0
    slot, index = first[drawn], (gained[drawn] - 1)[:, None]
    state.last_token[slot] = draws[drawn].gather(1, index).squeeze(1)
    state.num_computed[slot] = (positions[drawn] + gained[drawn]).int()
    if state.places_of_lines is not None and state.spare_places is not None:
        for decode in drawn.nonzero().squeeze(1).tolist():
            begin, count = decode * places, int(gained[decode])
            line, keep, at = out.lines[4:, begin].tolist()
            states = [state.places_of_lines[line].clone(), *state.spare_places[begin : begin + count].clone()]
            after_rows = at - int(positions[decode])
            state.places_of_lines[line] = states[-1]
            left = states[:-1]
            if keep >= 0 and 0 <= after_rows < count:
                left[after_rows] = state.places_of_lines[keep].clone()
                state.places_of_lines[keep] = states[after_rows]
            state.spare_places[begin : begin + count] = torch.stack([*left[1:], left[0]])
    out.tokens[rows] = torch.where(holds, draws, torch.where(is_live, -1, -2)).flatten()
    out.tokens[end] = 0


def look_up_drafts_reference(
    state: DeviceState, out: StepBuffers, num_decodes: int, places: int, first_chunk_row: int, num_rows: int,
    lengths: tuple[int, int], fill: bool = False,
) -> None:  # fmt: skip
    """Plain twin of `look_up_drafts`."""
    assert state.drafts is not None and state.ids is not None
    num_chunks = num_rows - num_decodes
    end = first_chunk_row + num_chunks
    slots = torch.cat([out.row_slot[: num_decodes * places : places], out.row_slot[first_chunk_row:end]])
    for slot in slots[slots >= 0].tolist():
        length, drafts = int(state.num_computed[slot]), state.drafts[slot]
        blocks = state.block_table[slot, 0, : -(-length // state.ids.shape[1])].long()
        text = torch.cat([state.ids[blocks].flatten()[:length], state.last_token[slot : slot + 1]])
        found = text[-1:] if fill else torch.full((1,), -1, dtype=torch.int32, device=text.device)
        for size in range(min(lengths[1], length), lengths[0] - 1, -1):
            matches = (text.unfold(0, size, 1)[:-1] == text[-size:]).all(1).nonzero()
            if matches.numel():
                found = text[int(matches[-1]) + size :]
                break
        drafts.copy_(found.repeat(-(-drafts.shape[0] // found.shape[0]))[: drafts.shape[0]])
        out.tokens[end] += int((drafts >= 0).sum())
