"""The weight of a linear layer, in the model's dtype or in fewer bits: what it holds, and how x is multiplied by it."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.gemm import dense
from nanovllm.kernels.moe import linear as experts
from nanovllm.kernels.plan.plan import Launch
from nanovllm.layers.step import Call
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, parameter


class Weight(Protocol):
    """A weight [rows, columns] of one rank, or of each expert [experts, rows, columns]. Nobody else knows which kernels
    multiply by it."""

    weight: Any
    """The tensor of one that has one type of numbers."""
    scale_rows: int | None
    """See Product."""
    has_static_inputs: bool
    """See Product."""

    @property
    def type_name(self) -> str:
        """Name of the weight's type in Product.dtype."""
        ...

    def multiply(self, x: Any, launch: Launch, call: Call) -> torch.Tensor | FP8Rows:
        """x [T, columns] -> x @ weight^T [T, rows], or [launch.config.parts, T, rows], sums over parts of columns;
        with what the launch says that its kernel computes besides (Call.around), rounded to e4m3 by "roles". By weights
        of experts as kernels/moe/linear.py says."""
        ...

    def checkpoint_weights(
        self, path: str, shape: tuple[int, int], cuts: tuple[Cut, ...], input_index: int = 0
    ) -> Iterator[CheckpointWeight]:
        """The tensors of module `path`, a matrix of this shape, of which `cuts` are kept."""
        ...


class DenseMatrix(nn.Module):
    """A weight [rows, columns] in the dtype of x. Where nothing is loaded it is whatever it was, or zero where the
    checkpoint fills only a part of it."""

    scale_rows: int | None = None
    has_static_inputs = False

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

    def multiply(self, x: torch.Tensor, launch: Launch, call: Call) -> torch.Tensor | FP8Rows:
        """See Weight."""
        weight = self.weight
        if weight.dim() == 3:
            return experts.linear(x, weight, launch.config, call.routing, **call.around(launch))
        return dense.linear(x, weight, launch.config, **call.around(launch))

    def checkpoint_weights(
        self, path: str, shape: tuple[int, int], cuts: tuple[Cut, ...], input_index: int = 0, expert: int | None = None
    ) -> Iterator[CheckpointWeight]:
        held = self.weight if expert is None else self.weight[expert]
        yield CheckpointWeight(f"{path}.weight", shape, tuple(cut.shard(held) for cut in cuts))
