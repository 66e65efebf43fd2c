"""Projections by what is fastest for their number of rows (ParallelLinear.few_rows and many_rows).

A step of up to 16 rows reads each weight once and does next to nothing with it: what counts is the number of kernels
and how early each starts reading. The first three functions are one kernel each where their layer has a GemmConfig for
that number of rows, and the separate kernels they stand for where the library was faster; a configuration of any other
kind is ignored in such a step. The other functions are for steps where norm and residual are kernels of their own: more
rows, or several ranks.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from nanovllm.kernels.gemm import cublas_lt, cublas_lt_rule
from nanovllm.kernels.gemm.lt_config import LtConfig

if TYPE_CHECKING:
    from nanovllm.kernels import Kernels
    from nanovllm.kernels.gemm.decode import MidConfig, SplitConfig
    from nanovllm.kernels.gemm.push import Pushed
    from nanovllm.kernels.gemm.skinny import GemmConfig
    from nanovllm.layers.linear import ParallelLinear
    from nanovllm.layers.norm import ReduceAddNorm
    from nanovllm.parallel.peer.all_reduce import PeerAllReduce


def norm_linear(x: torch.Tensor, norm: "ReduceAddNorm", layer: "ParallelLinear") -> torch.Tensor:
    """RMSNorm, then the projection: [T, in] -> [T, out]."""
    config = _fusing(layer, x.shape[0])
    if config is None:
        return F.linear(norm.kernels.rms_norm(x, norm.weight, norm.eps), layer.weight)
    from nanovllm.kernels.gemm import skinny as small_gemm

    return small_gemm.norm_linear(x, norm.weight, norm.eps, layer.weight, config=config)


def norm_linear_silu_mul(x: torch.Tensor, norm: "ReduceAddNorm", layer: "ParallelLinear") -> torch.Tensor:
    """RMSNorm, the gate and up projections, SiLU(gate) * up: [T, in] -> [T, intermediate]."""
    config = _fusing(layer, x.shape[0])
    if config is None:
        return norm.kernels.silu_mul(F.linear(norm.kernels.rms_norm(x, norm.weight, norm.eps), layer.weight))
    from nanovllm.kernels.gemm import skinny as small_gemm

    return small_gemm.norm_linear_silu_mul(x, norm.weight, norm.eps, layer.weight, config=config)


def linear_residual(x: torch.Tensor, layer: "ParallelLinear", residual: torch.Tensor) -> torch.Tensor:
    """residual [T, out] += projection of x [T, in], in place."""
    config = _fusing(layer, x.shape[0])
    if config is None:
        return residual.addmm_(x, layer.weight.t())
    from nanovllm.kernels.gemm import skinny as small_gemm

    return small_gemm.linear_residual(x, layer.weight, residual, config=config)


def _fusing(layer: "ParallelLinear", rows: int) -> "GemmConfig | None":
    config = layer.few_rows.get(rows)
    if config is None:
        return None
    from nanovllm.kernels.gemm.skinny import GemmConfig

    return config if isinstance(config, GemmConfig) else None


def linear(
    x: torch.Tensor, weight: torch.Tensor, config: "GemmConfig | MidConfig | SplitConfig | LtConfig"
) -> torch.Tensor:
    """x [T, in] @ weight [out, in]^T: [T, out], or float32 [parts, T, out], sums over parts of `in`."""
    if isinstance(config, LtConfig):
        return cublas_lt.linear(x, weight, config)
    from nanovllm.kernels.gemm import decode as mid_gemm
    from nanovllm.kernels.gemm import skinny as small_gemm

    if isinstance(config, mid_gemm.SplitConfig):
        return mid_gemm.split_linear(x, weight, config.splits)
    if isinstance(config, mid_gemm.MidConfig):
        return mid_gemm.linear(x, weight, config)
    return small_gemm.linear(x, weight, config=config)


def pushed_linear(
    x: torch.Tensor, weight: torch.Tensor, config: "GemmConfig | MidConfig", sums: "PeerAllReduce"
) -> "Pushed":
    """x [T, in] @ weight [out, in]^T in the places of the next sum of `sums`, which must be given the result."""
    from nanovllm.kernels.gemm import decode as mid_gemm
    from nanovllm.kernels.gemm import skinny as small_gemm

    if isinstance(config, mid_gemm.MidConfig):
        return sums.push(x.shape[0], lambda places: mid_gemm.push_linear(x, weight, places, config))
    return sums.push(x.shape[0], lambda places: small_gemm.push_linear(x, weight, places, config))


def many_rows_linear(x: torch.Tensor, weight: torch.Tensor, config: LtConfig) -> torch.Tensor:
    """x [T, in] @ weight [out, in]^T -> [T, out] by `config` where it suits T, else by what cuBLAS takes."""
    if _suits(x.shape[0], weight.shape, x.dtype, x.device, config):
        return cublas_lt.linear(x, weight, config)
    return F.linear(x, weight)


@lru_cache(1024)
def _suits(rows: int, shape: torch.Size, dtype: torch.dtype, device: torch.device, config: LtConfig) -> bool:
    n, k = shape
    problem = cublas_lt.Problem(rows, n, k, dtype, device)
    return cublas_lt_rule.fills(config, rows, n) and cublas_lt.supports(problem, config)


def linear_silu_mul(x: torch.Tensor, layer: "ParallelLinear", kernels: "Kernels") -> torch.Tensor:
    """The gate and up projections, SiLU(gate) * up: [T, in] -> [T, intermediate]."""
    config = layer.few_rows.get(x.shape[0])
    if config is not None:
        from nanovllm.kernels.gemm import decode as mid_gemm

        if isinstance(config, mid_gemm.MidConfig):
            return mid_gemm.linear_silu_mul(x, layer.weight, config)
    return kernels.silu_mul(layer(x))
