"""x @ W^T over equal parts of K by cuBLAS.

cuBLAS leaves most of the chip idle where a weight has few rows: of N = 4096 it makes 32 tiles for 132
multiprocessors. Here K is cut into parts, computed side by side, and their float32 sums are handed on as [parts, M,
N] to add + RMSNorm (pointwise/norm.py), which adds them up, in pairs, on its way at next to no cost. No kernel waits
for another's part, so no fence is needed.
"""

from itertools import pairwise

import torch
from torch import Tensor

from nanovllm.kernels.plan.config import GemmConfig


def split_linear(x: Tensor, weight: Tensor, config: GemmConfig) -> Tensor:
    """x [M, K] @ weight [N, K]^T as float32 [split_k, M, N], with config.round_sums in x's dtype, a sum over each of
    config.split_k equal parts of K, by cuBLAS."""
    (rows, k), n, splits = x.shape, weight.shape[0], config.split_k
    part = k // splits
    x_parts = x.view(rows, splits, part).transpose(0, 1)
    weight_parts = weight.view(n, splits, part).permute(1, 2, 0)
    if config.round_sums:
        return torch.bmm(x_parts, weight_parts)
    if x.is_cuda:
        return torch.bmm(x_parts, weight_parts, out_dtype=torch.float32)
    return torch.bmm(x_parts.float(), weight_parts.float())


def split_linear_reference(x: Tensor, weight: Tensor, splits: int) -> Tensor:
    """Plain twin of `split_linear`."""
    return sums_over_parts(x, weight, [x.shape[1] // splits * part for part in range(splits + 1)])


def sums_over_parts(x: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
    """x [M, K] @ weight [N, K]^T over the columns between each two of `ends`, float32 [parts, M, N]."""
    return torch.stack([x[:, a:b].float() @ weight[:, a:b].float().T for a, b in pairwise(ends)])
