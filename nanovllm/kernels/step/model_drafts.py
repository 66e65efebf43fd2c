"""Rows for which a model drafts: what it is given for each token of a step, and then one drafted token after another.

The entry of a drafting layer at position p is made of the target's hidden states there and of the token at p + 1, and
says what may follow that. So a step's tokens give as many entries, at their own positions, once it is known what was
drawn. Entries behind the last one are of drafted tokens; the next step writes others over them.
"""

import torch

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.sampling.gumbel import keys_to_tokens
from nanovllm.kernels.step.input import HEADER, PLACES, words_behind_updates
from nanovllm.kernels.step.state import DeviceState, DraftRows, StepBuffers
from nanovllm.wire.step import HEADER_SIZE, LINES_WORD, PLACES_WORD, RECORD_SIZE, UPDATE_SIZE

_LINES = tl.constexpr(LINES_WORD)


@triton.jit
def _note_row(row, slot, drafts, index, position, latest, SLOT, ROW_SLOT, INDEX, POSITION, SAMPLED, LATEST,
              max_model_len, BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """Notes which entry the row drafts from, if it does. latest: a position in the last block that the row has."""
    tl.store(SLOT + row, slot)
    tl.store(ROW_SLOT + row, tl.where(drafts > 0, slot, -1))
    tl.store(INDEX + row, index)
    tl.store(POSITION + row, position)
    tl.store(SAMPLED + row, position + 2)
    tl.store(LATEST + row, tl.minimum((latest // BLOCK_SIZE + 1) * BLOCK_SIZE, max_model_len) - 1)


@triton.jit(do_not_specialize=["decode_rows", "max_model_len"])
def _follow_rows_kernel(
    BUFFER, ROW_SLOT, CU_SEQLENS, POSITIONS, INPUT_IDS, TOKENS, NUM_COMPUTED, NEXT_IDS, OUT_SLOT, OUT_ROW_SLOT, INDEX,
    OUT_POSITION, SAMPLED, LATEST, decode_rows, max_model_len, S: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """follow_rows of the step BUFFER int32 [words] and its StepBuffers, into NEXT_IDS int32 [tokens] and the columns of
    DraftRows. A program has one output row."""
    out_row = tl.program_id(0)
    num_rows, num_decodes, num_sample = tl.load(BUFFER + 0), tl.load(BUFFER + 1), tl.load(BUFFER + 2)
    places = tl.maximum(tl.load(BUFFER + PLACES), 1)
    slot = tl.load(ROW_SLOT + out_row)
    given = words_behind_updates(BUFFER, S)
    follows = given + tl.load(BUFFER + 3) - num_decodes * places + 4 * tl.load(BUFFER + _LINES)
    if out_row < decode_rows:
        decode = out_row // places
        is_there = decode < num_decodes
        token = tl.load(TOKENS + out_row, mask=is_there, other=0)
        tl.store(NEXT_IDS + out_row, tl.maximum(token, 0))
        if is_there & (out_row % places == 0):
            position = tl.load(POSITIONS + out_row)
            more = tl.maximum(tl.load(NUM_COMPUTED + slot, mask=slot >= 0, other=0) - position - 1, 0)
            latest = tl.load(BUFFER + HEADER + S + decode)
            _note_row(decode, slot, tl.load(follows + decode), out_row + more, position + more, latest, OUT_SLOT,
                      OUT_ROW_SLOT, INDEX, OUT_POSITION, SAMPLED, LATEST, max_model_len, BLOCK_SIZE)  # fmt: skip
    else:
        row = out_row - decode_rows + num_decodes
        begin, end = tl.load(CU_SEQLENS + out_row), tl.load(CU_SEQLENS + out_row + 1)
        if (row < num_rows) & (end > begin):
            word = tl.load(follows + row)
            last = tl.where(row < num_sample, tl.load(TOKENS + out_row), word)
            first = begin
            while first < end:
                token = first + tl.arange(0, BLOCK)
                after = tl.load(INPUT_IDS + token + 1, mask=token + 1 < end, other=0)
                tl.store(NEXT_IDS + token, tl.where(token + 1 < end, after, tl.maximum(last, 0)), mask=token < end)
                first += BLOCK
            if row < num_sample:
                position = tl.load(POSITIONS + end - 1)
                _note_row(row, slot, word, end - 1, position, position, OUT_SLOT, OUT_ROW_SLOT, INDEX, OUT_POSITION,
                          SAMPLED, LATEST, max_model_len, BLOCK_SIZE)  # fmt: skip


def follow_rows(
    buffer: torch.Tensor, max_num_seqs: int, state: DeviceState, out: StepBuffers, rows: DraftRows, decode_rows: int,
    block_size: int, max_model_len: int,
) -> None:  # fmt: skip
    """The token after each token of a packed step, int32 [words], into out.next_ids, where take_draws has taken in what
    the step drew; any id after one that does not hold. `rows` become the step's rows that gained a token, each with its
    last entry, those that may have no drafts as rows that have ended; its others have slot -1. decode_rows: see
    expand_rows."""
    rows.slot.fill_(-1)
    rows.row_slot.fill_(-1)
    rows.index.zero_()
    rows.num_drafted.zero_()
    _follow_rows_kernel[(out.row_slot.shape[0],)](
        buffer, out.row_slot, out.cu_seqlens_q, out.positions, out.input_ids, out.tokens, state.num_computed,
        out.next_ids, rows.slot, rows.row_slot, rows.index, rows.positions, rows.sample_positions, rows.latest,
        decode_rows, max_model_len, S=max_num_seqs, BLOCK_SIZE=block_size, BLOCK=1024, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["place", "num_rows"])
def _place_drafts_kernel(KEYS, SLOT, ROW_SLOT, POSITION, SAMPLED, LATEST, CONTEXT, IDS, SLOT_MAPPING, NUM_DRAFTED,
                         DRAFTS, TABLE, num_drafts, table_stride, place, num_rows, BLOCK_SIZE: tl.constexpr,
                         BLOCK: tl.constexpr):  # fmt: skip
    """place_drafts for BLOCK rows. TABLE int32 [S, table_stride]: blocks of the drafting layer."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < num_rows
    slot = tl.load(SLOT + row, mask=there, other=-1)
    live = tl.load(ROW_SLOT + row, mask=there, other=-1) >= 0
    token = (~tl.load(KEYS + row, mask=live, other=0)).to(tl.int32)
    tl.store(DRAFTS + slot * num_drafts + place, tl.where(live, token, -1), mask=slot >= 0)
    tl.atomic_add(NUM_DRAFTED, tl.sum(live.to(tl.int32), 0), sem="relaxed")
    position = tl.load(POSITION + row, mask=there, other=0) + 1
    latest = tl.load(LATEST + row, mask=there, other=0)
    live = live & (position <= latest)
    block = tl.load(TABLE + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE, mask=live, other=0)
    tl.store(ROW_SLOT + row, tl.where(live, slot, -1), mask=there)
    tl.store(POSITION + row, tl.where(live, position, 0), mask=there)
    tl.store(SAMPLED + row, position + 2, mask=there)
    tl.store(CONTEXT + row, tl.where(live, position + 1, 0), mask=there)
    tl.store(IDS + row, tl.where(live, token, 0), mask=there)
    tl.store(SLOT_MAPPING + row, tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=there)


def place_drafts(
    keys: torch.Tensor, rows: DraftRows, state: DeviceState, place: int, table: int, block_size: int
) -> None:
    """Takes what the rows have drawn, keys int64 [B], as their draft number `place`, and moves them on to its entry.
    A row ends where its next entry has no block: then -1 is what it drafts. table: block table of the layer."""
    assert state.drafts is not None
    tables = state.block_table[:, table]
    num_rows = keys.shape[0]
    _place_drafts_kernel[(max(1, triton.cdiv(num_rows, 128)),)](
        keys, rows.slot, rows.row_slot, rows.positions, rows.sample_positions, rows.latest, rows.context_lens,
        rows.input_ids, rows.slot_mapping, rows.num_drafted, state.drafts, tables, state.drafts.shape[1],
        tables.stride(0), place, num_rows, BLOCK_SIZE=block_size, BLOCK=128, num_warps=4,
    )  # fmt: skip


def follow_rows_reference(
    buffer: torch.Tensor, max_num_seqs: int, state: DeviceState, out: StepBuffers, rows: DraftRows, decode_rows: int,
    block_size: int, max_model_len: int,
) -> None:  # fmt: skip
    """Plain twin of `follow_rows`."""
    num_rows, num_decodes, num_sample, num_tokens, num_updates, num_records = buffer[:6].tolist()
    places = max(1, int(buffer[PLACES_WORD]))
    rows.slot.fill_(-1)
    rows.row_slot.fill_(-1)
    rows.index.zero_()
    rows.num_drafted.zero_()
    out.next_ids[:decode_rows] = 0
    decoding = slice(num_decodes * places)
    out.next_ids[decoding] = out.tokens[decoding].clamp(min=0)
    own = torch.arange(num_decodes, device=buffer.device) * places
    slots, positions = out.row_slot[own], out.positions[own]
    more = (state.num_computed[slots.clamp(min=0).long()] - positions - 1).clamp(min=0) * (slots >= 0)
    latest = buffer[HEADER_SIZE + max_num_seqs :][:num_decodes]
    given = HEADER_SIZE + 3 * max_num_seqs + UPDATE_SIZE * num_updates + RECORD_SIZE * num_records
    follows = buffer[given + num_tokens - num_decodes * places + 4 * int(buffer[LINES_WORD]) :][:num_rows]
    chunks = torch.arange(num_decodes, num_rows, device=buffer.device)
    shift = decode_rows - num_decodes
    ends = out.cu_seqlens_q[chunks + shift + 1].long()
    is_sampled = chunks < num_sample
    out.next_ids[decode_rows : out.input_ids.shape[0] - 1] = out.input_ids[decode_rows + 1 :]
    out.next_ids[ends[is_sampled] - 1] = out.tokens[chunks[is_sampled] + shift].clamp(min=0)
    out.next_ids[ends[~is_sampled] - 1] = follows[num_sample:]
    ends, chunks = ends[is_sampled] - 1, chunks[is_sampled] + shift
    rows.slot[:num_sample] = torch.cat([slots, out.row_slot[chunks]])
    rows.row_slot[:num_sample] = torch.where(follows[:num_sample] > 0, rows.slot[:num_sample], -1)
    rows.index[:num_sample] = torch.cat([own + more, ends]).int()
    rows.positions[:num_sample] = torch.cat([positions + more, out.positions[ends]])
    rows.sample_positions[:num_sample] = rows.positions[:num_sample] + 2
    latest = torch.cat([latest, out.positions[ends]])
    rows.latest[:num_sample] = ((latest // block_size + 1) * block_size).clamp(max=max_model_len) - 1


def place_drafts_reference(
    keys: torch.Tensor, rows: DraftRows, state: DeviceState, place: int, table: int, block_size: int
) -> None:
    """Plain twin of `place_drafts`."""
    assert state.drafts is not None
    own = slice(keys.shape[0])
    slots, live = rows.slot[own], rows.row_slot[own] >= 0
    tokens, there = keys_to_tokens(keys), slots >= 0
    state.drafts[slots[there].long(), place] = torch.where(live, tokens, -1)[there]
    rows.num_drafted += live.sum()
    position = rows.positions[own] + 1
    live = live & (position <= rows.latest[own])
    index = torch.where(live, position // block_size, 0).long()
    block = state.block_table[slots.clamp(min=0).long(), table, index]
    rows.row_slot[own] = torch.where(live, slots, -1)
    rows.positions[own] = torch.where(live, position, 0)
    rows.sample_positions[own] = position + 2
    rows.context_lens[own] = torch.where(live, position + 1, 0)
    rows.input_ids[own] = torch.where(live, tokens, 0)
    rows.slot_mapping[own] = torch.where(live, block * block_size + position % block_size, -1)
