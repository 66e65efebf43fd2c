"""Operands in registers of kernels that stream weights of 4 and 8 bits: as stream_operands.py, for each of W groups in
a step a block of 128 columns, as PackedWeight has them.

A lane reads 16 bytes of a weight row, eight words. They are eight neighbours in each of the planes of a block, as which
x is read too, in pieces of 32 columns, so that nothing moves between lanes.
"""

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.stream_operands import left, of_step
from nanovllm.kernels.gemm.unpack import (
    SPAN,
    WORDS,
    e2m1_planes,
    int8_planes,
    load_pair,
    scale_and_zero,
    scale_of_plane,
    unpacked,
    words_of_row,
)


@triton.jit
def _load_rows(w_ptr, scale_ptr, first, end, block, n, walk):
    """Words, tuples of [8, W, 32], and what belongs to their groups, of 8 weight rows from `first` on, past `end` the
    last one again, in the blocks [1, W, 1]. Words are read once, so they go past L1."""
    row = tl.minimum(first + tl.arange(0, 8)[:, None, None], end - 1)
    at, words, scales = block.to(tl.int64) * n + row, (), ()
    OF_ROW: tl.constexpr = words_of_row(walk.code)
    for tile in tl.static_range(OF_ROW // WORDS):
        word = tl.arange(0, WORDS)[None, None, :] + tile * WORDS
        words = words + (tl.load(w_ptr + at * OF_ROW + word, cache_modifier=".cg"),)
    if walk.code == "e2m1":
        RUNS: tl.constexpr = WORDS // walk.group
        run = tl.arange(0, RUNS)[None, None, :]
        scales = (tl.load(scale_ptr + (block * RUNS + run) * n + row),)
    elif walk.group == 0:
        scales = (load_pair(scale_ptr, row + block * 0),)
    else:
        for group in tl.static_range(SPAN // walk.group):
            scales = scales + (load_pair(scale_ptr, (block * (SPAN // walk.group) + group) * n + row),)
    return words, scales


@triton.jit
def load_blocks(w_ptr, scale_ptr, first, n_out, block, walk):
    """Loads a step of a program's 16 weight rows from `first` on, and of the ups that belong to them if there are two
    halves: the blocks [1, W, 1], past the last that again. w_ptr, scale_ptr: one pointer each, or [1, W, 1]."""
    block, tiles = tl.minimum(block, (walk.k - 1) // SPAN), ()
    for half in tl.static_range(walk.halves):
        at, end = half * n_out + first, (half + 1) * n_out
        low = _load_rows(w_ptr, scale_ptr, at, end, block, n_out * walk.halves, walk)
        high = _load_rows(w_ptr, scale_ptr, at + 8, end, block, n_out * walk.halves, walk)
        tiles = tiles + ((low, high),)
    return tiles


@triton.jit
def of_rows(low, high):
    """Numbers of 8 weight rows each, [8, W, 1] -> [W, 16, 1], as sums lie."""
    both = tl.permute(tl.join(low, high), [1, 3, 0, 2])
    return tl.reshape(both, [low.shape[1], 16, 1])


@triton.jit
def _pieces(words, scales, dtype: tl.constexpr, walk):
    """Four pieces of 32 columns, [8, W, 32] in `dtype`: numbers of e2m1 times their scales, integers without."""
    if walk.code == "bytes":
        first, second = int8_planes(words[0], dtype, walk.ptx), int8_planes(words[1], dtype, walk.ptx)
        return first[0], second[0], first[1], second[1]
    elif walk.code == "e2m1":
        planes, found = e2m1_planes(words[0], dtype, walk.ptx), ()
        for plane in tl.static_range(4):
            scale = scale_of_plane(scales[0], plane, walk.group, dtype, walk.ptx)
            if walk.group < WORDS:
                of_runs = tl.broadcast_to(scale[:, :, :, None], [8, scale.shape[1], WORDS // walk.group, walk.group])
                scale = tl.reshape(of_runs, planes[plane].shape)
            found = found + ((planes[plane] * scale).to(dtype),)
        return found
    else:
        planes, found = unpacked(words[0], dtype, walk.ptx), ()
        for plane in tl.static_range(4):
            _, zero = scale_and_zero(scales[plane * len(scales) // 4], dtype, walk.has_zeros, walk.ptx)
            found = found + (planes[plane] - zero,)
        return found


@triton.jit
def add_packed(acc, tile, x, factor, step: tl.constexpr, dtype: tl.constexpr, walk):
    """acc [W, 16, 8] plus, in the columns of this step, the products of load_blocks' tile and x, four pieces [W, 32,
    8], times `factor`: a number, or [W, 16 or 1, 1]. Sums begin anew for each group of integers, and for each block.
    """
    GROUPS: tl.constexpr = SPAN // walk.group if walk.code != "e2m1" and walk.group else 1
    counts = of_step(step, walk)
    low, high = tile
    of_low, of_high = _pieces(low[0], low[1], dtype, walk), _pieces(high[0], high[1], dtype, walk)
    for group in tl.static_range(GROUPS):
        products = tl.zeros(acc.shape, tl.float32)
        for piece in tl.static_range(4 // GROUPS * group, 4 // GROUPS * (group + 1)):
            products = tl.dot(left(of_low[piece], of_high[piece]), x[piece], products, input_precision="ieee")
        scaled = factor
        if walk.code != "e2m1":
            scale, _ = scale_and_zero(low[1][group], dtype, False, walk.ptx)
            second, _ = scale_and_zero(high[1][group], dtype, False, walk.ptx)
            scaled = of_rows(scale, second).to(tl.float32) * factor
        acc += products * tl.where(counts, scaled, 0.0)
    return acc
