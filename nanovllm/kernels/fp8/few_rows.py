"""FP8 products of a few rows, fused with what surrounds them in a decoder layer; as gemm/skinny.py, and by its rule: no
kernel in flight may write weights."""

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.fp8.fma import LANE_SPAN, fp8_fma_kernel
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.quantize import quantize_rows
from nanovllm.kernels.gemm.choice import SKINNY_ROWS, GemmConfig
from nanovllm.kernels.pointwise.norm import Norm, add_norms_fp8, rms_norm


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: FP8Weight, config: GemmConfig, *, pdl: bool = True
) -> Tensor:
    """rms_norm(x) @ weight^T for x [M <= 16, K], norm_weight [K] -> [M, N]."""
    return linear(_normed(x, norm_weight, eps, weight), weight, config, pdl=pdl)


def norm_linear_silu_mul(
    x: Tensor, norm_weight: Tensor, eps: float, weight: FP8Weight, config: GemmConfig, *, pdl: bool = True
) -> Tensor:
    """silu(gate) * up of rms_norm(x) [M <= 16, K] for a weight [2 I, K], gate rows first -> [M, I]."""
    return linear_silu_mul(_normed(x, norm_weight, eps, weight), weight, config, pdl=pdl)


def linear(x: FP8Rows, weight: FP8Weight, config: GemmConfig, *, pdl: bool = True) -> Tensor:
    """x [M <= 16, K] @ weight^T -> [M, N]."""
    return _launch(x, weight, weight.values.shape[0], None, False, config, pdl)


def linear_silu_mul(x: FP8Rows, weight: FP8Weight, config: GemmConfig, *, pdl: bool = True) -> Tensor:
    """silu(gate) * up of x [M <= 16, K] for a weight [2 I, K], gate rows first -> [M, I]."""
    return _launch(x, weight, weight.values.shape[0] // 2, None, True, config, pdl)


def linear_residual(x: Tensor, weight: FP8Weight, residual: Tensor, config: GemmConfig, *, pdl: bool = True) -> Tensor:
    """residual [M, N] += x [M <= 16, K] @ weight^T, rounded before the addition and after it; returns residual."""
    rounded = FP8Rows(*quantize_rows(x, weight.input_scale), x.dtype)
    return _launch(rounded, weight, weight.values.shape[0], residual, False, config, pdl)


def _normed(x: Tensor, norm_weight: Tensor, eps: float, weight: FP8Weight) -> FP8Rows:
    if weight.input_scale is None:
        return add_norms_fp8(x, None, Norm(norm_weight, eps))[0]
    return FP8Rows(*quantize_rows(rms_norm(x, norm_weight, eps), weight.input_scale), x.dtype)


def _launch(
    x: FP8Rows, weight: FP8Weight, n_out: int, residual: Tensor | None, gated: bool, config: GemmConfig, pdl: bool
) -> Tensor:
    """Returns [M, n_out]: `residual`, or a new tensor."""
    (rows, k), values = tuple(x.shape), weight.values
    if not 1 <= rows <= SKINNY_ROWS or values.shape[1] != k or k % 16:
        raise ValueError(f"x {list(x.shape)}: must have 1 to {SKINNY_ROWS} rows and fit weight {list(values.shape)}")
    if not values.is_contiguous() or config.block_k % LANE_SPAN.value:
        raise ValueError(f"{config}: must take steps of {LANE_SPAN.value} columns of contiguous weights")
    if weight.in_blocks and (weight.rows_each % config.block_n or n_out % config.block_n):
        raise ValueError(f"{config}: a tile must be within {weight.rows_each} rows that share scales")
    out = torch.empty(rows, n_out, dtype=x.dtype, device=values.device) if residual is None else residual
    steps = triton.cdiv(k, config.block_k)
    fp8_fma_kernel[(triton.cdiv(n_out, config.block_n),)](
        x.values, x.scales, values, weight.scale, out, out, rows=rows, scale_stride=x.scales.stride(1), n_out=n_out,
        groups=weight.scale.shape[1], K=k, ROWS=triton.next_power_of_2(rows), BLOCK_N=config.block_n,
        CHUNKS=config.block_k // LANE_SPAN.value, STEPS=steps, PRELOAD=min(config.stages, steps),
        ROWS_EACH=weight.rows_each, IN_BLOCKS=weight.in_blocks, EVEN_K=k == steps * config.block_k,
        EVEN_N=n_out % config.block_n == 0, GATED=gated, RESIDUAL=residual is not None, WARPS=config.num_warps,
        num_warps=config.num_warps, **pdl_options(values.device, pdl),
    )  # fmt: skip
    return out
