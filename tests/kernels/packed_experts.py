"""Weights of 4 and 8 bits from random numbers, each with what it stands for, by definitions of their own."""

import numpy as np
import torch

from nanovllm.kernels.gemm import packed
from nanovllm.kernels.gemm.e2m1 import E2M1, NV_FACTOR, scales_of, words_of
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.kernels.plan.config import INT4

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e4m3(codes: np.ndarray) -> np.ndarray:
    """float64 of bytes without a sign: 4 bits of exponent, 3 of mantissa; exponent 0 is that of numbers below 2^-6."""
    exponent, mantissa = codes.astype(np.int64) >> 3, (codes & 7) / 8
    return np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * np.exp2(exponent - 7.0))


def e2m1(group: int, experts: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers uint8 [experts, n, k / 2], two in a byte; scales uint8 [experts, n, k / group], exponents, or in groups
    of 16 of e4m3; weights float32 [experts, n, k]."""
    random = np.random.default_rng(seed)
    numbers = random.integers(0, 256, (experts, n, k // 2), np.uint8)
    shape = (experts, n, k // group)
    if group == 32:
        scales = random.integers(118, 126, shape, np.uint8)
        of_groups = np.exp2(scales.astype(np.float64) - 127)
    else:
        scales = np.where(random.random(shape) < 0.1, random.integers(0, 8, shape), random.integers(8, 40, shape))
        scales = scales.astype(np.uint8)
        of_groups = e4m3(scales)
    values = E2M1_VALUES[np.stack([numbers & 15, numbers >> 4], -1)].reshape(*shape, group) * of_groups[..., None]
    return torch.from_numpy(numbers), torch.from_numpy(scales), torch.from_numpy(values).float().flatten(2)


def packed_experts(
    code: str, group: int, has_zeros: bool, experts: int, n: int, k: int, dtype: torch.dtype,
    device: torch.device | str = "cpu", seed: int = 0,
) -> tuple[PackedWeight, torch.Tensor]:  # fmt: skip
    """Weights, and what they stand for, float32 [experts, n, k]."""
    generator = torch.Generator().manual_seed(seed)
    if code == E2M1:
        numbers, scales, values = e2m1(group, experts, n, k, seed)
        words, factors = words_of(numbers, group).transpose(1, 2), None
        held = torch.zeros(experts, words.shape[1] * 32 // group, n, dtype=torch.int32)
        held[:, : -(-k // (4 * group))] = scales_of(scales, group).transpose(1, 2)
        if group == 16:
            of_rows = torch.rand(experts, n, generator=generator) + 0.5
            values, factors = values * of_rows[..., None], (of_rows * NV_FACTOR).to(device)
        weight = PackedWeight(words.contiguous().to(device), held.to(device), code, group, False, k, factors)
        return weight, values.to(device)
    padded = -(-k // 128) * 128
    low, high, zero = (0, 16, 8.0) if code == INT4 else (-128, 128, 0.0)
    codes = torch.randint(low, high, (experts, n, k), generator=generator)
    shape = (experts, n, padded // group if group else 1)
    scales = ((torch.rand(shape, generator=generator) * 0.02 + 0.001) / (1 if code == INT4 else 16)).to(dtype).float()
    zeros = torch.randint(0, 16, shape, generator=generator).float() if has_zeros else torch.full(shape, zero)
    column = torch.arange(k) // (group or padded)
    values = (codes.float() - zeros[..., column]) * scales[..., column]
    groups = torch.stack([scales, zeros], -1).transpose(1, 2).to(dtype).contiguous().to(device)
    pack = packed.pack if code == INT4 else lambda each: packed.pack_bytes(each.to(torch.int8)).transpose(0, 1)
    words = torch.stack([pack(each) for each in codes]).to(device).contiguous()
    return PackedWeight(words, groups, code, group, has_zeros, k), values.to(device)
