"""What every layer of one rank is built with, and what passes between its blocks."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from nanovllm.kernels import Kernels
from nanovllm.kernels.plan.plan import Planner
from nanovllm.parallel.group import TensorParallelGroup


@dataclass(frozen=True)
class LayerContext:
    """The same for all layers."""

    group: TensorParallelGroup
    kernels: Kernels
    dtype: torch.dtype
    """Of activations, and of weights that are not quantised."""
    device: torch.device
    planner: Planner = field(default_factory=Planner, kw_only=True)
    """Says which kernel multiplies."""


class Stream(NamedTuple):
    """The residual stream between two blocks: residual + partial, of which either may not be there."""

    residual: torch.Tensor | None
    """[T, hidden]. With several ranks, rows of it may be another's, or missing."""
    partial: torch.Tensor | None = None
    """What is still to be added: [T, hidden], or [parts, T, hidden] whose sum it is; with several ranks this rank's
    addend."""
    is_early: bool = False
    """The kernel that computes `partial` lets the next one start early (Launch.is_early)."""

    @property
    def num_rows(self) -> int:
        found = self.residual if self.partial is None else self.partial
        assert found is not None
        return found.shape[-2]
