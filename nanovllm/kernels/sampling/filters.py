"""min_p, top_k and top_p without sorting: each row's three filters come to one threshold, kept where logit >=
threshold.

All three keep the likeliest tokens, so together they keep those from some logit upwards; equal logits share their fate.
With m the largest logit, p(x) = exp((x - m) / temperature), and each filter acting on what the one before has left:

    min_p   keeps p(x) >= min_p
    top_k   keeps the k-th largest x and what equals or exceeds it
    top_p   keeps the largest threshold above which (itself included) lies top_p of the mass that is left

One program works on a row and adds in a fixed order: what it finds depends on the row alone, not on its neighbours.
Three ways to spare it passes over the row:

- The step has drawn a token from the whole distribution already. The best score of all is the best of the survivors too
  if it survives: then its token stands, and whether it does is one sum (of the mass above it, against top_p).
- top_k leaves few. A sample bounds the k-th largest logit from below; one pass lists what lies above, and threshold and
  draw take no more than the list.
- What is left is a search for the largest t with F(t) >= target, F(t) the count or mass of x >= t, at three t in a
  pass. Floats of one sign have the order of their bits, so t is an integer and the bracket around it at most as wide
  as the bits of the logits (16 in bfloat16); a sample gives the first points, and interpolation the next.

Rows that have no token then are drawn from by kernels/sampling/survivors.py.
"""

import torch

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.sampling.candidates import (
    MAX_REGISTERS,
    STRETCH,
    append,
    as_ids,
    list_entries,
    load_raw,
    new_lists,
    row_tiles,
    sample_floor,
    tile_index,
)
from nanovllm.kernels.sampling.gumbel import MIN_TEMPERATURE, NO_CANDIDATE, _pack_keys
from nanovllm.kernels.sampling.rng import gumbel_noise, random_words, row_key
from nanovllm.kernels.sampling.rows import Rows
from nanovllm.kernels.sampling.survivors import commit_token, sample_kept, sample_kept_reference
from nanovllm.kernels.sampling.thresholds import (
    KEY_SHIFT,
    key_at_least,
    list_sums,
    order,
    row_peak,
    row_sums,
    search,
    unorder,
)
from nanovllm.wire.sampling import RECORD_WORDS

_RECORD = tl.constexpr(RECORD_WORDS)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_NO_CANDIDATE = tl.constexpr(NO_CANDIDATE)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST = tl.constexpr(-3.4e38)

LIST_DEPTH = 12
"""Ids that a lane of a row's list holds, 12,288 in all for a large vocabulary: many more than the sample's floor lets
through, ties aside."""
_MAX_LISTED_K = tl.constexpr(512)


@triton.jit
def _row_list(row, LIST, floor, num_ids, LANES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
              DEPTH: tl.constexpr):  # fmt: skip
    """Lists the ids of logits >= floor (but -inf); returns how many of them each lane has."""
    index = tile_index(LANES, WIDTH)
    depth = tl.zeros([LANES], tl.int32)
    coming = load_raw(row, index, num_ids)
    for tile in range(TILES):
        at = index + tile * (LANES * WIDTH)
        x = as_ids(coming)
        coming = load_raw(row, at + LANES * WIDTH, num_ids)
        depth = append(LIST, x, at, (x >= floor) & (x > float("-inf")), depth, LANES, DEPTH)
    tl.debug_barrier()  # lanes read what others wrote
    return depth


@triton.jit
def _list_peak(LIST, depth, deepest, LANES: tl.constexpr):
    largest = tl.full([LANES], float("-inf"), tl.float32)
    for begin in range(0, deepest, STRETCH):
        x, _, _ = list_entries(LIST, depth, begin, LANES)
        largest = tl.maximum(largest, tl.max(x, 0))
    return tl.max(largest, 0)


@triton.jit
def _list_threshold(LIST, depth, deepest, floor, peak, top_k, top_p, scale, num_ids, SHIFT: tl.constexpr,
                    LANES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The threshold of a row whose list holds all that can survive: the ids from `floor` on."""
    high = (order(peak) >> SHIFT).to(tl.int64) + 1
    low = tl.minimum(key_at_least(floor, SHIFT), high - 1)
    count = tl.sum(depth, 0).to(tl.float32)
    if (top_k > 0) & (top_k < num_ids) & (count > top_k.to(tl.float32)):
        low = search(LIST, LIST, depth, deepest, low, high, count, top_k.to(tl.float32), peak, scale, num_ids,
                      True, True, SHIFT, LANES, WIDTH, TILES)  # fmt: skip
    if top_p < 1.0:
        t = unorder(low, SHIFT)
        total, _, _ = list_sums(LIST, depth, deepest, t, t, t, peak, scale, False, LANES)
        low = search(LIST, LIST, depth, deepest, low, high, total, top_p * total, peak, scale, num_ids,
                      False, True, SHIFT, LANES, WIDTH, TILES)  # fmt: skip
    return unorder(low, SHIFT)


@triton.jit
def _list_draw(LIST, depth, deepest, threshold, inverse_temperature, k0, k1, APPROX: tl.constexpr,
               LANES: tl.constexpr):  # fmt: skip
    """Key of the best of a list's survivors: the same score bits as kernels/sampling/survivors.py computes."""
    best = tl.full([LANES], _NO_CANDIDATE, tl.int64)
    for begin in range(0, deepest, STRETCH):
        x, index, live = list_entries(LIST, depth, begin, LANES)
        scores = tl.fma(x, inverse_temperature, gumbel_noise(random_words(k0, k1, index), APPROX))
        survives = live & (x >= threshold)
        keys = tl.where(survives, _pack_keys(tl.where(survives, scores, 0.0), index), _NO_CANDIDATE)
        best = tl.maximum(best, tl.max(keys, 0))
    return tl.max(best, 0)


@triton.jit
def _row_threshold(row, peak, star, lowest, top_k, top_p, scale, num_ids, WINNER: tl.constexpr, SHIFT: tl.constexpr,
                   LANES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The threshold of a row, by passes over all of it; no more than `star` where that survives. peak: the largest
    logit, or inf where top_p alone limits the row and `star` stands for it."""
    high = (order(peak) >> SHIFT).to(tl.int64) + 1
    low = tl.minimum(key_at_least(lowest, SHIFT), high - 1)
    reference = peak
    if WINNER:
        reference = star
    if (top_k > 0) & (top_k < num_ids):
        low = search(row, row, 0, 0, low, high, num_ids.to(tl.float32), top_k.to(tl.float32), reference, scale,
                      num_ids, True, False, SHIFT, LANES, WIDTH, TILES)  # fmt: skip
    threshold = unorder(low, SHIFT)
    if top_p < 1.0:
        above = threshold
        if WINNER:
            above = tl.maximum(unorder((order(star) >> SHIFT).to(tl.int64) + 1, SHIFT), threshold)
        total, beyond, _ = row_sums(row, threshold, above, above, reference, scale, num_ids, False, LANES,
                                     WIDTH, TILES)  # fmt: skip
        target = top_p * total
        survives = False
        if WINNER:
            survives = (star >= threshold) & (beyond < target)
            low = tl.where(beyond >= target, key_at_least(above, SHIFT), low)
            total = tl.where(beyond >= target, beyond, total)
        if not survives:
            low = search(row, row, 0, 0, low, high, total, target, reference, scale, num_ids, False, False, SHIFT,
                          LANES, WIDTH, TILES)  # fmt: skip
            threshold = unorder(low, SHIFT)
    return threshold


@triton.jit(do_not_specialize_on_alignment=["ROW", "SLOT", "RECORDS", "TARGET_ROW"])
def _filter_kernel(LOGITS, ROW, SLOT, RECORDS, TEMPERATURE, SEED, POSITIONS, TARGET_ROW, TOKENS, LAST_TOKEN, COUNTS,
                   THRESHOLD, KEPT, LIST, row_stride, counts_stride, num_ids, WINNER: tl.constexpr,
                   COUNTED: tl.constexpr, SHIFT: tl.constexpr, APPROX: tl.constexpr, LANES: tl.constexpr,
                   WIDTH: tl.constexpr, TILES: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Row program_id(0): writes its token and the threshold inf, or else the threshold to draw with. WINNER: the step's
    own draw from the same logits is in TOKENS; without it, KEPT gets the threshold of the row in either case."""
    g = tl.program_id(0)
    record, slot, target = RECORDS + g * _RECORD, tl.load(SLOT + g), tl.load(TARGET_ROW + g)
    top_k = tl.load(record + 1)
    top_p = tl.load(record + 2).to(tl.float32, bitcast=True)
    log_min_p = tl.load(record + 3).to(tl.float32, bitcast=True)
    temperature = tl.load(TEMPERATURE + slot)
    row = LOGITS + tl.load(ROW + g).to(tl.int64) * row_stride
    LIST += g.to(tl.int64) * (DEPTH * LANES)
    infinity = tl.full([], float("inf"), tl.float32)
    star, threshold = infinity, -infinity
    kept = threshold
    if WINNER:
        star = tl.load(row + tl.load(TOKENS + target)).to(tl.float32)
    has_k, has_p, has_min = (top_k > 0) & (top_k < num_ids), top_p < 1.0, log_min_p > float("-inf")
    if (temperature >= _MIN_TEMPERATURE) & (has_k | has_p | has_min):
        inverse_temperature = 1.0 / temperature
        scale = inverse_temperature * _LOG2_E
        lists_k = has_k & (top_k <= _MAX_LISTED_K)
        peak, floor, lowest = infinity, -infinity, -infinity
        if has_min | ((not lists_k) & (has_k | (not WINNER))):
            peak = row_peak(row, num_ids, LANES, WIDTH, TILES)
        if has_min:
            lowest = tl.maximum(peak + log_min_p * temperature, _LEAST)
        if lists_k:
            floor = sample_floor(row, num_ids, top_k, LANES, WIDTH)
        floor = tl.maximum(floor, lowest)
        listed = False
        if lists_k:
            depth = _row_list(row, LIST, floor, num_ids, LANES, WIDTH, TILES, DEPTH)
            deepest, count = tl.max(depth, 0), tl.sum(depth, 0)
            if (deepest <= DEPTH) & (count > 0) & ((count >= top_k) | (floor <= lowest)):
                peak = _list_peak(LIST, depth, deepest, LANES)
                if peak < float("inf"):
                    listed = True
                    threshold = _list_threshold(LIST, depth, deepest, floor, peak, top_k, top_p, scale, num_ids,
                                                SHIFT, LANES, WIDTH, TILES)  # fmt: skip
                    kept = threshold
                    k0, k1 = row_key(tl.load(SEED + slot), tl.load(POSITIONS + target))
                    key = _list_draw(LIST, depth, deepest, threshold, inverse_temperature, k0, k1, APPROX,
                                     LANES)  # fmt: skip
                    commit_token((~key).to(tl.int32), record, slot, target, TOKENS, LAST_TOKEN, COUNTS, counts_stride,
                                 COUNTED)  # fmt: skip
                    threshold = infinity
        if not listed:
            if (peak == float("inf")) & (has_k | has_min | (not WINNER)):
                peak = row_peak(row, num_ids, LANES, WIDTH, TILES)
            is_finite = (peak > float("-inf")) & (peak < float("inf"))
            if WINNER:
                is_finite = (is_finite | (not (has_k | has_min))) & (star > float("-inf")) & (star < float("inf"))
            if is_finite:
                threshold = _row_threshold(row, peak, star, lowest, top_k, top_p, scale, num_ids, WINNER, SHIFT, LANES,
                                           WIDTH, TILES)  # fmt: skip
            kept = threshold
    if WINNER:
        threshold = tl.where(star >= threshold, infinity, threshold)
    else:
        tl.store(KEPT + g, kept)
    tl.store(THRESHOLD + g, threshold)


def sample_filtered(rows: Rows, counts: torch.Tensor | None, has_winner: bool) -> torch.Tensor | None:
    """Triton version of sample_filtered_reference: a program for each row, and another pass over rows left open."""
    logits, num_rows, vocab_size = rows.logits, len(rows), rows.vocab_size
    thresholds, kept = torch.empty(2, num_rows, dtype=torch.float32, device=logits.device)
    _filter_kernel[(num_rows,)](
        logits, rows.rows, rows.slots, rows.records, rows.temperature, rows.seed, rows.positions, rows.target_rows,
        rows.tokens, rows.last_token, rows.tokens if counts is None else counts, thresholds, kept,
        new_lists(num_rows, vocab_size, LIST_DEPTH, logits.device),
        logits.stride(0), 0 if counts is None else counts.stride(0), vocab_size, WINNER=has_winner,
        COUNTED=counts is not None, SHIFT=KEY_SHIFT[logits.dtype], APPROX=logits.is_cuda, DEPTH=LIST_DEPTH,
        maxnreg=MAX_REGISTERS, **row_tiles(vocab_size),
    )  # fmt: skip
    sample_kept(rows, counts, thresholds)
    return None if has_winner else kept


def find_thresholds_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    records: torch.Tensor,
    temperature: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
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


def sample_filtered_reference(rows: Rows, counts: torch.Tensor | None, has_winner: bool) -> torch.Tensor | None:
    """Samples a token of each row from the ids that its filters let pass (find_thresholds_reference), as
    sample_kept_reference does. has_winner: tokens[target_rows] and last_token[slots] hold what these very
    logits gave without filters (and counts is None); where the filters keep that token, it stays. Returns the
    thresholds, float32 [G], without has_winner: with it they are not always looked for."""
    given = (rows.logits, rows.rows, rows.slots, rows.records, rows.temperature)
    thresholds = find_thresholds_reference(*given, rows.vocab_size)
    sample_kept_reference(rows, counts, thresholds)
    return None if has_winner else thresholds
