"""A packed step, as the host sends it, turned into the tensors that the model reads; and the state that stays here.

wire/step.py has a drawing of the packed step. The kernels read its counts on the device, so that a captured graph
serves any step of its shape; the shapes of the outputs say how far to fill, padding included.
"""

import torch

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.step.lines import copy_lines, place_lines_reference
from nanovllm.kernels.step.state import DeviceState, StepBuffers
from nanovllm.wire.step import HEADER_SIZE, LINES_WORD, PLACES_WORD, RECORD_SIZE, UPDATE_SIZE

# The same as constants of kernels.
HEADER = tl.constexpr(HEADER_SIZE)
_UPDATE = tl.constexpr(UPDATE_SIZE)
_RECORD = tl.constexpr(RECORD_SIZE)
PLACES = tl.constexpr(PLACES_WORD)


@triton.jit
def words_behind_updates(BUFFER, S: tl.constexpr):
    """Pointer to the token ids of a packed step, and what follows them: behind its block updates and slot records."""
    return BUFFER + (HEADER + 3 * S) + tl.load(BUFFER + 4) * _UPDATE + tl.load(BUFFER + 5) * _RECORD


@triton.jit
def _apply_deltas(
    BUFFER, BLOCK_TABLE, LAST_TOKEN, NUM_COMPUTED, TEMPERATURE, SEED, ADAPTERS, table_stride, first, step,
    S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Applies entries first .. first + BLOCK - 1 of both lists, then those `step` further, and so on."""
    num_updates = tl.load(BUFFER + 4)
    num_records = tl.load(BUFFER + 5)
    updates = BUFFER + (HEADER + 3 * S)
    begin = first
    while begin < num_updates:
        entry = begin + tl.arange(0, BLOCK)
        live = entry < num_updates
        slot = tl.load(updates + entry * _UPDATE, mask=live, other=0).to(tl.int64)
        index = tl.load(updates + entry * _UPDATE + 1, mask=live, other=0)
        block = tl.load(updates + entry * _UPDATE + 2, mask=live, other=0)
        tl.store(BLOCK_TABLE + slot * table_stride + index, block, mask=live)
        begin += step
    records = updates + num_updates * _UPDATE
    begin = first
    while begin < num_records:
        entry = begin + tl.arange(0, BLOCK)
        live = entry < num_records
        slot = tl.load(records + entry * _RECORD, mask=live, other=0)
        temperature = tl.load(records + entry * _RECORD + 1, mask=live, other=0).to(tl.float32, bitcast=True)
        low = tl.load(records + entry * _RECORD + 2, mask=live, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
        high = tl.load(records + entry * _RECORD + 3, mask=live, other=0).to(tl.int64)
        token = tl.load(records + entry * _RECORD + 4, mask=live, other=0)
        computed = tl.load(records + entry * _RECORD + 5, mask=live, other=0)
        tl.store(LAST_TOKEN + slot, token, mask=live)
        tl.store(NUM_COMPUTED + slot, computed, mask=live)
        tl.store(TEMPERATURE + slot, temperature, mask=live)
        tl.store(SEED + slot, (high << 32) | low, mask=live)
        if ADAPTERS is not None:
            tl.store(ADAPTERS + slot, tl.load(records + entry * _RECORD + 6, mask=live, other=0), mask=live)
        begin += step


@triton.jit
def _apply_deltas_kernel(
    BUFFER, BLOCK_TABLE, LAST_TOKEN, NUM_COMPUTED, TEMPERATURE, SEED, ADAPTERS, table_stride, S: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the updates of the packed step BUFFER int32 [words] (wire/step.py) into BLOCK_TABLE int32 [S,
    table_stride] (all tables of a slot), LAST_TOKEN and NUM_COMPUTED int32 [S], TEMPERATURE float32 [S], SEED int64
    [S] and, where there are any, ADAPTERS int32 [S]. Programs share the entries by BLOCK."""
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    _apply_deltas(BUFFER, BLOCK_TABLE, LAST_TOKEN, NUM_COMPUTED, TEMPERATURE, SEED, ADAPTERS, table_stride, first, step,
                  S, BLOCK)  # fmt: skip


@triton.jit
def _map_other_tables(
    SLOT_MAPPING, TABLES, token, position, live, inside, table_width, mapping_stride, NUM_TABLES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes the cache slots of these tokens by all of their slot's TABLES but the first; -1 where not live."""
    for number in tl.static_range(1, NUM_TABLES):
        block = tl.load(TABLES + number * table_width + position // BLOCK_SIZE, mask=live & inside, other=0)
        place = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(SLOT_MAPPING + number * mapping_stride + token, place, mask=inside)


@triton.jit
def _place_of(BUFFER, row, DRAFTS):
    """Number of a row among its decode's places, that of the decode, and that of places."""
    places = 1
    if DRAFTS is not None:
        places = tl.maximum(tl.load(BUFFER + PLACES), 1)
    return row % places, row // places, places


@triton.jit
def _decode_place(NUM_COMPUTED, LAST_TOKEN, DRAFTS, num_drafts, slot, place, latest, live):
    """Position and token id of a decode's place, and whether it computes anything: where there is a token, and not
    behind `latest`, up to which the row has blocks."""
    position = tl.load(NUM_COMPUTED + slot, mask=live, other=0) + place
    token = tl.load(LAST_TOKEN + slot, mask=live, other=-1)
    if DRAFTS is not None:
        draft = tl.load(DRAFTS + slot * num_drafts + place - 1, mask=live & (place > 0), other=-1)
        token = tl.where(place == 0, token, draft)
    live = live & (position <= latest) & (token >= 0)
    return tl.where(live, position, 0), tl.where(live, token, 0), live


@triton.jit
def _chunk_tokens_before(BUFFER, row, num_decode, num_rows, S: tl.constexpr, S_PADDED: tl.constexpr):
    """Tokens of the chunks before a row. Reading S numbers in every program is cheaper than a scan kernel first."""
    rows = tl.arange(0, S_PADDED)
    before = (rows >= num_decode) & (rows < row) & (rows < num_rows)
    return tl.sum(tl.load(BUFFER + (HEADER + 2 * S) + rows, mask=before, other=0), 0)


@triton.jit(do_not_specialize=["out_rows", "out_tokens", "decode_rows", "padding_line"])
def _expand_rows_kernel(
    BUFFER, BLOCK_TABLE, LAST_TOKEN, NUM_COMPUTED, ROW_SLOT, CONTEXT_LENS, CU_SEQLENS, POSITIONS, INPUT_IDS,
    SLOT_MAPPING, LOGITS_INDICES, LINES, OF_LINES, SPARE, DRAFTS, IDS, num_drafts, table_stride, table_width,
    mapping_stride, lines_stride, padding_line, out_rows, out_tokens, decode_rows, S: tl.constexpr,
    S_PADDED: tl.constexpr, NUM_TABLES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows of the packed step BUFFER int32 [words]: ROW_SLOT, CONTEXT_LENS, LOGITS_INDICES int32 [out_rows],
    CU_SEQLENS int32 [out_rows + 1], POSITIONS, INPUT_IDS int32 [out_tokens], SLOT_MAPPING int32 [NUM_TABLES, out_tokens
    of mapping_stride], by BLOCK_TABLE int32 [S, NUM_TABLES, table_width], LAST_TOKEN int32 [S] and, where there are
    any, DRAFTS int32 [S, num_drafts]; NUM_COMPUTED int32 [S] goes on, for chunks alone where there are drafts. IDS: see
    DeviceState. Output row `program_id(0)`, whose tokens the programs along axis 1 share; the one after the last is the
    tokens' padding. The first `decode_rows` output rows are places of decodes or padding; chunks follow."""
    out_row = tl.program_id(0)
    share = tl.program_id(1)
    num_rows, num_decode, num_sample = tl.load(BUFFER + 0), tl.load(BUFFER + 1), tl.load(BUFFER + 2)
    given = words_behind_updates(BUFFER, S)
    decodes = out_row < decode_rows
    place, of_decode, places = _place_of(BUFFER, out_row, DRAFTS)
    row = tl.where(decodes, of_decode, out_row - decode_rows + num_decode)
    chunks_before = _chunk_tokens_before(BUFFER, row, num_decode, num_rows, S, S_PADDED)
    begin = tl.where(decodes, out_row, decode_rows + chunks_before)
    live = row < tl.where(decodes, num_decode, num_rows)
    slot = tl.load(BUFFER + HEADER + row, mask=live, other=-1)
    start = tl.load(BUFFER + (HEADER + S) + row, mask=live, other=0)
    count = tl.load(BUFFER + (HEADER + 2 * S) + row, mask=live, other=0)
    own_start, own_id, is_live = _decode_place(NUM_COMPUTED, LAST_TOKEN, DRAFTS, num_drafts, slot, place, start,
                                               live & decodes)  # fmt: skip
    if decodes:
        live, start, slot, count = is_live, own_start, tl.where(is_live, slot, -1), tl.where(is_live, count, 0)
    if share == 0:  # which alone has a decode's token
        tl.store(NUM_COMPUTED + slot, start + count, mask=live & ((DRAFTS is None) | (out_row >= decode_rows)))
        tl.store(CU_SEQLENS + out_row, begin)
        if out_row < out_rows:
            tl.store(ROW_SLOT + out_row, slot)
            tl.store(CONTEXT_LENS + out_row, start + count)
            tl.store(LOGITS_INDICES + out_row, tl.where(live & (row < num_sample), begin + count - 1, 0))
            if padding_line is not None:
                lines = given + tl.load(BUFFER + 3) - num_decode * places
                copy_lines(LINES, OF_LINES, SPARE, lines, row, num_rows, out_row, place, decodes, True, live,
                           lines_stride, padding_line)  # fmt: skip
    end = tl.where(out_row < out_rows, begin + tl.where(decodes, 1, count), out_tokens)
    first = begin + share * BLOCK
    while first < end:
        token = first + tl.arange(0, BLOCK)
        inside = token < end
        read = inside & live
        position = tl.where(live, start + token - begin, 0)
        table = BLOCK_TABLE + slot.to(tl.int64) * table_stride
        block = tl.load(table + position // BLOCK_SIZE, mask=read, other=0)
        cache_slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        token_id = tl.load(given + token - decode_rows, mask=read & (out_row >= decode_rows), other=0)
        token_id = tl.where(decodes, own_id, token_id)
        tl.store(POSITIONS + token, position, mask=inside)
        tl.store(SLOT_MAPPING + token, cache_slot, mask=inside)
        tl.store(INPUT_IDS + token, token_id, mask=inside)
        if IDS is not None:
            tl.store(IDS + cache_slot, token_id, mask=read)
        _map_other_tables(SLOT_MAPPING, table, token, position, live, inside, table_width, mapping_stride, NUM_TABLES,
                          BLOCK_SIZE)  # fmt: skip
        first += tl.num_programs(1) * BLOCK


@triton.jit(do_not_specialize=["out_rows", "padding_line"])
def _prepare_decode_kernel(
    BUFFER, BLOCK_TABLE, LAST_TOKEN, NUM_COMPUTED, TEMPERATURE, SEED, ADAPTERS, ROW_SLOT, CONTEXT_LENS, CU_SEQLENS,
    POSITIONS, INPUT_IDS, SLOT_MAPPING, LOGITS_INDICES, LINES, OF_LINES, SPARE, DRAFTS, IDS, num_drafts, table_stride,
    table_width, mapping_stride, lines_stride, padding_line, out_rows, S: tl.constexpr, NUM_TABLES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """_apply_deltas_kernel and _expand_rows_kernel for a step of decodes BUFFER int32 [words], whose tokens are its
    rows. One program, so that a barrier is enough between the updates and their readers."""
    num_rows = tl.load(BUFFER + 0)
    _apply_deltas(BUFFER, BLOCK_TABLE, LAST_TOKEN, NUM_COMPUTED, TEMPERATURE, SEED, ADAPTERS, table_stride, 0, BLOCK, S,
                  BLOCK)  # fmt: skip
    tl.debug_barrier()
    row = tl.arange(0, BLOCK)
    inside = row < out_rows
    place, of_decode, _ = _place_of(BUFFER, row, DRAFTS)
    live = of_decode < num_rows
    slot = tl.load(BUFFER + HEADER + of_decode, mask=live, other=-1)
    latest = tl.load(BUFFER + (HEADER + S) + of_decode, mask=live, other=0)
    start, token_id, live = _decode_place(NUM_COMPUTED, LAST_TOKEN, DRAFTS, num_drafts, slot, place, latest, live)
    slot = tl.where(live, slot, -1)
    if DRAFTS is None:
        tl.store(NUM_COMPUTED + slot, start + 1, mask=live)
    table = BLOCK_TABLE + slot.to(tl.int64) * table_stride
    block = tl.load(table + start // BLOCK_SIZE, mask=live, other=0)
    cache_slot = tl.where(live, block * BLOCK_SIZE + start % BLOCK_SIZE, -1)
    tl.store(ROW_SLOT + row, slot, mask=inside)
    tl.store(CONTEXT_LENS + row, tl.where(live, start + 1, 0), mask=inside)
    tl.store(POSITIONS + row, start, mask=inside)
    tl.store(INPUT_IDS + row, token_id, mask=inside)
    tl.store(SLOT_MAPPING + row, cache_slot, mask=inside)
    if IDS is not None:
        tl.store(IDS + cache_slot, token_id, mask=live)
    tl.store(LOGITS_INDICES + row, row, mask=inside)
    tl.store(CU_SEQLENS + row, row, mask=inside)
    tl.store(CU_SEQLENS + out_rows, out_rows)
    _map_other_tables(SLOT_MAPPING, table, row, start, live, inside, table_width, mapping_stride, NUM_TABLES,
                      BLOCK_SIZE)  # fmt: skip
    if padding_line is not None:
        lines = words_behind_updates(BUFFER, S)
        copy_lines(LINES, OF_LINES, SPARE, lines, of_decode, num_rows, row, place, True, inside, live, lines_stride,
                   padding_line)  # fmt: skip


def apply_deltas(buffer: torch.Tensor, max_num_seqs: int, state: DeviceState) -> None:
    """Writes the block updates and slot records of a packed step (int32 [words]) into the state."""
    _apply_deltas_kernel[(16,)](
        buffer, state.block_table, state.last_token, state.num_computed, state.temperature, state.seed, state.adapters,
        state.block_table.stride(0), S=max_num_seqs, BLOCK=128, num_warps=4,
    )  # fmt: skip


def _table_strides(state: DeviceState, out: StepBuffers) -> tuple[int, int | None, int | None]:
    """table_stride, table_width and mapping_stride of the kernels, which need the first alone where there is one
    table."""
    table = state.block_table
    if table.shape[1] == 1:
        return table.stride(0), None, None
    return table.stride(0), table.stride(1), out.slot_mapping.stride(0)


def _drafts(state: DeviceState) -> tuple[torch.Tensor | None, torch.Tensor | None, int | None]:
    """DRAFTS, IDS and num_drafts of the kernels."""
    return state.drafts, state.ids, None if state.drafts is None else state.drafts.shape[1]


def expand_rows(
    buffer: torch.Tensor, max_num_seqs: int, state: DeviceState, block_size: int, out: StepBuffers, decode_rows: int
) -> None:
    """Fills `out` for a packed step, int32 [words], whose deltas are applied: all of its rows and tokens, padding past
    the step's own.

    The first `decode_rows` rows of `out` (at least as many as the places of all decodes) have one token each, be they
    padding or not; the chunks' rows follow, then padding rows without tokens. Padding rows have slot -1 and context 0;
    padding tokens have id 0, position 0 and cache slot -1. So do places of a decode that compute nothing.
    """
    out_rows, out_tokens = out.row_slot.shape[0], out.positions.shape[0]
    _expand_rows_kernel[(out_rows + 1, 8)](
        buffer, state.block_table, state.last_token, state.num_computed, out.row_slot, out.context_lens,
        out.cu_seqlens_q, out.positions, out.input_ids, out.slot_mapping, out.logits_indices, out.lines,
        state.places_of_lines, state.spare_places, *_drafts(state), *_table_strides(state, out), out.lines.stride(0),
        state.num_lines or None, out_rows, out_tokens, decode_rows, S=max_num_seqs,
        S_PADDED=triton.next_power_of_2(max_num_seqs), NUM_TABLES=state.block_table.shape[1],
        BLOCK_SIZE=block_size, BLOCK=256, num_warps=4,
    )  # fmt: skip


def prepare_decode(
    buffer: torch.Tensor, max_num_seqs: int, state: DeviceState, block_size: int, out: StepBuffers
) -> None:
    """apply_deltas, then expand_rows for a packed step, int32 [words], of decode rows alone, in an `out` of as many
    tokens as rows. Here padding rows have a token too: row r is token r throughout. One launch."""
    _prepare_decode_kernel[(1,)](
        buffer, state.block_table, state.last_token, state.num_computed, state.temperature, state.seed, state.adapters,
        out.row_slot, out.context_lens, out.cu_seqlens_q, out.positions, out.input_ids, out.slot_mapping,
        out.logits_indices, out.lines, state.places_of_lines, state.spare_places, *_drafts(state),
        *_table_strides(state, out), out.lines.stride(0), state.num_lines or None, out.row_slot.shape[0],
        S=max_num_seqs, NUM_TABLES=state.block_table.shape[1],
        BLOCK_SIZE=block_size, BLOCK=max(128, triton.next_power_of_2(max(max_num_seqs, out.row_slot.shape[0]))),
        num_warps=4 if max_num_seqs <= 256 else 8,
    )  # fmt: skip


def apply_deltas_reference(buffer: torch.Tensor, max_num_seqs: int, state: DeviceState) -> None:
    """Plain twin of `apply_deltas`."""
    num_updates, num_records = buffer[4:6].tolist()
    begin = HEADER_SIZE + 3 * max_num_seqs
    middle = begin + UPDATE_SIZE * num_updates
    slot, index, block = buffer[begin:middle].view(-1, UPDATE_SIZE).long().unbind(1)
    state.block_table.flatten(1)[slot, index] = block.int()
    records = buffer[middle : middle + RECORD_SIZE * num_records].view(-1, RECORD_SIZE)
    slot = records[:, 0].long()
    state.last_token[slot] = records[:, 4]
    state.num_computed[slot] = records[:, 5]
    state.temperature[slot] = records[:, 1].contiguous().view(torch.float32)
    low, high = records[:, 2].long() & 0xFFFFFFFF, records[:, 3].long()
    state.seed[slot] = (high << 32) | low
    if state.adapters is not None:
        state.adapters[slot] = records[:, 6]


def expand_rows_reference(
    buffer: torch.Tensor, max_num_seqs: int, state: DeviceState, block_size: int, out: StepBuffers, decode_rows: int
) -> None:
    """Plain twin of `expand_rows`."""
    num_rows, num_decode, num_sample, num_tokens, num_updates, num_records = buffer[:6].tolist()
    arrays = buffer[HEADER_SIZE : HEADER_SIZE + 3 * max_num_seqs].view(3, max_num_seqs)[:, :num_rows]
    places = max(1, int(buffer[PLACES_WORD])) if state.drafts is not None else 1
    times = torch.where(torch.arange(num_rows, device=buffer.device) < num_decode, places, 1)
    slot, start, count = arrays.long().repeat_interleave(times, 1).unbind(0)
    more = (places - 1) * num_decode
    num_rows, num_decode, num_sample = num_rows + more, num_decode + more, num_sample + more
    ids, begin, is_live = _decode_places_reference(state, slot[:num_decode], start[:num_decode], places)
    start = torch.cat([begin, start[num_decode:]])
    goes_on = torch.ones_like(slot, dtype=torch.bool)
    goes_on[:num_decode] = is_live & (state.drafts is None)
    state.num_computed[slot[goes_on]] = (start + count)[goes_on].int()
    shift = decode_rows - num_decode
    ends = count.cumsum(0)
    ends[num_decode:] += shift
    where = torch.arange(num_rows, device=buffer.device)
    where[num_decode:] += shift
    out.row_slot.fill_(-1)[where] = slot.int()
    out.context_lens.zero_()[where] = (start + count).int()
    out.cu_seqlens_q.fill_(num_tokens + shift)[: decode_rows + 1] = torch.arange(decode_rows + 1, device=buffer.device)
    out.cu_seqlens_q[where + 1] = ends.int()
    out.logits_indices.zero_()[where[:num_sample]] = (ends[:num_sample] - 1).int()

    row = torch.repeat_interleave(torch.arange(num_rows, device=buffer.device), count)
    ordinal = torch.arange(num_tokens, device=buffer.device)
    token = ordinal + shift * (ordinal >= num_decode)
    position = token - (ends - count)[row] + start[row]
    block = state.block_table[slot[row], :, position // block_size].long()
    out.positions.zero_()[token] = position.int()
    out.slot_mapping.fill_(-1)[:, token] = (block.T * block_size + position % block_size).int()
    given = HEADER_SIZE + 3 * max_num_seqs + UPDATE_SIZE * num_updates + RECORD_SIZE * num_records
    out.input_ids.zero_()[:num_decode] = ids
    out.input_ids[token[num_decode:]] = buffer[given : given + num_tokens - num_decode]
    dead = (~is_live).nonzero().squeeze(1)
    out.row_slot[dead], out.slot_mapping[:, dead] = -1, -1
    out.context_lens[dead], out.logits_indices[dead] = 0, 0
    if state.ids is not None:
        is_stored = out.slot_mapping[0] >= 0
        state.ids.view(-1)[out.slot_mapping[0][is_stored].long()] = out.input_ids[is_stored]
    if state.num_lines:
        words = buffer[given + num_tokens - num_decode :][: 4 * buffer[LINES_WORD]].view(4, -1)
        lines = (words - torch.tensor([[1], [1], [1], [0]], device=buffer.device)).repeat_interleave(times, 1)
        live = torch.ones(num_rows, dtype=torch.bool, device=buffer.device)
        live[:num_decode] = is_live
        place_lines_reference(state, out, lines[:, live].int(), where[live], num_decode, places)


def _decode_places_reference(
    state: DeviceState, slots: torch.Tensor, latest: torch.Tensor, places: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids and positions of the places of decodes, and which of these compute something; zeros for others."""
    place = torch.arange(slots.shape[0], device=slots.device) % places
    ids, positions = state.last_token[slots], state.num_computed[slots] + place
    if state.drafts is not None:
        ids = torch.where(place == 0, ids, state.drafts[slots, (place - 1).clamp(min=0)])
    is_live = (ids >= 0) & (positions <= latest)
    return ids * is_live, positions * is_live, is_live


def prepare_decode_reference(
    buffer: torch.Tensor, max_num_seqs: int, state: DeviceState, block_size: int, out: StepBuffers
) -> None:
    """Plain twin of `prepare_decode`."""
    apply_deltas_reference(buffer, max_num_seqs, state)
    rows = out.row_slot.shape[0]
    expand_rows_reference(buffer, max_num_seqs, state, block_size, out, rows)
    out.logits_indices.copy_(torch.arange(rows, device=buffer.device))
