"""FP8 products of a few rows, fused with what surrounds them in a decoder layer; as gemm/skinny.py, and by its rule: no
kernel in flight may write weights."""

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.fp8.fma import LANE_SPAN, fp8_fma_kernel
from nanovllm.kernels.fp8.operands import FP8Weight
from nanovllm.kernels.gemm.choice import SKINNY_ROWS, GemmConfig


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: FP8Weight, config: GemmConfig, *, pdl: bool = True
) -> Tensor:
    """rms_norm(x) @ weight^T for x [M <= 16, K], norm_weight [K] -> [M, N]."""
    return _launch(x, weight, weight.values.shape[0], norm_weight, eps, None, False, config, pdl)


def norm_linear_silu_mul(
    x: Tensor, norm_weight: Tensor, eps: float, weight: FP8Weight, config: GemmConfig, *, pdl: bool = True
) -> Tensor:
    """silu(gate) * up of rms_norm(x) [M <= 16, K] for a weight [2 I, K], gate rows first -> [M, I]."""
    return _launch(x, weight, weight.values.shape[0] // 2, norm_weight, eps, None, True, config, pdl)


def linear(x: Tensor, weight: FP8Weight, config: GemmConfig, *, pdl: bool = True) -> Tensor:
    """x [M <= 16, K] @ weight^T -> [M, N]."""
    return _launch(x, weight, weight.values.shape[0], None, 0.0, None, False, config, pdl)


def linear_residual(x: Tensor, weight: FP8Weight, residual: Tensor, config: GemmConfig, *, pdl: bool = True) -> Tensor:
    """residual [M, N] += x [M <= 16, K] @ weight^T, rounded before the addition and after it; returns residual."""
    return _launch(x, weight, weight.values.shape[0], None, 0.0, residual, False, config, pdl)


def _launch(
    x: Tensor, weight: FP8Weight, n_out: int, norm_weight: Tensor | None, eps: float, residual: Tensor | None,
    gated: bool, config: GemmConfig, pdl: bool,
) -> Tensor:  # fmt: skip
    """Returns [M, n_out]: `residual`, or a new tensor."""
    (rows, k), values = x.shape, weight.values
    if not 1 <= rows <= SKINNY_ROWS or values.shape[1] != k or k % 16:
        raise ValueError(f"x {list(x.shape)}: must have 1 to {SKINNY_ROWS} rows and fit weight {list(values.shape)}")
    if not (x.is_contiguous() and values.is_contiguous()) or config.block_k % LANE_SPAN.value:
        raise ValueError(f"{config}: must take steps of {LANE_SPAN.value} columns of contiguous tensors")
    if weight.in_blocks and (weight.rows_each % config.block_n or n_out % config.block_n):
        raise ValueError(f"{config}: a tile must be within {weight.rows_each} rows that share scales")
    out = torch.empty(rows, n_out, dtype=x.dtype, device=x.device) if residual is None else residual
    steps, static = triton.cdiv(k, config.block_k), weight.input_scale
    fp8_fma_kernel[(triton.cdiv(n_out, config.block_n),)](
        x, x if norm_weight is None else norm_weight, x if static is None else static, values, weight.scale, out, out,
        rows=rows, n_out=n_out, eps=eps, groups=weight.scale.shape[1],
        K=k, ROWS=triton.next_power_of_2(rows), BLOCK_N=config.block_n, CHUNKS=config.block_k // LANE_SPAN.value,
        STEPS=steps, PRELOAD=min(config.stages, steps), ROWS_EACH=weight.rows_each, IN_BLOCKS=weight.in_blocks,
        EVEN_K=k == steps * config.block_k, EVEN_N=n_out % config.block_n == 0,
        COUNT=0 if static is None else static.numel(), NORM=norm_weight is not None, GATED=gated,
        RESIDUAL=residual is not None, WARPS=config.num_warps, num_warps=config.num_warps,
        **pdl_options(x.device, pdl),
    )  # fmt: skip
    return out
