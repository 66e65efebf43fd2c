"""Context that the layers and the model of one rank are built with, and the stream that passes between their blocks."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nanovllm.kernels import Kernels
from nanovllm.kernels.plan.plan import Planner
from nanovllm.kernels.plan.product import Around
from nanovllm.layers.adapted import AdaptedMatrix, AdapterRoom
from nanovllm.layers.matrix import DenseMatrix, Weight
from nanovllm.layers.packed import PackedMatrix
from nanovllm.layers.quantized import FP8Matrix
from nanovllm.layers.step import Call
from nanovllm.layers.weights import Piece
from nanovllm.model_config import ModelConfig, Quantization
from nanovllm.parallel.group import TensorParallelGroup

__all__ = ["Around", "Call", "LayerContext", "ModelContext", "Stream"]
"""Names that a layer is built with and called with."""


@dataclass(frozen=True)
class LayerContext:
    """Context shared by all layers of one rank."""

    group: TensorParallelGroup
    kernels: Kernels
    dtype: torch.dtype
    """Dtype of activations, and of weights that are not quantised."""
    device: torch.device
    planner: Planner = field(default_factory=Planner, kw_only=True)
    """Says which kernel multiplies."""
    adapters: AdapterRoom | None = field(default=None, kw_only=True)
    """Memory for adapters of the linear layers; None: they take none."""

    def matrix(
        self, precision: Quantization | None, rows: int, columns: int, pieces: tuple[Piece, ...],
        stack: tuple[int, ...] = (),
    ) -> Weight:  # fmt: skip
        """An empty weight [rows, columns] of a linear layer, for which rows may have adapters; `precision` None: of
        `dtype`. stack: (number of experts,) where each has one."""
        types = self.dtype, self.device, stack
        found: Weight
        if precision is None:
            found = DenseMatrix(rows, columns, pieces, *types)
        elif precision.method == "fp8":
            found = FP8Matrix(precision, rows, columns, pieces, self.device, stack)
        else:
            found = PackedMatrix(precision, rows, columns, *types)
        if self.adapters is None:
            return found
        adapted: Any = AdaptedMatrix(found, self.kernels, self.adapters, (rows, columns), pieces, *types)
        return adapted  # type: ignore[no-any-return]  # its properties are those of a Weight, and cannot be set


@dataclass(frozen=True)
class ModelContext(LayerContext):
    """Context that a model is built with on one rank."""

    config: ModelConfig
    max_model_len: int


class Stream(NamedTuple):
    """The residual stream between two blocks: residual + partial, of which either may not be there."""

    residual: torch.Tensor | None
    """[T, hidden]; None: there is only `partial`. With several ranks, rows of it may be another's, or missing."""
    partial: torch.Tensor | None = None
    """Addend not yet in the residual: [T, hidden], or [parts, T, hidden] whose sum it is; with several ranks this
    rank's share of the sum."""
    is_early: bool = False
    """The kernel that computes `partial` lets the next one start early (Launch.is_early)."""

    @property
    def num_rows(self) -> int:
        found = self.residual if self.partial is None else self.partial
        assert found is not None
        return found.shape[-2]

    def of(self, wanted: torch.Tensor | None) -> "Stream":
        """The stream of these tokens alone, int [N]; None: all."""
        if wanted is None:
            return self
        residual, partial = (
            None if each is None else each.index_select(-2, wanted) for each in (self.residual, self.partial)
        )
        return Stream(residual, partial)
