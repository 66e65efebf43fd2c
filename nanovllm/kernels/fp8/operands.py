"""Operands of the FP8 kernels."""

from typing import NamedTuple

import torch
from torch import Tensor


class FP8Weight(NamedTuple):
    """A weight that x is multiplied by."""

    values: Tensor
    """e4m3 [N, K], or [experts, N, K]."""
    scale: Tensor
    """float32 [N / rows_each, groups of K], or [N, 1]; of experts [experts, ...]."""
    rows_each: int = 1
    input_scale: Tensor | None = None
    """float32 [count]: the largest is the scale of all activations; None: these are measured."""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def in_blocks(self) -> bool:
        """Scales change along K."""
        return self.scale.shape[-1] > 1 or self.rows_each > 1


class FP8Rows(NamedTuple):
    """Activations that the kernel which made them has rounded."""

    values: Tensor
    """e4m3 [T, K]"""
    scales: Tensor
    """float32 [T, groups of 128]"""
    dtype: torch.dtype
    """Dtype that the rows were rounded from, and that a product of them has."""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


def values_of(weight: Tensor | FP8Weight) -> Tensor:
    """A weight [N, K], or [experts, N, K], without its scales: e4m3 of an FP8Weight, else as it is."""
    return weight if isinstance(weight, Tensor) else weight.values
