"""x @ W^T by what a GemmConfig names."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.gemm import fixed_order, parts, skinny, tile
from nanovllm.kernels.plan.config import GemmConfig, Kernel


def _library(x: Tensor, weight: Tensor, config: GemmConfig) -> Tensor:
    return F.linear(x, weight)


_BY_KERNEL: dict[Kernel, Callable[[Tensor, Tensor, GemmConfig], Tensor]] = {
    "library": _library,
    "split": parts.split_linear,
    "fma": skinny.linear,
    "tile": tile.linear,
    "blocks": fixed_order.linear_in_blocks,
}


def matmul(x: Tensor, weight: Tensor, config: GemmConfig) -> Tensor:
    """x [M, K] @ weight [N, K]^T in one dtype -> [M, N]; where config.parts > 1 [parts, M, N], sums over parts of K, in
    float32 but for config.round_sums."""
    return _BY_KERNEL[config.kernel](x, weight, config)
