"""Weights of 4 and 8 bits (W4A16, W8A16): integers, of which a weight is (q - zero) * scale, one scale and zero for
each group of columns, or 4-bit floats (e2m1.py); how they lie in memory, and what they stand for.

Scales of integers have the dtype of x. No weight is rounded: kernels multiply x by the integers q - zero, or by floats
times their scale, and each group's float32 sums by its scale or factor.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.gemm import e2m1
from nanovllm.kernels.gemm.e2m1 import E2M1, MX_GROUP, NV_GROUP, SPAN
from nanovllm.kernels.gemm.unpack import words_of_row
from nanovllm.kernels.plan.config import INT4

INT8 = "bytes"
"""Code of integers of 8 bits. (Triton, when it compiles ahead, takes "int8" for a type.)"""
GROUPS = {INT4: (0, 32, 64, SPAN), INT8: (0, SPAN), E2M1: (NV_GROUP, MX_GROUP)}
"""Columns of a group, by code."""
ZERO = 8
"""Code that stands for 0 in a weight without zeros of its own."""
@dataclass(frozen=True)
class PackedWeight:
    """A weight [n, k], or those of experts, with one dimension more in front.

    words: int16 [ceil(k / 128), n, 32], the columns of a block for each row. code "int4": word i of a block has the
    columns i, i + 32, i + 64, i + 96, the first in its lowest bits; "bytes": of 64 words, i and i + 64; "e2m1": see
    e2m1.words_of. group: columns of one: 32, 64 or 128, or 0: one for all; of "bytes" 0 or 128; of "e2m1" 16 or 32.

    scales: of integers [number of groups, n, 2], scale and zero in the dtype of x, as many groups as the padded columns
    have; of "e2m1" int32 [sets of four groups, n] (e2m1.scales_of). has_zeros: some zero of "int4" may be another than
    8. factors: float32 [n], on the sums of "e2m1": 1, or in groups of 16 NV_FACTOR times the tensor's scale; experts of
    groups of 32 have none.
    """

    words: Tensor
    scales: Tensor
    code: str
    group: int
    has_zeros: bool
    k: int
    factors: Tensor | None = None

    @classmethod
    def empty(
        cls, n: int, k: int, group: int, has_zeros: bool, dtype: torch.dtype, device: torch.device,
        stack: tuple[int, ...] = (), code: str = INT4,
    ) -> "PackedWeight":  # fmt: skip
        """Weight of zeros; stack: dimensions in front of it."""
        check_group(group, code)
        blocks = -(-k // SPAN)
        words = torch.zeros(*stack, blocks, n, words_of_row(code), dtype=torch.int16, device=device)
        if code == E2M1:
            shape = (*stack, blocks * (SPAN // (4 * group)), n)
            has_factors = group == NV_GROUP or not stack
            factors = torch.ones(*stack, n, dtype=torch.float32, device=device) if has_factors else None
            return cls(words, torch.zeros(shape, dtype=torch.int32, device=device), code, group, False, k, factors)
        groups = torch.zeros(*stack, -(-blocks * SPAN // group) if group else 1, n, 2, dtype=dtype, device=device)
        groups[..., 1] = ZERO if code == INT4 else 0
        return cls(words, groups, code, group, has_zeros, k)

    @property
    def n(self) -> int:
        return self.words.shape[-2]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.words.shape[:-3], self.n, self.k))

    def of_expert(self, index: int | None) -> "PackedWeight":
        """The weight of one expert; of None, which there is no more than one of, this."""
        if index is None:
            return self
        factors = None if self.factors is None else self.factors[index]
        return replace(self, words=self.words[index], scales=self.scales[index], factors=factors)

    def widened(self, expert: int | None = None) -> Tensor:
        """The weight [n, k], or of one expert, in float32, without rounding; by plain PyTorch."""
        held = self.of_expert(expert)
        if self.code == E2M1:
            return e2m1.widened(held.words, held.scales, self.group, held.factors)[:, : self.k]
        by_column = held.scales.float().repeat_interleave(self.group or self.k, dim=0)[: self.k]
        scale, zero = by_column.permute(2, 1, 0)
        codes = unpack(held.words, self.k) if self.code == INT4 else unpack_bytes(held.words, self.k)
        return (codes.float() - zero) * scale


def check_group(group: int, code: str = INT4) -> None:
    """Raises ValueError for a size of groups that the kernels do not take."""
    if group not in GROUPS[code]:
        raise ValueError(f"groups of {group} columns of {code}: must be one of {GROUPS[code]}, 0 for all")


def check_fits(x: Tensor, weight: PackedWeight) -> None:
    """Raises ValueError where x is not contiguous [M, k] in the dtype of the scales of integers [n, k]."""
    is_other = weight.code != E2M1 and x.dtype != weight.scales.dtype
    if x.shape[1] != weight.k or is_other or not x.is_contiguous():
        found = f"x {list(x.shape)} of {x.dtype}, strides {x.stride()}"
        raise ValueError(f"{weight.code} weight [{weight.n}, {weight.k}] of {weight.scales.dtype} does not fit {found}")


def pack(codes: Tensor) -> Tensor:
    """uint8 [n, k], numbers of 4 bits -> words [ceil(k / 128), n, 32]; padding is 0."""
    n, k = codes.shape
    blocks = -(-k // SPAN)
    planes = F.pad(codes, (0, blocks * SPAN - k)).view(n, blocks, 4, -1).int()
    words = planes[:, :, 0] | planes[:, :, 1] << 4 | planes[:, :, 2] << 8 | planes[:, :, 3] << 12
    return words.to(torch.int16).transpose(0, 1).contiguous()


def unpack(words: Tensor, k: int) -> Tensor:
    """Inverse of `pack`: words -> uint8 [n, k]."""
    wide = words.transpose(0, 1).int()
    planes = torch.stack([wide >> shift & 15 for shift in (0, 4, 8, 12)], dim=2)
    return planes.flatten(1)[:, :k].to(torch.uint8)


def pack_bytes(codes: Tensor) -> Tensor:
    """int8 [..., k] -> words int16 [..., ceil(k / 128), 64], as `pack` but for the order of dimensions."""
    low, high = F.pad(codes, (0, -codes.shape[-1] % SPAN)).unflatten(-1, (-1, 2, 64)).int().unbind(-2)
    return (low & 255 | high << 8).to(torch.int16)


def unpack_bytes(words: Tensor, k: int) -> Tensor:
    """int8 numbers of words [blocks, n, 64] -> int32 [n, k]."""
    wide = words.transpose(0, 1).int()
    return torch.stack([wide << 24 >> 24, wide >> 8], 2).flatten(1)[:, :k]


def quantize(wide: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """wide [n, k] rounded to 4 bits around a zero of 8, as compressed-tensors does where it is symmetric: codes uint8
    [n, k], scales [n, groups] in `dtype`, a group's largest magnitude / 7.5 (1 where that is 0)."""
    k = wide.shape[1]
    each = group or k
    grouped = F.pad(wide.float(), (0, -k % each)).unflatten(1, (-1, each))
    scales = (grouped.abs().amax(2) / 7.5).to(dtype)
    scales[scales == 0] = 1
    codes = (grouped / scales.float().unsqueeze(2)).round().clamp(-8, 7) + ZERO
    return codes.to(torch.uint8).flatten(1)[:, :k], scales
