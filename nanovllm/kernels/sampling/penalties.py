"""Logits as a row's own rules change them: mask, bias and bans, then penalties for tokens that it has already.

Each request that is penalised has a row of token counts that stays on the device and is counted up once it is known
which draws of a step hold (count_tokens). What follows a draft is drawn as if that were in the text already. Counts and
masks change the logits as the sampling kernel reads them (kept.py); only rows with single ids to edit, or with filters
after any of this, have their logits copied to float32 first (edit_logits).
"""

import torch

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.sampling.candidates import load_raw
from nanovllm.kernels.sampling.rows import Rows
from nanovllm.wire.sampling import EDIT_WORDS, MASK, MASK_WORD, PENALTIES, PLACE_SHIFT, RECORD_WORDS

RECORD = tl.constexpr(RECORD_WORDS)
_PENALTIES = tl.constexpr(PENALTIES)
_MASK = tl.constexpr(MASK)
_MASK_WORD = tl.constexpr(MASK_WORD)
_PLACE_SHIFT = tl.constexpr(PLACE_SHIFT)
_EDIT = tl.constexpr(EDIT_WORDS)


@triton.jit
def penalise(x, count, presence, frequency, repetition, inverse_repetition):
    """See edit_logits_reference. count: 2 * (times in the output) + (1 if in the prompt)."""
    x = tl.where(count > 0, x * tl.where(x > 0.0, inverse_repetition, repetition), x)
    times = count >> 1
    return x - frequency * times.to(tl.float32) - tl.where(times > 0, presence, 0.0)


@triton.jit
def load_penalties(record):
    """Presence, frequency and repetition penalty of a record, and the reciprocal of the last."""
    presence = tl.load(record + 4).to(tl.float32, bitcast=True)
    frequency = tl.load(record + 5).to(tl.float32, bitcast=True)
    repetition = tl.load(record + 6).to(tl.float32, bitcast=True)
    return presence, frequency, repetition, 1.0 / repetition


@triton.jit
def mask_line(slot, record):
    """Line of a row's mask, int64."""
    return slot.to(tl.int64) + tl.load(record + _MASK_WORD)


@triton.jit
def is_allowed(masks_row, index, live):
    """Whether the mask, int32 with a bit for each id, has the ids `index`."""
    word = tl.load(masks_row + index // 32, mask=live, other=0)
    return ((word >> (index % 32)) & 1) != 0


@triton.jit
def load_counts(counts, index, input_id, place, most_places, live):
    """Counts of the ids `index` of a text and `place` drafts behind it, the last of them at input_id. counts: pointers
    to those of the text; most_places: maximum of `place`."""
    count = tl.load(counts, mask=live, other=0)
    for back in range(most_places):
        count += tl.where(tl.load(input_id - back, mask=back < place, other=-1) == index, 2, 0)
    return count


@triton.jit
def load_edited(row, index, num_ids, flags, penalties, counts_row, input_id, masks_row):
    """Logits of the ids `index`, float32, as counts and mask, which may be None, change them; -inf beyond the row.
    flags, penalties: of the row's record. input_id: pointer to the row's own, with counts."""
    x = load_raw(row, index, num_ids).to(tl.float32)
    if counts_row is not None:  # noqa: SIM102  (one is known when compiling)
        if flags & _PENALTIES:
            place = flags >> _PLACE_SHIFT
            count = load_counts(counts_row + index, index, input_id, place, place, index < num_ids)
            x = penalise(x, count, penalties[0], penalties[1], penalties[2], penalties[3])
    if masks_row is not None:  # noqa: SIM102
        if flags & _MASK:
            x = tl.where(is_allowed(masks_row, index, index < num_ids), x, float("-inf"))
    return x


@triton.jit(do_not_specialize_on_alignment=["ROW", "SLOT", "RECORDS", "TARGET_ROW"])
def _edit_kernel(LOGITS, ROW, SLOT, RECORDS, TARGET_ROW, INPUT_IDS, COUNTS, MASKS, OUT, row_stride, counts_stride,
                 mask_stride, out_stride, num_ids, TILE: tl.constexpr):  # fmt: skip
    """edit_logits without edits: OUT float32 [G, out_stride], of LOGITS [any, row_stride] by ROW, SLOT, TARGET_ROW
    int32 [G], RECORDS int32 [G, RECORD_WORDS], INPUT_IDS (see Rows), COUNTS int32 [S, counts_stride] and MASKS int32
    [lines, mask_stride], which may be None. Ids `program_id(0)` * TILE and on of row `program_id(1)`."""
    g = tl.program_id(1)
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    record = RECORDS + g * RECORD
    slot = tl.load(SLOT + g).to(tl.int64)
    counts_row = None if COUNTS is None else COUNTS + slot * counts_stride
    masks_row = None if MASKS is None else MASKS + mask_line(slot, record) * mask_stride
    row = LOGITS + tl.load(ROW + g).to(tl.int64) * row_stride
    input_id = INPUT_IDS + tl.load(TARGET_ROW + g)
    x = load_edited(row, index, num_ids, tl.load(record), load_penalties(record), counts_row, input_id, masks_row)
    tl.store(OUT + g.to(tl.int64) * out_stride + index, x, mask=index < num_ids)


@triton.jit(
    do_not_specialize=["num_edits"], do_not_specialize_on_alignment=["ROW", "SLOT", "RECORDS", "TARGET_ROW", "EDITS"]
)
def _edit_entries_kernel(
    LOGITS, ROW, SLOT, RECORDS, TARGET_ROW, INPUT_IDS, COUNTS, MASKS, POSITIONS, EDITS, OUT, row_stride, counts_stride,
    mask_stride, out_stride, num_edits, TILE: tl.constexpr,
):  # fmt: skip
    """Writes the edited logit of single ids, EDITS int32 [num_edits, EDIT_WORDS], over what _edit_kernel wrote for
    them; POSITIONS int32 by row of the step; the other operands are those of _edit_kernel."""
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = entry < num_edits
    g = tl.load(EDITS + entry * _EDIT, mask=live, other=0)
    index = tl.load(EDITS + entry * _EDIT + 1, mask=live, other=0)
    add = tl.load(EDITS + entry * _EDIT + 2, mask=live, other=0).to(tl.float32, bitcast=True)
    until = tl.load(EDITS + entry * _EDIT + 3, mask=live, other=0)
    target = tl.load(TARGET_ROW + g)
    position = tl.load(POSITIONS + target)
    live = live & tl.where(until > 0, position < until, position >= -until)
    record = RECORDS + g * RECORD
    slot = tl.load(SLOT + g)
    flags = tl.load(record)
    row = tl.load(ROW + g).to(tl.int64)
    x = tl.load(LOGITS + row * row_stride + index, mask=live, other=0.0).to(tl.float32) + add
    if COUNTS is not None:
        has = live & ((flags & _PENALTIES) != 0)
        place = tl.where(has, flags >> _PLACE_SHIFT, 0)
        counts = COUNTS + slot.to(tl.int64) * counts_stride + index
        count = load_counts(counts, index, INPUT_IDS + target, place, tl.max(place, 0), has)
        presence, frequency, repetition, inverse_repetition = load_penalties(record)
        x = tl.where(has, penalise(x, count, presence, frequency, repetition, inverse_repetition), x)
    if MASKS is not None:
        has = live & ((flags & _MASK) != 0)
        masks_row = MASKS + mask_line(slot, record) * mask_stride
        x = tl.where(has & (is_allowed(masks_row, index, has) == 0), float("-inf"), x)
    tl.store(OUT + g.to(tl.int64) * out_stride + index, x, mask=live)


def edit_logits(
    rows: Rows, counts: torch.Tensor | None, masks: torch.Tensor | None, edits: torch.Tensor
) -> torch.Tensor:
    """The edited logits of the rows, float32 [G, vocab_size].

    In this order: `add` of each edit (int32 [E, EDIT_WORDS]: row of the G, id, float32 bits, n: where n > 0 at
    positions below n alone, else from -n on; each (row, id) once at any position); where the record says so, what
    counts int32 [S, vocab_size] of the row's slot and the drafts before the row's place call for (positive logits of
    ids that prompt or output hold are divided by the repetition penalty, others multiplied (Keskar et al., arXiv
    1909.05858); the frequency penalty is subtracted for each time in the output, the presence penalty once); -inf for
    ids outside the row's mask, int32 [lines, vocab_size / 32], bit by bit. One pass, then one over the entries of
    `edits`.
    """
    logits, vocab_size = rows.logits, rows.vocab_size
    out = torch.empty(len(rows), vocab_size, dtype=torch.float32, device=logits.device)
    given = (logits, rows.rows, rows.slots, rows.records, rows.target_rows, rows.input_ids)
    strides = (logits.stride(0), *(0 if t is None else t.stride(0) for t in (counts, masks)), out.stride(0))
    _edit_kernel[(triton.cdiv(vocab_size, 4096), len(rows))](
        *given, counts, masks, out, *strides, vocab_size, TILE=4096, num_warps=8
    )
    if edits.shape[0]:
        _edit_entries_kernel[(triton.cdiv(edits.shape[0], 128),)](
            *given, counts, masks, rows.positions, edits, out, *strides, edits.shape[0], TILE=128, num_warps=4
        )
    return out


def edit_logits_reference(
    rows: Rows, counts: torch.Tensor | None, masks: torch.Tensor | None, edits: torch.Tensor
) -> torch.Tensor:
    """Plain twin of `edit_logits`."""
    slots, records = rows.slots, rows.records
    x = rows.logits[rows.rows.long(), : rows.vocab_size].float()
    if edits.shape[0]:
        until, position = edits[:, 3], rows.positions[rows.target_rows.long()][edits[:, 0].long()]
        edits = edits[torch.where(until > 0, position < until, position >= -until)]
        x[edits[:, 0].long(), edits[:, 1].long()] += edits[:, 2].contiguous().view(torch.float32)
    if counts is not None:
        count, place = counts[slots.long()], records[:, 0] >> PLACE_SHIFT
        for back in range(int(place.max())):
            lines = (place > back).nonzero().squeeze(1)
            drafts = rows.input_ids[rows.target_rows[lines].long() - back]
            count[lines, drafts.clamp(min=0).long()] += 2 * (drafts >= 0).int()
        count = count * (records[:, :1] & PENALTIES)
        presence, frequency, repetition = records[:, 4:7].contiguous().view(torch.float32).unsqueeze(2).unbind(1)
        x = torch.where(count > 0, torch.where(x > 0, x * (1 / repetition), x * repetition), x)
        times = count >> 1
        x = x - frequency * times - torch.where(times > 0, presence, 0.0)
    if masks is not None:
        ids = torch.arange(rows.vocab_size, device=x.device)
        lines = slots.long() + records[:, MASK_WORD]
        allowed = (masks[lines][:, ids // 32] >> (ids % 32).int()) & 1
        x = x.masked_fill((allowed == 0) & ((records[:, :1] & MASK) != 0), -torch.inf)
    return x


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["SLOT", "RECORDS", "TARGET_ROW"])
def _count_kernel(SLOT, RECORDS, TARGET_ROW, TOKENS, COUNTS, counts_stride, num_rows, BLOCK: tl.constexpr):
    """count_tokens of BLOCK rows of SLOT, TARGET_ROW int32 [num_rows] and RECORDS int32 [num_rows, RECORD_WORDS], in
    COUNTS int32 [S, counts_stride]; TOKENS int32 by row of the step."""
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    has = (g < num_rows) & ((tl.load(RECORDS + g * RECORD, mask=g < num_rows, other=0) & _PENALTIES) != 0)
    token = tl.load(TOKENS + tl.load(TARGET_ROW + g, mask=has, other=0), mask=has, other=-1)
    slot = tl.load(SLOT + g, mask=has, other=0).to(tl.int64)
    tl.atomic_add(COUNTS + slot * counts_stride + token, 2, mask=token >= 0, sem="relaxed")


def count_tokens(rows: Rows, counts: torch.Tensor) -> None:
    """Counts the tokens of the rows that have penalties, int32 [S, vocab_size], once it is known which of their draws
    hold; others are negative."""
    _count_kernel[(triton.cdiv(len(rows), 32),)](
        rows.slots, rows.records, rows.target_rows, rows.tokens, counts, counts.stride(0), len(rows), BLOCK=32,
        num_warps=1,
    )  # fmt: skip


def count_tokens_reference(rows: Rows, counts: torch.Tensor) -> None:
    """Plain twin of `count_tokens`."""
    tokens = rows.tokens[rows.target_rows.long()].long()
    held = (((rows.records[:, 0] & PENALTIES) != 0) & (tokens >= 0)).nonzero().squeeze(1)
    where = rows.slots[held].long(), tokens[held]
    counts.index_put_(where, torch.full_like(rows.slots[held], 2), accumulate=True)
