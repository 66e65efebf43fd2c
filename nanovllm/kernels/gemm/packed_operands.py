"""Operands in registers of kernels that stream weights of 4 and 8 bits: as stream_operands.py, for each of W groups in
a step a block of 128 columns, as PackedWeight has them.

A lane reads 16 bytes of a weight row, eight words. They are eight neighbours in each of the planes of a block, as which
x is read too, in pieces of 32 columns, so that nothing moves between lanes.
"""

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.stream_operands import left, steps_of
from nanovllm.kernels.gemm.unpack import (
    SPAN,
    WORDS,
    e2m1_planes,
    int8_planes,
    load_pair,
    scale_and_zero,
    scale_of_plane,
    unpacked,
)


@triton.jit
def _load_rows(w_ptr, scale_ptr, first, end, block, n, CODE: tl.constexpr, GROUP: tl.constexpr):
    """Words, tuples of [8, W, 32], and what belongs to their groups, of 8 weight rows from `first` on, past `end` the
    last one again, in the blocks [1, W, 1]. Words are read once, so they go past L1."""
    row = tl.minimum(first + tl.arange(0, 8)[:, None, None], end - 1)
    at, words, scales = block.to(tl.int64) * n + row, (), ()
    TILES: tl.constexpr = 2 if CODE == "bytes" else 1
    for tile in tl.static_range(TILES):
        word = tl.arange(0, WORDS)[None, None, :] + tile * WORDS
        words = words + (tl.load(w_ptr + at * (TILES * WORDS) + word, cache_modifier=".cg"),)
    if CODE == "e2m1":
        RUNS: tl.constexpr = WORDS // GROUP
        run = tl.arange(0, RUNS)[None, None, :]
        scales = (tl.load(scale_ptr + (block * RUNS + run) * n + row),)
    elif GROUP == 0:
        scales = (load_pair(scale_ptr, row + block * 0),)
    else:
        for group in tl.static_range(SPAN // GROUP):
            scales = scales + (load_pair(scale_ptr, (block * (SPAN // GROUP) + group) * n + row),)
    return words, scales


@triton.jit
def load_blocks(
    w_ptr, scale_ptr, first, n_out, block, last, n, HALVES: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Loads a step of a program's 16 weight rows from `first` on, and of the ups that belong to them if HALVES is 2:
    the blocks [1, W, 1], past the `last` that again. w_ptr, scale_ptr: one pointer each, or [1, W, 1]."""
    block, tiles = tl.minimum(block, last), ()
    for half in tl.static_range(HALVES):
        at, end = half * n_out + first, (half + 1) * n_out
        low = _load_rows(w_ptr, scale_ptr, at, end, block, n, CODE, GROUP)
        high = _load_rows(w_ptr, scale_ptr, at + 8, end, block, n, CODE, GROUP)
        tiles = tiles + ((low, high),)
    return tiles


@triton.jit
def of_expert(W, SCALES, expert, n, BLOCKS: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr):
    """Pointers to words and scales of experts int64: one, or [1, W, 1]."""
    OF_ROW: tl.constexpr = 2 * WORDS if CODE == "bytes" else WORDS
    SETS: tl.constexpr = 1 if GROUP == 0 else BLOCKS * (WORDS // GROUP if CODE == "e2m1" else SPAN // GROUP)
    return W + expert * (BLOCKS * OF_ROW) * n, SCALES + expert * (SETS if CODE == "e2m1" else 2 * SETS) * n


@triton.jit
def of_rows(low, high):
    """Numbers of 8 weight rows each, [8, W, 1] -> [W, 16, 1], as sums lie."""
    both = tl.permute(tl.join(low, high), [1, 3, 0, 2])
    return tl.reshape(both, [low.shape[1], 16, 1])


@triton.jit
def _pieces(
    words, scales, dtype: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Four pieces of 32 columns, [8, W, 32] in `dtype`: numbers of e2m1 times their scales, integers without."""
    if CODE == "bytes":
        first, second = int8_planes(words[0], dtype, PTX), int8_planes(words[1], dtype, PTX)
        return first[0], second[0], first[1], second[1]
    elif CODE == "e2m1":
        planes, found = e2m1_planes(words[0], dtype, PTX), ()
        for plane in tl.static_range(4):
            scale = scale_of_plane(scales[0], plane, GROUP, dtype, PTX)
            if GROUP < WORDS:
                of_runs = tl.broadcast_to(scale[:, :, :, None], [8, scale.shape[1], WORDS // GROUP, GROUP])
                scale = tl.reshape(of_runs, planes[plane].shape)
            found = found + ((planes[plane] * scale).to(dtype),)
        return found
    else:
        planes, found = unpacked(words[0], dtype, PTX), ()
        for plane in tl.static_range(4):
            _, zero = scale_and_zero(scales[plane * len(scales) // 4], dtype, HAS_ZEROS, PTX)
            found = found + (planes[plane] - zero,)
        return found


@triton.jit
def add_blocks(
    accs, tiles, x, factors, step: tl.constexpr, ROWS: tl.constexpr, dtype: tl.constexpr, CODE: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Each of accs [W, 16, 8] plus, in the columns of this step, the products of load_blocks' tile and x, four pieces
    [W, 32, 8], times its factor: a number, or [W, 16 or 1, 1]. Sums begin anew for each group of integers, and for each
    block."""
    GROUPS: tl.constexpr = SPAN // GROUP if CODE != "e2m1" and GROUP else 1
    counts, added = steps_of(0, ROWS)[None, None, :] == step % (8 // ROWS), ()
    for half in tl.static_range(len(accs)):
        low, high = tiles[half][0], tiles[half][1]
        of_low = _pieces(low[0], low[1], dtype, CODE, GROUP, HAS_ZEROS, PTX)
        of_high = _pieces(high[0], high[1], dtype, CODE, GROUP, HAS_ZEROS, PTX)
        acc = accs[half]
        for group in tl.static_range(GROUPS):
            products = tl.zeros(acc.shape, tl.float32)
            for piece in tl.static_range(4 // GROUPS * group, 4 // GROUPS * (group + 1)):
                products = tl.dot(left(of_low[piece], of_high[piece]), x[piece], products, input_precision="ieee")
            factor = factors[half]
            if CODE != "e2m1":
                scale, _ = scale_and_zero(low[1][group], dtype, False, PTX)
                second, _ = scale_and_zero(high[1][group], dtype, False, PTX)
                factor = of_rows(scale, second).to(tl.float32) * factor
            acc += products * tl.where(counts, factor, 0.0)
        added = added + (acc,)
    return added
