"""min_p, top_k and top_p without sorting: each row's three filters come to one threshold, kept where logit >= threshold.

All three keep the likeliest tokens, so together they keep those from some logit upwards; equal logits share their fate.
With m the largest logit, p(x) = exp((x - m) / temperature), and each filter acting on what the one before has left:

    min_p   keeps p(x) >= min_p
    top_k   keeps the k-th largest x and what equals or exceeds it
    top_p   keeps the largest threshold above which (itself included) lies top_p of the mass that is left

The last two are searches for the largest t with F(t) >= target, F(t) the count or mass of x >= t. F is evaluated at several
t in one pass over the row. Floats of one sign have the order of their bits, so t is an integer and the bracket around it
at most as wide as the bits of the logits (16 in bfloat16); a sample of the row gives the first points, close to the end.
One program works on a row and adds in a fixed order: the threshold's bits depend on the row alone, not on its neighbours.
"""

import torch

from nanovllm.kernels.rng import gumbel_noise, random_words, row_key
from nanovllm.kernels.sampling import MIN_TEMPERATURE, gumbel_argmax_reference, keys_to_tokens
from nanovllm.kernels.sampling import _pack_keys, _tiling
from nanovllm.kernels.triton_import import tl, triton
from nanovllm.sampling.section import MASK, PENALTIES, RECORD_WORDS

_RECORD = tl.constexpr(RECORD_WORDS)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_PENALTIES = tl.constexpr(PENALTIES)
_PIECES = tl.constexpr(16)  # of a sample
_POINTS = tl.constexpr(4)

KEY_SHIFT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low bits of a float32 that values of this type never use."""


@triton.jit
def _order(x):
    """float32 -> int32 of the same order (-0.0 just below 0.0)."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unorder(key, SHIFT: tl.constexpr):
    """The float32 t such that x >= t just where (_order(x) >> SHIFT) >= key."""
    bits = key << SHIFT
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _load(row, index, num_ids):
    x = tl.load(row + index, mask=index < num_ids, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))  # NaN


@triton.jit
def _weights(x, peak, inverse_temperature, COUNT: tl.constexpr):
    if COUNT:
        w = tl.where(x > float("-inf"), 1.0, 0.0)
    else:
        w = tl.exp((x - peak) * inverse_temperature)
    return w


@triton.jit
def _sum_above(x, w, t):
    return tl.sum(tl.where(x >= t, w, 0.0), 1)


@triton.jit
def _sums(row, t0, t1, t2, t3, peak, inverse_temperature, num_ids, COUNT: tl.constexpr, LANES: tl.constexpr,
          WIDTH: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """F at four thresholds, in one pass over the row."""
    lane, column = tl.arange(0, LANES), tl.arange(0, WIDTH)
    index = lane[:, None] * WIDTH + column[None, :]
    s0 = tl.zeros([LANES], tl.float32)
    s1, s2, s3 = s0, s0, s0
    for tile in range(TILES):
        x = _load(row, index + tile * (LANES * WIDTH), num_ids)
        w = _weights(x, peak, inverse_temperature, COUNT)
        s0 += _sum_above(x, w, t0)
        s1 += _sum_above(x, w, t1)
        s2 += _sum_above(x, w, t2)
        s3 += _sum_above(x, w, t3)
    return tl.sum(s0, 0), tl.sum(s1, 0), tl.sum(s2, 0), tl.sum(s3, 0)


@triton.jit
def _guess(x, w, low, high, target, SHIFT: tl.constexpr):
    """The largest key in [low, high) with F >= target over a sample's x and w."""
    while high - low > 1:
        middle = low + (high - low) // 2
        above = tl.sum(tl.sum(tl.where(x >= _unorder(middle, SHIFT), w, 0.0), 1), 0)
        enough = above >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _search(row, low, high, target, share, peak, inverse_temperature, num_ids, COUNT: tl.constexpr,
            SHIFT: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The largest key in [low, high) with F >= target; F(low) >= target > F(high) = 0 is given.

    COUNT: target is a number of tokens; else `share` of F(low), which the first pass finds out.
    """
    if high - low > 1:
        # Where would it be in a sample of LANES * WIDTH tokens, in pieces from all over the row?
        lane, column = tl.arange(0, LANES), tl.arange(0, WIDTH)
        of_piece: tl.constexpr = LANES // _PIECES
        piece = (num_ids // _PIECES) * (lane // of_piece) + (lane % of_piece) * WIDTH
        x = _load(row, piece[:, None] + column[None, :], num_ids)
        w = tl.where(x >= _unorder(low, SHIFT), _weights(x, peak, inverse_temperature, COUNT), 0.0)
        if COUNT:
            expected = target * (LANES * WIDTH) / num_ids
            slack = 3.0 * tl.sqrt(expected) + 2.0
            first, second = expected + slack, tl.maximum(expected - slack, 1.0)
        else:
            mass = tl.sum(tl.sum(w, 1), 0)
            first, second = mass * tl.minimum(share + 0.02, 1.0), mass * (share - 0.02)
        key1 = tl.minimum(tl.maximum(_guess(x, w, low, high, first, SHIFT), low), high - 1)
        key3 = tl.minimum(tl.maximum(_guess(x, w, low, high, second, SHIFT) + 1, key1), high - 1)
        key2 = key1 + (key3 - key1) // 2
        searching = True
        while searching:
            f0, f1, f2, f3 = _sums(
                row, _unorder(low, SHIFT), _unorder(key1, SHIFT), _unorder(key2, SHIFT), _unorder(key3, SHIFT),
                peak, inverse_temperature, num_ids, COUNT, LANES, WIDTH, TILES,
            )  # fmt: skip
            if not COUNT:
                target = tl.where(target < 0.0, share * f0, target)
            high = tl.where(f1 < target, key1, tl.where(f2 < target, key2, tl.where(f3 < target, key3, high)))
            low = tl.where(f3 >= target, key3, tl.where(f2 >= target, key2, tl.where(f1 >= target, key1, low)))
            quarter = (high - low) // 4
            rest = (high - low) % 4
            key1 = low + tl.maximum(quarter, 1)
            key2 = tl.minimum(low + tl.maximum(2 * quarter + rest // 2, 2), high - 1)
            key3 = tl.minimum(low + tl.maximum(3 * quarter + rest - rest // 2, 3), high - 1)
            searching = high - low > 1
    return low


@triton.jit
def _thresholds_kernel(LOGITS, ROW, SLOT, RECORDS, TEMPERATURE, THRESHOLD, row_stride, num_ids, SHIFT: tl.constexpr,
                       LANES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The threshold of row program_id(0)."""
    g = tl.program_id(0)
    record = RECORDS + g * _RECORD
    top_k = tl.load(record + 1)
    top_p = tl.load(record + 2).to(tl.float32, bitcast=True)
    log_min_p = tl.load(record + 3).to(tl.float32, bitcast=True)
    temperature = tl.load(TEMPERATURE + tl.load(SLOT + g))
    threshold = float("-inf")
    limits_k = (top_k > 0) & (top_k < num_ids)
    if (temperature >= _MIN_TEMPERATURE) & (limits_k | (top_p < 1.0) | (log_min_p > float("-inf"))):
        row = LOGITS + tl.load(ROW + g).to(tl.int64) * row_stride
        inverse_temperature = 1.0 / temperature
        index = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        largest = tl.full([LANES], float("-inf"), tl.float32)
        for tile in range(TILES):
            largest = tl.maximum(largest, tl.max(_load(row, index + tile * (LANES * WIDTH), num_ids), 1))
        peak = tl.max(largest, 0)
        if (peak > float("-inf")) & (peak < float("inf")):
            lowest = tl.maximum(peak + log_min_p * temperature, -3.4e38)  # every finite logit is at least that
            low = _order(lowest) >> SHIFT
            low += tl.where(_unorder(low, SHIFT) < lowest, 1, 0)
            high = (_order(peak) >> SHIFT) + 1
            low = tl.minimum(low, high - 1)
            if limits_k:
                f0, f1, f2, f3 = _sums(row, _unorder(low, SHIFT), 0.0, 0.0, 0.0, peak, inverse_temperature, num_ids,
                                       True, LANES, WIDTH, 1)  # fmt: skip
                # Fewer tokens than k above min_p's threshold: F(low) < k, and the search must not rely on it.
                target = top_k.to(tl.float32)
                start = tl.where(log_min_p > float("-inf"), _order(-3.4e38) >> SHIFT, low)
                found = _search(row, start, high, target, 1.0, peak, inverse_temperature, num_ids, True, SHIFT, LANES,
                                WIDTH, TILES)  # fmt: skip
                low = tl.maximum(low, found)
            if top_p < 1.0:
                low = _search(row, low, high, -1.0, top_p, peak, inverse_temperature, num_ids, False, SHIFT, LANES,
                              WIDTH, TILES)  # fmt: skip
            threshold = _unorder(low, SHIFT)
    tl.store(THRESHOLD + g, threshold)
