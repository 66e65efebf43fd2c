"""The kernels of experts' products by weights of 4 and 8 bits; packed.py launches them."""

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.stream import add_step, load_steps, no_sums
from nanovllm.kernels.gemm.stream_operands import Walk, columns_of, finish, right
from nanovllm.kernels.gemm.tile import enter_tile, result, store_by_choice, tile_of_rows
from nanovllm.kernels.gemm.unpack import SPAN, add_block, of_expert, words_at, words_of_row


@triton.jit(do_not_specialize=["rows"])
def packed_tile_kernel(
    X, W, SCALES, FACTORS, BIAS, DELTA, TILES, ORDER, WEIGHTS, OUT, rows, n_out, k, factor,
    TOP_K: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, CODE: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    EVEN_K: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """tile_kernel with TILES, for X [T, k], or [T * TOP_K, k] where not GATED, by W, SCALES and FACTORS as
    PackedWeight has them. factor: on the sums of "e2m1" without FACTORS. It is no constant, not even where it is 1: a
    sum that a later product adds to would be waited for."""
    n = n_out * 2 if PAIRED else n_out
    blocks = tl.cdiv(k, SPAN)
    expert, first_row, end_position = tile_of_rows(TILES, GATED, PDL)
    if expert < 0:
        return
    first_col = tl.program_id(0) * BLOCK_N
    OF_ROW: tl.constexpr = words_of_row(CODE)
    W, SCALES = of_expert(W, SCALES, expert.to(tl.int64), n, blocks, CODE, GROUP)
    position, live, choice = enter_tile(W, first_col, n_out, OF_ROW, ORDER, first_row, end_position, GATED, BLOCK_M,
                                        BLOCK_N, 2 * OF_ROW, PDL)  # fmt: skip
    row = choice // TOP_K if GATED else position
    x_ptrs = X + row.to(tl.int64)[:, None] * k
    w_rows = tl.minimum(first_col + tl.arange(0, BLOCK_N), n_out - 1)
    w_ptrs = words_at(W, w_rows, CODE, GROUP)
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    accs = (acc, tl.zeros(acc.shape, dtype=tl.float32)) if PAIRED else (acc,)
    factors = ()
    for half in tl.static_range(len(accs)):
        if FACTORS is None:
            factors = factors + (factor,)
        else:
            factors = factors + (tl.load(FACTORS + expert * n + half * n_out + w_rows)[:, None],)
    for block in tl.range(0, blocks, num_stages=STAGES):
        accs = add_block(accs, w_ptrs, SCALES, w_rows, block, n, n_out, x_ptrs, live, k, factors, X.dtype.element_ty,
                          CODE, GROUP, HAS_ZEROS, EVEN_K, PTX)  # fmt: skip
    acc = result(accs, None, BIAS, expert * n, first_col, n_out, OUT.dtype.element_ty, ALPHA, LIMIT, BLOCK_N, False,
                 False, GATED and not PAIRED, DELTA, position, end_position, ())  # fmt: skip
    cols_out = first_col + tl.arange(0, BLOCK_N)
    store_by_choice(acc, OUT, WEIGHTS, position, live, choice, cols_out, rows, n_out, TOP_K, GATED, False)


@triton.jit
def _x_of_step(x_ptrs, live, step, walk):
    """A step of 8 rows of x at x_ptrs [8, 1, 1], as add_step takes it."""
    block, found = (step * walk.warps + tl.arange(0, walk.warps))[None, :, None], ()
    for piece in tl.static_range(4):
        at = block * SPAN + columns_of(piece, walk)
        found = found + (tl.load(x_ptrs + at, mask=live & (at < walk.k), other=0.0),)
    return right(found)


@triton.jit(do_not_specialize=["rows"])
def packed_stream_kernel(
    X, W, SCALES, FACTORS, BIAS, DELTA, TILES, ORDER, WEIGHTS, OUT, rows, n_out,
    K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    STEPS: tl.constexpr, PRELOAD: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr, PAIRED: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """packed_tile_kernel with grid (tiles of 16 columns, TILES of 8 rows), for X [T, K], or [T * TOP_K, K] where not
    GATED. Weights pass through registers as those of gemm/stream.py do; STEPS, PRELOAD and WARPS are its."""
    HALVES: tl.constexpr = 2 if PAIRED else 1
    walk: tl.constexpr = Walk(CODE, GROUP, HAS_ZEROS, PTX, K, True, WARPS, 8, HALVES)
    expert, first_row, end_position = tile_of_rows(TILES, GATED, PDL)
    if expert < 0:
        return
    expert, first = expert.to(tl.int64), tl.program_id(0) * 16
    words, scales = of_expert(W, SCALES, expert, n_out * HALVES, (K + SPAN - 1) // SPAN, CODE, GROUP)
    tiles = load_steps(words, scales, first, n_out, 0, PRELOAD, walk)
    position = first_row + tl.arange(0, 8)
    choice = tl.load(ORDER + position, mask=position < end_position, other=0, cache_modifier=".cg")
    if PDL and not GATED:
        # Routing ended before the kernel before this one let it start, and weights are always there.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, live = choice // TOP_K if GATED else position, position < end_position
    x_ptrs = X + row.to(tl.int64)[:, None, None] * K
    accs, sums = no_sums(walk), ()
    x = _x_of_step(x_ptrs, live[:, None, None], 0, walk)
    for step in tl.static_range(STEPS):
        now = x
        if step + 1 < STEPS:
            x = _x_of_step(x_ptrs, live[:, None, None], step + 1, walk)
        accs = add_step(accs, tiles, now, (1.0, 1.0), step, X.dtype.element_ty, walk)
        tiles = tiles[HALVES:]
        if step + PRELOAD < STEPS:
            tiles = tiles + load_steps(words, scales, first, n_out, step + PRELOAD, step + PRELOAD + 1, walk)
    for half in tl.static_range(HALVES):
        sums = sums + (finish(accs[half], 8),)
    if FACTORS is not None:
        FACTORS += expert * n_out * HALVES
    y = result(sums, FACTORS, BIAS, expert * n_out * HALVES, first, n_out, OUT.dtype.element_ty, ALPHA, LIMIT, 16,
               False, False, GATED and not PAIRED, DELTA, position, end_position, ())  # fmt: skip
    store_by_choice(y, OUT, WEIGHTS, position, live, choice, first + tl.arange(0, 16), rows, n_out, TOP_K, GATED,
                    False)  # fmt: skip
