"""min_p, top_k and top_p without sorting: each row's three filters come to one threshold, kept where logit >=
threshold.

All three keep the likeliest tokens, so together they keep those from some logit upwards; equal logits share their fate.
With m the largest logit, p(x) = exp((x - m) / temperature), and each filter acting on what the one before has left:

    min_p   keeps p(x) >= min_p
    top_k   keeps the k-th largest x and what equals or exceeds it
    top_p   keeps the largest threshold above which (itself included) there is top_p of the mass that is left

One program works on a row and adds in a fixed order: what it finds depends on the row alone, not on its neighbours.
Two ways to spare it passes over the row:

- The step has sampled a token from the whole distribution already. The best score of all is the best of the kept tokens
  too if it is kept: then that token is the result, and whether it is kept is one sum (of the mass above it, against
  top_p).
- What remains is a search for the largest t with F(t) >= target, F(t) the count or mass of x >= t, at three t in a
  pass. Floats of one sign have the order of their bits, so t is an integer and the bracket around it at most as wide
  as the bits of the logits (16 in bfloat16); a sample gives the first points, and interpolation the next.

Rows that have no token then are sampled by kernels/sampling/kept.py.
"""

import torch

from nanovllm.kernels.base.float_order import to_ordered
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.sampling.candidates import MAX_REGISTERS, row_tiles
from nanovllm.kernels.sampling.gumbel import MIN_TEMPERATURE
from nanovllm.kernels.sampling.kept import sample_kept, sample_kept_reference
from nanovllm.kernels.sampling.penalties import RECORD
from nanovllm.kernels.sampling.rows import Rows
from nanovllm.kernels.sampling.thresholds import KEY_SHIFT, key_at_least, row_peak, row_sums, search, unorder

_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row_threshold(row, peak, star, lowest, top_k, top_p, scale, num_ids, WINNER: tl.constexpr, SHIFT: tl.constexpr,
                   LANES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The threshold of a row, by passes over all of it; no more than `star` where that is kept. peak: the largest
    logit, or inf where top_p alone limits the row and `star` replaces it."""
    high = (to_ordered(peak) >> SHIFT).to(tl.int64) + 1
    low = tl.minimum(key_at_least(lowest, SHIFT), high - 1)
    reference = peak
    if WINNER:
        reference = star
    if (top_k > 0) & (top_k < num_ids):
        low = search(row, low, high, num_ids.to(tl.float32), top_k.to(tl.float32), reference, scale,
                      num_ids, True, SHIFT, LANES, WIDTH, TILES)  # fmt: skip
    threshold = unorder(low, SHIFT)
    if top_p < 1.0:
        above = threshold
        if WINNER:
            above = tl.maximum(unorder((to_ordered(star) >> SHIFT).to(tl.int64) + 1, SHIFT), threshold)
        total, beyond, _ = row_sums(row, threshold, above, above, reference, scale, num_ids, False, LANES,
                                     WIDTH, TILES)  # fmt: skip
        target = top_p * total
        is_kept = False
        if WINNER:
            is_kept = (star >= threshold) & (beyond < target)
            low = tl.where(beyond >= target, key_at_least(above, SHIFT), low)
            total = tl.where(beyond >= target, beyond, total)
        if not is_kept:
            low = search(row, low, high, total, target, reference, scale, num_ids, False, SHIFT,
                          LANES, WIDTH, TILES)  # fmt: skip
            threshold = unorder(low, SHIFT)
    return threshold


@triton.jit(do_not_specialize_on_alignment=["ROW", "SLOT", "RECORDS", "TARGET_ROW"])
def _filter_kernel(LOGITS, ROW, SLOT, RECORDS, TEMPERATURE, TARGET_ROW, TOKENS, THRESHOLD, row_stride, num_ids,
                   WINNER: tl.constexpr, SHIFT: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
                   TILES: tl.constexpr):  # fmt: skip
    """THRESHOLD float32 [G], to sample with, of the lines ROW int32 [G] of LOGITS [any, row_stride], by RECORDS int32
    [G, RECORD_WORDS] and TEMPERATURE float32 [S] at SLOT int32 [G]. Row `program_id(0)`. WINNER: TOKENS has what the
    step itself sampled from the same logits; where the filters keep that token, the threshold is inf."""
    g = tl.program_id(0)
    record = RECORDS + g * RECORD
    top_k = tl.load(record + 1)
    top_p = tl.load(record + 2).to(tl.float32, bitcast=True)
    log_min_p = tl.load(record + 3).to(tl.float32, bitcast=True)
    temperature = tl.load(TEMPERATURE + tl.load(SLOT + g))
    row = LOGITS + tl.load(ROW + g).to(tl.int64) * row_stride
    infinity = tl.full([], float("inf"), tl.float32)
    star, threshold = infinity, -infinity
    if WINNER:
        star = tl.load(row + tl.load(TOKENS + tl.load(TARGET_ROW + g))).to(tl.float32)
    has_k, has_p, has_min = (top_k > 0) & (top_k < num_ids), top_p < 1.0, log_min_p > float("-inf")
    if (temperature >= _MIN_TEMPERATURE) & (has_k | has_p | has_min):
        scale = 1.0 / temperature * _LOG2_E
        peak, lowest = infinity, -infinity
        if has_k | has_min | (not WINNER):
            peak = row_peak(row, num_ids, LANES, WIDTH, TILES)
        if has_min:
            lowest = peak + log_min_p * temperature
        is_finite = (peak > float("-inf")) & (peak < float("inf"))
        if WINNER:
            is_finite = (is_finite | (not (has_k | has_min))) & (star > float("-inf")) & (star < float("inf"))
        if is_finite:
            threshold = _row_threshold(row, peak, star, lowest, top_k, top_p, scale, num_ids, WINNER, SHIFT, LANES,
                                       WIDTH, TILES)  # fmt: skip
    if WINNER:
        threshold = tl.where(star >= threshold, infinity, threshold)
    tl.store(THRESHOLD + g, threshold)


def sample_filtered(rows: Rows, has_winner: bool) -> torch.Tensor | None:
    """Samples a token of each row from the ids that its filters let pass (find_thresholds_reference), as
    sample_kept does. has_winner: tokens[target_rows] and last_token[slots] hold what these very logits gave
    without filters; where the filters keep that token, it stays. Returns the thresholds, float32
    [G], without has_winner: with it they are not always looked for. A program for each row, and another pass over rows
    left open."""
    logits, vocab_size = rows.logits, rows.vocab_size
    thresholds = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    _filter_kernel[(len(rows),)](
        logits, rows.rows, rows.slots, rows.records, rows.temperature, rows.target_rows, rows.tokens, thresholds,
        logits.stride(0), vocab_size, WINNER=has_winner, SHIFT=KEY_SHIFT[logits.dtype], maxnreg=MAX_REGISTERS,
        **row_tiles(vocab_size),
    )  # fmt: skip
    sample_kept(rows, thresholds)
    return None if has_winner else thresholds


def find_thresholds_reference(
    logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, records: torch.Tensor, temperature: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:  # fmt: skip
    """float32 [G]: the least logit that row g's min_p, top_k and top_p let pass; -inf where none of them limits it.

    logits [any, >= vocab_size], row g of them at rows int32 [G]; slots int32 [G] into temperature float32 [S]; records
    int32 [G, RECORD_WORDS] (wire/sampling.py). NaN counts as -inf. Sorts, and adds probabilities in float64.
    """
    x = logits[rows.long(), :vocab_size].float()
    x = x.masked_fill(x.isnan(), -torch.inf)
    record = records.contiguous()
    top_k, (top_p, log_min_p) = record[:, 1].long(), record[:, 2:4].contiguous().view(torch.float32).unbind(1)
    heat = temperature[slots.long()]
    limited = heat >= MIN_TEMPERATURE
    limited &= ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (log_min_p > -torch.inf)
    ordered = x.sort(dim=1, descending=True).values
    limited &= ordered[:, 0].isfinite()
    threshold = ordered[:, 0] + log_min_p * heat
    kth = ordered.gather(1, (top_k.clamp(1, vocab_size) - 1).unsqueeze(1)).squeeze(1)
    threshold = torch.where((top_k > 0) & (top_k < vocab_size), torch.maximum(threshold, kth), threshold)
    weights = ((ordered - ordered[:, :1]).double() / heat.clamp(min=MIN_TEMPERATURE).double().unsqueeze(1)).exp()
    mass = weights.masked_fill(ordered < threshold.unsqueeze(1), 0.0).cumsum(1)
    enough = mass >= top_p.double().unsqueeze(1) * mass[:, -1:]
    last = ordered.gather(1, enough.int().argmax(1, keepdim=True)).squeeze(1)
    threshold = torch.where(top_p < 1, torch.maximum(threshold, last), threshold)
    return torch.where(limited, threshold, -torch.inf)


def sample_filtered_reference(rows: Rows, has_winner: bool) -> torch.Tensor | None:
    """Plain twin of `sample_filtered`."""
    given = (rows.logits, rows.rows, rows.slots, rows.records, rows.temperature)
    thresholds = find_thresholds_reference(*given, rows.vocab_size)
    sample_kept_reference(rows, thresholds)
    return None if has_winner else thresholds
