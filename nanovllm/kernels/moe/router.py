"""The router's GEMM: logits in float32, since two experts that tie in bfloat16 would be chosen by their number."""

import torch

from nanovllm.kernels.gemm import fixed_order, fma, tile
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.pointwise.norm import Norm


def router_logits(x: torch.Tensor, weight: torch.Tensor, config: GemmConfig, norm: Norm | None = None) -> torch.Tensor:
    """x [T, H] @ weight [W, H]^T: float32 [parts, T, W], sums over parts of H. norm: of x, which kernels for few rows
    compute."""
    if config.is_skinny:
        return fma.linear(x, weight, config, norm=norm, out_dtype=torch.float32)[None]
    if config.kernel == "tile":
        return tile.linear(x, weight, config)
    if config.kernel == "blocks":
        return fixed_order.linear_in_blocks(x.float(), weight.float(), config)[None]
    if x.is_cuda and x.element_size() == 2:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)[None]
    return (x.float() @ weight.float().t())[None]
