"""Logits as a row's own rules change them: mask, bias and bans, then penalties for tokens that it has already.

Each request that is penalised has a row of token counts that stays on the device and is counted up where its token is
sampled. Counts and masks change the logits as the sampling kernel reads them (kept.py); only rows with single ids to
edit, or with filters after any of this, have their logits copied to float32 first (edit_logits).
"""

import torch

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.sampling.candidates import load_raw
from nanovllm.kernels.sampling.rows import Rows
from nanovllm.wire.sampling import MASK, MASK_WORD, PENALTIES, RECORD_WORDS

_RECORD = tl.constexpr(RECORD_WORDS)
_PENALTIES = tl.constexpr(PENALTIES)
_MASK = tl.constexpr(MASK)
_MASK_WORD = tl.constexpr(MASK_WORD)


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
def load_edited(row, index, num_ids, flags, penalties, counts_row, masks_row):
    """Logits of the ids `index`, float32, as counts and mask, which may be None, change them; -inf beyond the row.
    flags, penalties: of the row's record."""
    x = load_raw(row, index, num_ids).to(tl.float32)
    if counts_row is not None:  # noqa: SIM102  (one is known when compiling)
        if flags & _PENALTIES:
            count = tl.load(counts_row + index, mask=index < num_ids, other=0)
            x = penalise(x, count, penalties[0], penalties[1], penalties[2], penalties[3])
    if masks_row is not None:  # noqa: SIM102
        if flags & _MASK:
            x = tl.where(is_allowed(masks_row, index, index < num_ids), x, float("-inf"))
    return x


@triton.jit(do_not_specialize_on_alignment=["ROW", "SLOT", "RECORDS"])
def _edit_kernel(LOGITS, ROW, SLOT, RECORDS, COUNTS, MASKS, OUT, row_stride, counts_stride, mask_stride, out_stride,
                 num_ids, TILE: tl.constexpr):  # fmt: skip
    """edit_logits without edits: OUT float32 [G, out_stride], of LOGITS [any, row_stride] by ROW, SLOT int32 [G],
    RECORDS int32 [G, RECORD_WORDS], COUNTS int32 [S, counts_stride] and MASKS int32 [lines, mask_stride], which may
    be None. Ids `program_id(0)` * TILE and on of row `program_id(1)`."""
    g = tl.program_id(1)
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    record = RECORDS + g * _RECORD
    slot = tl.load(SLOT + g).to(tl.int64)
    counts_row = None if COUNTS is None else COUNTS + slot * counts_stride
    masks_row = None if MASKS is None else MASKS + mask_line(slot, record) * mask_stride
    row = LOGITS + tl.load(ROW + g).to(tl.int64) * row_stride
    x = load_edited(row, index, num_ids, tl.load(record), load_penalties(record), counts_row, masks_row)
    tl.store(OUT + g.to(tl.int64) * out_stride + index, x, mask=index < num_ids)


@triton.jit(do_not_specialize=["num_edits"], do_not_specialize_on_alignment=["ROW", "SLOT", "RECORDS", "EDITS"])
def _edit_entries_kernel(LOGITS, ROW, SLOT, RECORDS, COUNTS, MASKS, EDITS, OUT, row_stride, counts_stride, mask_stride,
                         out_stride, num_edits, TILE: tl.constexpr):  # fmt: skip
    """Writes the edited logit of single ids, EDITS int32 [num_edits, 3], over what _edit_kernel wrote for them; the
    other operands are those of _edit_kernel."""
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = entry < num_edits
    g = tl.load(EDITS + entry * 3, mask=live, other=0)
    index = tl.load(EDITS + entry * 3 + 1, mask=live, other=0)
    add = tl.load(EDITS + entry * 3 + 2, mask=live, other=0).to(tl.float32, bitcast=True)
    record = RECORDS + g * _RECORD
    slot = tl.load(SLOT + g)
    flags = tl.load(record)
    row = tl.load(ROW + g).to(tl.int64)
    x = tl.load(LOGITS + row * row_stride + index, mask=live, other=0.0).to(tl.float32) + add
    if COUNTS is not None:
        has = live & ((flags & _PENALTIES) != 0)
        count = tl.load(COUNTS + slot.to(tl.int64) * counts_stride + index, mask=has, other=0)
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

    In this order: `add` of each edit (int32 [E, 3]: row of the G, id, float32 bits; each (row, id) once); where the
    record says so, what counts int32 [S, vocab_size] of the row's slot calls for (positive logits of ids that prompt or
    output hold are divided by the repetition penalty, others multiplied (Keskar et al., arXiv 1909.05858); the
    frequency penalty is subtracted for each time in the output, the presence penalty once); -inf for ids outside the
    row's mask, int32 [lines, vocab_size / 32], bit by bit. One pass, then one over the entries of `edits`.
    """
    logits, vocab_size = rows.logits, rows.vocab_size
    out = torch.empty(len(rows), vocab_size, dtype=torch.float32, device=logits.device)
    given = (logits, rows.rows, rows.slots, rows.records)
    strides = (logits.stride(0), *(0 if t is None else t.stride(0) for t in (counts, masks)), out.stride(0))
    _edit_kernel[(triton.cdiv(vocab_size, 4096), len(rows))](
        *given, counts, masks, out, *strides, vocab_size, TILE=4096, num_warps=8
    )
    if edits.shape[0]:
        _edit_entries_kernel[(triton.cdiv(edits.shape[0], 128),)](
            *given, counts, masks, edits, out, *strides, edits.shape[0], TILE=128, num_warps=4
        )
    return out


def edit_logits_reference(
    rows: Rows, counts: torch.Tensor | None, masks: torch.Tensor | None, edits: torch.Tensor
) -> torch.Tensor:
    """Plain twin of `edit_logits`."""
    slots, records = rows.slots, rows.records
    x = rows.logits[rows.rows.long(), : rows.vocab_size].float()
    if edits.shape[0]:
        x[edits[:, 0].long(), edits[:, 1].long()] += edits[:, 2].contiguous().view(torch.float32)
    if counts is not None:
        count = counts[slots.long()] * (records[:, :1] & PENALTIES)
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
