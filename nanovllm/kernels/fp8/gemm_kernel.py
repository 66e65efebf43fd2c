"""y = x @ W^T in FP8 on tensor cores: the kernel; gemm.py launches it.

Products are summed by the tensor cores over one group of 128 columns, since these keep some 14 bits while they add
(DeepSeek-V3, arXiv 2412.19437, section 3.5.2); the sums times their scales are added in float32. Operands come by
tensor descriptors, and the weights are the left one where tiles of x are narrow, as in gemm/decode_kernel.py.
"""

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.decode_kernel import silu_mul, store_sums, wait_for_rows


@triton.jit
def _products(x, w, X_LEFT: tl.constexpr):
    """Sums over a group: float32 x @ w^T, or its transpose."""
    return tl.dot(x, w.T, out_dtype=tl.float32) if X_LEFT else tl.dot(w, x.T, out_dtype=tl.float32)


@triton.jit
def add_group(
    acc, x, w, x_scale, SCALE, first, end, group, groups,
    BLOCK_N: tl.constexpr, ROWS_EACH: tl.constexpr, IN_BLOCKS: tl.constexpr, X_LEFT: tl.constexpr,
):  # fmt: skip
    """acc plus the products of a group times both scales; weights are rows `first` and on, before `end`."""
    products = _products(x, w, X_LEFT)
    if IN_BLOCKS:
        if ROWS_EACH % BLOCK_N == 0:
            x_scale *= tl.load(SCALE + first // ROWS_EACH * groups + group, mask=group < groups, other=0.0)
        else:
            row = tl.minimum(first + tl.arange(0, BLOCK_N), end - 1)
            scale = tl.load(SCALE + row // ROWS_EACH * groups + group, mask=group < groups, other=0.0)
            products *= scale[None, :] if X_LEFT else scale[:, None]
    return acc + products * (x_scale[:, None] if X_LEFT else x_scale[None, :])


@triton.jit
def times_rows(acc, SCALE, first, end, BLOCK_N: tl.constexpr, X_LEFT: tl.constexpr):
    """acc times the scales of the weights' rows."""
    scale = tl.load(SCALE + tl.minimum(first + tl.arange(0, BLOCK_N), end - 1))
    return acc * (scale[None, :] if X_LEFT else scale[:, None])


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def fp8_gemm_kernel(
    X, X_SCALE, W, w_ptr, SCALE, out_ptr, rows, scale_stride, n_out, k, groups,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ROWS_EACH: tl.constexpr,
    IN_BLOCKS: tl.constexpr, GATED: tl.constexpr, PARTS: tl.constexpr, X_LEFT: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of weights, splits of K). X, W: descriptors of x [rows, k] and of the weights [n_out,
    k], or [2 n_out, k] where GATED: then a program has BLOCK_N gates and the BLOCK_N ups that belong to them. X_SCALE
    [groups, scale_stride]; SCALE [weight rows / ROWS_EACH, groups] where IN_BLOCKS, else [weight rows]. out [rows,
    n_out]; with PARTS float32 [splits, rows, n_out], a sum for each split.
    """
    split, splits = tl.program_id(2), tl.num_programs(2)
    first_row, first_col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    steps = tl.cdiv(k, BLOCK_K)
    begin, end = steps * split // splits, steps * (split + 1) // splits
    wait_for_rows(w_ptr, first_col, n_out, begin * BLOCK_K, k, BLOCK_N, GATED, PREFETCH, PDL)

    row = first_row + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N] if X_LEFT else [BLOCK_N, BLOCK_M], dtype=tl.float32)
    if GATED:
        up = tl.zeros(acc.shape, dtype=tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        for part in tl.static_range(BLOCK_K // 128):
            group = step * (BLOCK_K // 128) + part
            x = X.load([first_row, group * 128])
            x_scale = tl.load(X_SCALE + group * scale_stride + row, mask=(row < rows) & (group * 128 < k), other=0.0)
            w = W.load([first_col, group * 128])
            acc = add_group(
                acc, x, w, x_scale, SCALE, first_col, n_out, group, groups, BLOCK_N, ROWS_EACH, IN_BLOCKS, X_LEFT
            )
            if GATED:
                w = W.load([n_out + first_col, group * 128])
                up = add_group(
                    up, x, w, x_scale, SCALE, n_out + first_col, 2 * n_out, group, groups,
                    BLOCK_N, ROWS_EACH, IN_BLOCKS, X_LEFT,
                )  # fmt: skip

    if not IN_BLOCKS:
        acc = times_rows(acc, SCALE, first_col, n_out, BLOCK_N, X_LEFT)
        if GATED:
            up = times_rows(up, SCALE, n_out + first_col, 2 * n_out, BLOCK_N, X_LEFT)
    if GATED:
        acc = silu_mul(acc, up, out_ptr.dtype.element_ty)
    store_sums(acc, out_ptr, first_row, first_col, rows, n_out, split, X_LEFT, PARTS)
