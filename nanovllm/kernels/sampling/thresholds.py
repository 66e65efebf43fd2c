"""The search for a threshold: the largest t with F(t) >= target, F(t) the count or the mass of the logits x >= t of a
row. kernels/sampling/filters.py says what for."""

import torch

from nanovllm.kernels.base.float_order import from_ordered, to_ordered
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.sampling.candidates import as_ids, load_raw, load_sample, tile_index

_LEAST = tl.constexpr(-3.4e38)

KEY_SHIFT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low bits of a float32 that values of this type never use."""


@triton.jit
def key_at_least(x, SHIFT: tl.constexpr):
    """The least key, int64, whose unorder is at least x; -inf counts as the least finite number."""
    x = tl.maximum(x, _LEAST)
    key = (to_ordered(x) >> SHIFT).to(tl.int64)
    return key + tl.where(unorder(key, SHIFT) < x, 1, 0)


@triton.jit
def unorder(key, SHIFT: tl.constexpr):
    """The float32 t such that x >= t just where (to_ordered(x) >> SHIFT) >= key."""
    return from_ordered((key << SHIFT).to(tl.int32))


@triton.jit
def _weights(x, reference, scale, COUNT: tl.constexpr):
    """Addend of each logit to F: 1, or its mass in units of that of `reference`."""
    if COUNT:
        w = tl.where(x > float("-inf"), 1.0, 0.0)
    else:
        w = tl.exp2(tl.fma(x, scale, -reference * scale))
    return w


@triton.jit
def row_sums(row, t1, t2, t3, reference, scale, num_ids, COUNT: tl.constexpr, LANES: tl.constexpr,
              WIDTH: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """F at three thresholds, in one pass over the row; a tile is loaded while the one before it is added up. (A
    comparison with NaN is false, so NaN adds nothing.)"""
    index = tile_index(LANES, WIDTH)
    s1 = tl.zeros([LANES], tl.float32)
    s2, s3 = s1, s1
    coming = load_raw(row, index, num_ids)
    for tile in range(TILES):
        x = coming.to(tl.float32)
        coming = load_raw(row, index + (tile + 1) * (LANES * WIDTH), num_ids)
        w = _weights(x, reference, scale, COUNT)
        s1 += tl.sum(tl.where(x >= t1, w, 0.0), 1)
        s2 += tl.sum(tl.where(x >= t2, w, 0.0), 1)
        s3 += tl.sum(tl.where(x >= t3, w, 0.0), 1)
    return tl.sum(s1, 0), tl.sum(s2, 0), tl.sum(s3, 0)


@triton.jit
def _quarters(low, high):
    """Three keys that cut low .. high into four."""
    width = high - low
    quarter, rest = width // 4, width % 4
    key1 = low + tl.maximum(quarter, 1)
    key2 = tl.minimum(low + tl.maximum(2 * quarter + rest // 2, 2), high - 1)
    key3 = tl.minimum(low + tl.maximum(3 * quarter + rest - rest // 2, 3), high - 1)
    return key1, key2, key3


@triton.jit
def _interpolated(low, high, f_low, f_high, target):
    """Three keys about where a straight line from (low, f_low) to (high, f_high) meets the target."""
    width = high - low
    share = (f_low - target) / tl.maximum(f_low - f_high, 1e-30)
    middle = low + (width.to(tl.float32) * tl.minimum(tl.maximum(share, 0.0), 1.0)).to(tl.int64)
    margin = width // 8 + 1
    key2 = tl.minimum(tl.maximum(middle, low + 1), high - 1)
    return tl.maximum(key2 - margin, low + 1), key2, tl.minimum(key2 + margin, high - 1)


@triton.jit
def _guess(x, w, least, first, second, scale):
    """Logits, each `first` and `second` away from the end of a sample's mass w; halving an interval that holds all
    logits that matter is coarse, and enough for a start."""
    high1 = tl.max(tl.max(x, 1), 0)
    low1 = tl.maximum(high1 - 40.0 / scale, least)
    low2, high2 = low1, high1
    for _ in range(10):
        middle1, middle2 = 0.5 * (low1 + high1), 0.5 * (low2 + high2)
        enough1 = tl.sum(tl.sum(tl.where(x >= middle1, w, 0.0), 1), 0) >= first
        enough2 = tl.sum(tl.sum(tl.where(x >= middle2, w, 0.0), 1), 0) >= second
        low1, high1 = tl.where(enough1, middle1, low1), tl.where(enough1, high1, middle1)
        low2, high2 = tl.where(enough2, middle2, low2), tl.where(enough2, high2, middle2)
    return high1, low2


@triton.jit
def search(row, low, high, f_low, target, reference, scale, num_ids, COUNT: tl.constexpr, SHIFT: tl.constexpr,
           LANES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The largest key in [low, high) with F >= target, or low where there is none; F(low) is f_low and F(high) is 0.
    Keys are int64: between two float32 there can be more than an int32 holds."""
    if high - low > 1:
        f_high = f_low * 0.0
        x = load_sample(row, num_ids, LANES, WIDTH)
        w = tl.where(x >= unorder(low, SHIFT), _weights(x, reference, scale, COUNT), 0.0)
        if COUNT:
            expected = target * (LANES * WIDTH) / num_ids
            slack = 3.0 * tl.sqrt(expected) + 2.0
            first, second = expected + slack, tl.maximum(expected - slack, 1.0)
        else:
            mass, share = tl.sum(tl.sum(w, 1), 0), target / f_low
            first, second = mass * tl.minimum(share + 0.01, 1.0), mass * (share - 0.01)
        above, below = _guess(x, w, unorder(low, SHIFT), first, second, scale)
        key1 = tl.minimum(tl.maximum(key_at_least(tl.minimum(above, below), SHIFT), low + 1), high - 1)
        key3 = tl.minimum(tl.maximum(key_at_least(tl.maximum(above, below), SHIFT), key1), high - 1)
        key2 = key1 + (key3 - key1) // 2
        passes = 0
        while high - low > 1:
            t1, t2, t3 = unorder(key1, SHIFT), unorder(key2, SHIFT), unorder(key3, SHIFT)
            f1, f2, f3 = row_sums(row, t1, t2, t3, reference, scale, num_ids, COUNT, LANES, WIDTH, TILES)
            less1, less2, less3 = f1 < target, f2 < target, f3 < target
            high = tl.where(less1, key1, tl.where(less2, key2, tl.where(less3, key3, high)))
            f_high = tl.where(less1, f1, tl.where(less2, f2, tl.where(less3, f3, f_high)))
            low = tl.where(less1, low, tl.where(less2, key1, tl.where(less3, key2, key3)))
            f_low = tl.where(less1, f_low, tl.where(less2, f1, tl.where(less3, f2, f3)))
            if high - low > 1:
                passes += 1
                if (passes <= 4) | (passes % 2 == 0):
                    key1, key2, key3 = _interpolated(low, high, f_low, f_high, target)
                else:
                    key1, key2, key3 = _quarters(low, high)
    return low


@triton.jit
def row_peak(row, num_ids, LANES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):
    """A row's largest logit, float32; NaN counts as -inf."""
    index = tile_index(LANES, WIDTH)
    largest = tl.full([LANES], float("-inf"), tl.float32)
    coming = load_raw(row, index, num_ids)
    for tile in range(TILES):
        x = as_ids(coming)
        coming = load_raw(row, index + (tile + 1) * (LANES * WIDTH), num_ids)
        largest = tl.maximum(largest, tl.max(x, 1))
    return tl.max(largest, 0)
