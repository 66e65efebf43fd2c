"""Experts of 4 bits from random numbers, each with the weights that it stands for, by definitions of their own."""

import numpy as np
import torch

from nanovllm.kernels.gemm import int4
from nanovllm.kernels.moe.packed import E2M1, PackedExperts, scales_of, words_of
from nanovllm.kernels.plan.config import INT4

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mxfp4(experts: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """blocks uint8 [experts, n, k / 32, 16], exponents uint8 [experts, n, k / 32], weights float32 [experts, n, k]."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (experts, n, k // 32, 16), np.uint8)
    exponents = random.integers(118, 126, (experts, n, k // 32), np.uint8)
    numbers = E2M1_VALUES[np.stack([blocks & 15, blocks >> 4], -1)].reshape(experts, n, k // 32, 32)
    values = numbers * np.exp2(exponents.astype(np.float64) - 127)[..., None]
    return torch.from_numpy(blocks), torch.from_numpy(exponents), torch.from_numpy(values).float().flatten(2)


def packed_experts(
    code: str, group: int, has_zeros: bool, experts: int, n: int, k: int, dtype: torch.dtype,
    device: torch.device | str = "cpu", seed: int = 0,
) -> tuple[PackedExperts, torch.Tensor]:  # fmt: skip
    """Weights, and what they stand for, float32 [experts, n, k]."""
    if code == E2M1:
        blocks, exponents, values = mxfp4(experts, n, k, seed)
        words, scales = words_of(blocks).transpose(1, 2), scales_of(exponents).transpose(1, 2)
        weight = PackedExperts(words.contiguous().to(device), scales.contiguous().to(device), code, 32, False, k)
        return weight, values.to(device)
    assert code == INT4
    generator = torch.Generator().manual_seed(seed)
    padded = -(-k // 128) * 128
    codes = torch.randint(0, 16, (experts, n, k), generator=generator, dtype=torch.uint8)
    shape = (experts, n, padded // group if group else 1)
    scales = (torch.rand(shape, generator=generator) * 0.02 + 0.001).to(dtype).float()
    zeros = torch.randint(0, 16, shape, generator=generator).float() if has_zeros else torch.full(shape, 8.0)
    column = torch.arange(k) // (group or padded)
    values = (codes.float() - zeros[..., column]) * scales[..., column]
    groups = torch.stack([scales, zeros], -1).transpose(1, 2).to(dtype).contiguous().to(device)
    words = torch.stack([int4.pack(each) for each in codes]).to(device)
    return PackedExperts(words, groups, code, group, has_zeros, k), values.to(device)
