"""x @ W^T in FP8, as reference.py defines it: what quantises x, and what multiplies.

Products are summed by the tensor cores over one group of 128 columns, since these keep some 14 bits while they add
(DeepSeek-V3, arXiv 2412.19437, section 3.5.2); the sums times their scales are added in float32. Operands come by
tensor descriptors, and the weights are the left one where tiles of x are narrow, as in gemm/decode.py.
"""


import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options, prefetched_columns
from nanovllm.kernels.base.padded_rows import empty_product, rows_in_memory
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8 import one_row, specialized
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.quantize import ROWS_MULTIPLE, empty_rows_for, quantize_rows
from nanovllm.kernels.fp8.reference import BLOCK, GROUP, linear_reference, quantize_rows_reference, widened_products
from nanovllm.kernels.gemm.decode import PREFETCH_BYTES, silu_mul, store_sums, wait_for_rows
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.pointwise.activation import silu_mul_reference


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


def linear(
    x: Tensor | FP8Rows, weight: FP8Weight, config: GemmConfig, *, gated: bool = False, pdl: bool = True
) -> Tensor | FP8Rows:
    """x [T, K] @ weight^T -> [T, N] in x's dtype; with config.parts > 1 float32 [parts, T, N], sums over parts of K.
    gated: gates are the first N / 2 columns, and the result is silu(gate) * up, [T, N / 2], which "specialized" rounds;
    not by the library."""
    rows, n, device = x.shape[0], weight.values.shape[0], weight.values.device
    n_out = n // 2 if gated else n
    if config.kernel == "quantized_row":
        return one_row.linear(x, weight, config, gated=gated, pdl=pdl)
    if config.kernel == "specialized":
        return specialized.linear(_rounded(x, weight), weight, config, gated=gated, pdl=pdl)
    if config.kernel == "twin":
        return linear_twin(x, weight, config, gated=gated)
    if config.kernel == "widened":
        return linear_widened(x, weight, config, gated=gated)
    if config.kernel == "scaled":
        return library_linear(_rounded(x, weight), weight)
    out = empty_product(rows, n_out, config.split_k, gated, x.dtype, device)
    return _launch(x, weight, config, out, gated=gated, pdl=pdl)


def _rounded(x: Tensor | FP8Rows, weight: FP8Weight) -> FP8Rows:
    if isinstance(x, Tensor):
        return FP8Rows(*quantize_rows(x, weight.input_scale), x.dtype)
    if x.scales.stride(0) == 1 and x.scales.stride(1) % ROWS_MULTIPLE == 0:
        return x
    rows = empty_rows_for(x.shape[0], x.shape[1], x.dtype, x.values.device)  # a twin made it
    rows.values.copy_(x.values)
    rows.scales.copy_(x.scales)
    return rows


def library_linear(x: FP8Rows, weight: FP8Weight) -> Tensor:
    """By cuBLAS: x [T, K], of memory for a multiple of 4 rows -> [T, N]."""
    (rows, k), groups, padded = x.shape, x.scales.shape[1], x.scales.stride(1)
    values, scales = x.values.as_strided((padded, k), (k, 1)), x.scales.as_strided((padded, groups), (1, padded))
    of_weight = weight.scale.t()
    if weight.rows_each != BLOCK:
        of_weight = _scales_of_rows(weight, groups)
    out = torch._scaled_mm(values, weight.values.t(), scale_a=scales, scale_b=of_weight, out_dtype=x.dtype)
    return out[:rows]


def _scales_of_rows(weight: FP8Weight, groups: int) -> Tensor:
    """A scale for each row and group, float32 [groups, N], by one kernel."""
    of_rows = weight.scale.t()  # [groups or 1, N / rows_each]
    if weight.rows_each > 1:
        of_rows = of_rows.repeat_interleave(weight.rows_each, 1)[:, : weight.values.shape[0]]
    return of_rows.expand(groups, -1).contiguous()


def linear_widened(
    x: Tensor | FP8Rows, weight: FP8Weight, config: GemmConfig, *, gated: bool = False
) -> Tensor:
    """`linear` on a GPU that cannot multiply e4m3; slow."""
    y = widened_products(_rounded_plainly(x, weight), weight)
    return silu_mul_reference(y) if gated else y


def linear_twin(x: Tensor | FP8Rows, weight: FP8Weight, config: GemmConfig, *, gated: bool = False) -> Tensor:
    """Plain twin of `linear`, but for parts of K."""
    x = _rounded_plainly(x, weight)
    y = linear_reference(x.values, x.scales, weight.values, weight.scale, weight.rows_each).to(x.dtype)
    return silu_mul_reference(y) if gated else y


def _rounded_plainly(x: Tensor | FP8Rows, weight: FP8Weight) -> FP8Rows:
    return FP8Rows(*quantize_rows_reference(x, weight.input_scale), x.dtype) if isinstance(x, Tensor) else x


def _launch(
    x: Tensor | FP8Rows, weight: FP8Weight, config: GemmConfig, out: Tensor, *, gated: bool, pdl: bool
) -> Tensor:
    """Fills and returns `out` [T, n_out] or float32 [split_k, T, n_out]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    (rows, k), values, n_out = tuple(x.shape), weight.values, out.shape[-1]
    if values.shape[1] != k or k % 16 or not values.is_contiguous():
        raise ValueError(f"weight {list(values.shape)} does not fit x {list(x.shape)}, or K is no multiple of 16")
    if config.block_k % GROUP or config.split_k > triton.cdiv(k, config.block_k):
        raise ValueError(f"{config}: must take steps of {GROUP} columns, and some for each of its parts, K = {k}")
    operand, x_scale, _ = _rounded(x, weight)
    grid = (triton.cdiv(rows, config.block_m), triton.cdiv(n_out, config.block_n), config.split_k)
    readable = min(rows_in_memory(operand), grid[0] * config.block_m)
    fp8_gemm_kernel[grid](
        TensorDescriptor(operand, [readable, k], [k, 1], [config.block_m, GROUP]), x_scale,
        TensorDescriptor(values, list(values.shape), [k, 1], [config.block_n, GROUP]),
        values, weight.scale, out, rows=rows, scale_stride=x_scale.stride(1), n_out=n_out, k=k,
        groups=weight.scale.shape[1], BLOCK_N=config.block_n, BLOCK_M=config.block_m, BLOCK_K=config.block_k,
        STAGES=config.stages, ROWS_EACH=weight.rows_each, IN_BLOCKS=weight.in_blocks, GATED=gated,
        PARTS=config.split_k > 1, X_LEFT=config.block_n < 64 or config.block_m >= 128,
        PREFETCH=prefetched_columns(PREFETCH_BYTES, config.block_n * (2 if gated else 1), 1, k),
        num_warps=config.num_warps, **pdl_options(values.device, pdl and rows <= 256),
    )  # fmt: skip
    return out
