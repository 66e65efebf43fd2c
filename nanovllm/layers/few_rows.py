"""Projections fused with what surrounds them, for steps of a few rows.

A decode step of a few rows reads each weight once and does next to nothing with it: what counts is the number of
kernels and how early each starts reading. Each function here is one kernel where its layer has a configuration for that
number of rows (ParallelLinear.few_rows), and the separate kernels it stands for where the library was faster.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from nanovllm.layers.linear import ParallelLinear
    from nanovllm.layers.norm import ReduceAddNorm


def norm_linear(x: torch.Tensor, norm: "ReduceAddNorm", layer: "ParallelLinear") -> torch.Tensor:
    """RMSNorm, then the projection: [T, in] -> [T, out]."""
    config = layer.few_rows.get(x.shape[0])
    if config is None:
        return F.linear(norm.kernels.rms_norm(x, norm.weight, norm.eps), layer.weight)
    from nanovllm.kernels import small_gemm

    return small_gemm.norm_linear(x, norm.weight, norm.eps, layer.weight, config=config)


def norm_linear_silu_mul(x: torch.Tensor, norm: "ReduceAddNorm", layer: "ParallelLinear") -> torch.Tensor:
    """RMSNorm, the gate and up projections, SiLU(gate) * up: [T, in] -> [T, intermediate]."""
    config = layer.few_rows.get(x.shape[0])
    if config is None:
        return norm.kernels.silu_mul(F.linear(norm.kernels.rms_norm(x, norm.weight, norm.eps), layer.weight))
    from nanovllm.kernels import small_gemm

    return small_gemm.norm_linear_silu_mul(x, norm.weight, norm.eps, layer.weight, config=config)


def linear_residual(x: torch.Tensor, layer: "ParallelLinear", residual: torch.Tensor) -> torch.Tensor:
    """residual [T, out] += projection of x [T, in], in place."""
    config = layer.few_rows.get(x.shape[0])
    if config is None:
        return residual.addmm_(x, layer.weight.t())
    from nanovllm.kernels import small_gemm

    return small_gemm.linear_residual(x, layer.weight, residual, config=config)
