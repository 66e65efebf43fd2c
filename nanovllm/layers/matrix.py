"""The weight of a linear layer, in the model's dtype or in fewer bits: what it holds, and how x is multiplied by it."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.gemm import dense
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.layers.quantized import FP8Matrix
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, parameter
from nanovllm.model_config import Quantization


class Matrix(Protocol):
    """A weight [rows, columns] of one rank."""

    weight: Any
    """The tensor of one that has one type of numbers."""

    @property
    def type_name(self) -> str:
        """Name of the weight's type in Product.dtype."""
        ...

    @property
    def scale_rows(self) -> int | None:
        """See Product."""
        ...

    def multiply(
        self, x: Any, config: GemmConfig, *, gated: bool = False, **around: Any
    ) -> torch.Tensor | FP8Rows:
        """x [T, columns] -> x @ weight^T [T, rows], or float32 [config.parts, T, rows], sums over parts of columns.
        gated: gates are the first half of the rows; silu(gate) * up, [T, rows / 2], rounded to e4m3 by "roles".
        around: `norm` and `residual` of kernels for few rows (kernels/gemm/skinny.py)."""
        ...

    def checkpoint_weights(
        self, path: str, shape: tuple[int, int], cuts: tuple[Cut, ...], input_index: int = 0
    ) -> Iterator[CheckpointWeight]:
        """The tensors of module `path`, a matrix of this shape, of which `cuts` are kept."""
        ...


class DenseMatrix(nn.Module):
    """A weight [rows, columns] in the dtype of x. Where nothing is loaded it is whatever it was, or zero where the
    checkpoint fills only a part of it."""

    scale_rows = None

    def __init__(
        self, rows: int, columns: int, pieces: tuple[Piece, ...], dtype: torch.dtype, device: torch.device,
        stack: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """stack: see FP8Matrix."""
        super().__init__()
        self.weight = parameter(*stack, rows, columns, dtype=dtype, device=device)
        cuts = [cut for piece in pieces for cut in piece.cuts]
        if sum(cut.length for cut in cuts) < (columns if any(cut.dim for cut in cuts) else rows):
            self.weight.zero_()

    @property
    def type_name(self) -> str:
        return str(self.weight.dtype).removeprefix("torch.")

    def multiply(self, x: torch.Tensor, config: GemmConfig, *, gated: bool = False, **around: Any) -> torch.Tensor:
        """See Matrix."""
        return dense.linear(x, self.weight, config, gated=gated, **around)

    def for_kernel(self) -> torch.Tensor:
        return self.weight

    def checkpoint_weights(
        self, path: str, shape: tuple[int, int], cuts: tuple[Cut, ...], input_index: int = 0, expert: int | None = None
    ) -> Iterator[CheckpointWeight]:
        held = self.weight if expert is None else self.weight[expert]
        yield CheckpointWeight(f"{path}.weight", shape, tuple(cut.shard(held) for cut in cuts))


def experts_of(
    precision: Quantization | None, count: int, rows: int, columns: int, pieces: tuple[Piece, ...], dtype: torch.dtype,
    device: torch.device,
) -> DenseMatrix | FP8Matrix:  # fmt: skip
    """An empty weight [count, rows, columns] of so many experts."""
    if precision is None:
        return DenseMatrix(rows, columns, pieces, dtype, device, (count,))
    return FP8Matrix(precision, rows, columns, pieces, device, (count,))
