"""FP8 products of one row, fused with what surrounds them in a decoder layer; as gemm/skinny.py, and by its rule: no
kernel in flight may write weights."""

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.quantize import quantize_rows
from nanovllm.kernels.fp8.reference import GROUP
from nanovllm.kernels.fp8.row import fp8_row_kernel
from nanovllm.kernels.gemm.choice import GemmConfig
from nanovllm.kernels.pointwise.norm import rms_norm


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: FP8Weight, config: GemmConfig, *, pdl: bool = True
) -> Tensor:
    """rms_norm(x) @ weight^T for x [1, K], norm_weight [K] -> [1, N]."""
    return _launch(x, weight, weight.values.shape[0], None, False, config, pdl, norm_weight, eps)


def norm_linear_silu_mul(
    x: Tensor, norm_weight: Tensor, eps: float, weight: FP8Weight, config: GemmConfig, *, pdl: bool = True
) -> Tensor:
    """silu(gate) * up of rms_norm(x) [1, K] for a weight [2 I, K], gate rows first -> [1, I]."""
    return _launch(x, weight, weight.values.shape[0] // 2, None, True, config, pdl, norm_weight, eps)


def linear(x: Tensor | FP8Rows, weight: FP8Weight, config: GemmConfig, *, pdl: bool = True) -> Tensor:
    """x [1, K] @ weight^T -> [1, N]."""
    return _launch(x, weight, weight.values.shape[0], None, False, config, pdl)


def linear_silu_mul(x: Tensor | FP8Rows, weight: FP8Weight, config: GemmConfig, *, pdl: bool = True) -> Tensor:
    """silu(gate) * up of x [1, K] for a weight [2 I, K], gate rows first -> [1, I]."""
    return _launch(x, weight, weight.values.shape[0] // 2, None, True, config, pdl)


def linear_residual(x: Tensor, weight: FP8Weight, residual: Tensor, config: GemmConfig, *, pdl: bool = True) -> Tensor:
    """residual [1, N] += x [1, K] @ weight^T, rounded before the addition and after it; returns residual."""
    rounded = FP8Rows(*quantize_rows(x, weight.input_scale), x.dtype)  # a kernel of its own takes less time here
    return _launch(rounded, weight, weight.values.shape[0], residual, False, config, pdl)


def _launch(
    x: Tensor | FP8Rows, weight: FP8Weight, n_out: int, residual: Tensor | None, gated: bool, config: GemmConfig,
    pdl: bool, norm_weight: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Returns [1, n_out]: `residual`, or a new tensor. x that is no FP8Rows is rounded, with norm_weight normalised
    first."""
    (rows, k), values, dtype = tuple(x.shape), weight.values, x.dtype
    if rows != 1 or values.shape[1] != k or k % 16:
        raise ValueError(f"x {list(x.shape)}: must have 1 row and fit weight {list(values.shape)}")
    if not values.is_contiguous() or config.block_n != 16 or config.block_k != GROUP * config.num_warps:
        raise ValueError(f"{config}: must take 16 contiguous weight rows, and {GROUP} columns a warp and step")
    if weight.in_blocks and (weight.rows_each % 16 or n_out % 16):
        raise ValueError(f"weight {list(values.shape)}: 16s of rows must share scales, not {weight.rows_each}")
    if isinstance(x, Tensor) and weight.input_scale is not None:
        x = x if norm_weight is None else rms_norm(x, norm_weight, eps)
        x, norm_weight = FP8Rows(*quantize_rows(x, weight.input_scale), dtype), None
    out = torch.empty(1, n_out, dtype=dtype, device=values.device) if residual is None else residual
    steps = triton.cdiv(k, config.block_k)
    x, x_scale, stride = (x, None, 0) if isinstance(x, Tensor) else (x.values, x.scales, x.scales.stride(1))
    fp8_row_kernel[(triton.cdiv(n_out, config.block_n),)](
        x, x_scale, norm_weight, values, weight.scale, out, residual, scale_stride=stride, n_out=n_out,
        groups=weight.scale.shape[1], eps=eps, K=k, STEPS=steps, PRELOAD=min(config.stages, steps),
        ROWS_EACH=weight.rows_each, IN_BLOCKS=weight.in_blocks, EVEN_K=k == steps * config.block_k, GATED=gated,
        WARPS=config.num_warps, num_warps=config.num_warps, **pdl_options(values.device, pdl),
    )  # fmt: skip
    return out
