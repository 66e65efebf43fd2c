"""The kernel of experts' products by weights of 4 and 8 bits; packed.py launches it."""

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.tile import enter_tile, result, tile_of_rows
from nanovllm.kernels.gemm.tile_store import store_by_choice
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
