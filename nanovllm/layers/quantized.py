"""Weights in fewer bits than the model's dtype: how a linear layer holds them, and how a checkpoint brings them."""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from nanovllm.kernels.base.device import supports_fp8
from nanovllm.kernels.fp8 import gemm, one_row, specialized
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.reference import BLOCK, FP8
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.layers.int4 import Int4Matrix
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, Scales, Shard, parameter
from nanovllm.model_config import Quantization

_ALIGNMENT = 8
"""Elements; what our kernels ask of the inputs of a layer."""


def column_multiple(quantization: Quantization | None) -> int:
    """Of which a rank's share of a layer's inputs is: ranks that cut within a group of columns would round others."""
    return _ALIGNMENT if quantization is None else BLOCK


_PRODUCTS: dict[str, Callable[..., torch.Tensor | FP8Rows]] = {
    "cpu": gemm.linear_twin,
    "fp8": gemm.linear,
    "widened": gemm.linear_widened,
}


class FP8Matrix(nn.Module):
    """A weight [rows, columns] in e4m3 with float32 scales; x @ weight^T is what kernels/fp8/reference.py says."""

    few_rows = one_row
    """Products of a few rows with what surrounds them, by `for_kernel`."""

    def __init__(
        self, quantization: Quantization, rows: int, columns: int, cuts: Iterable[Cut], num_inputs: int,
        device: torch.device, stack: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """cuts: all ranges that the checkpoint brings. num_inputs: of its tensors, each with a scale of activations
        where these are static. stack: (number of experts,) where there is a matrix for each. Where nothing is loaded
        the weight is zero."""
        super().__init__()
        self.quantization = quantization
        self.in_blocks = quantization.scales == "block"
        self.rows_each = 1
        """Rows that share scales: a whole block, or less where ranges begin elsewhere."""
        if self.in_blocks:
            self.rows_each = math.gcd(BLOCK, *(n for cut in cuts if cut.dim == 0 for n in (cut.place, cut.start)))
        self.runs_on = "cpu" if device.type != "cuda" else "fp8" if supports_fp8(device) else "widened"
        if self.runs_on == "widened" and stack:
            raise ValueError("quantization: FP8 experts need a GPU of compute capability 9.x or 10.x")
        groups = -(-columns // BLOCK) if self.in_blocks else 1
        self.weight = parameter(*stack, rows, columns, dtype=FP8, device=device)
        self.weight.view(torch.uint8).zero_()
        self.scale = parameter(*stack, -(-rows // self.rows_each), groups, dtype=torch.float32, device=device)
        self.scale.fill_(1.0)
        self.input_scale: nn.Parameter | None = None
        if quantization.static_inputs:
            self.input_scale = parameter(num_inputs, dtype=torch.float32, device=device)
            self.input_scale.fill_(1.0)

    def checkpoint_weights(
        self, path: str, shape: tuple[int, int], cuts: tuple[Cut, ...], input_index: int = 0, expert: int | None = None
    ) -> Iterator[CheckpointWeight]:
        """Of the module `path`, a matrix of this shape, of which `cuts` are kept; of one expert, where there are."""
        made, kind = self.quantization, self.quantization.scales
        weight, scale = (held if expert is None else held[expert] for held in (self.weight, self.scale))
        of_cuts = [(cut, self._scales_of(scale, cut)) for cut in cuts]
        shards = tuple(cut.shard(weight, Scales(scales, self.rows_each, self.in_blocks)) for cut, scales in of_cuts)
        if made.while_loading:
            yield CheckpointWeight(f"{path}.weight", shape, shards)
            return
        name = f"{path}.{made.scale_name}"
        of_inputs = (f"{path}.input_scale",) if self.input_scale is not None else ()
        yield CheckpointWeight(f"{path}.weight", shape, shards, scaled_by=(name, *of_inputs))
        if kind == "tensor":
            yield CheckpointWeight(name, (), tuple(Shard(scales, 0, 0) for _, scales in of_cuts), is_scale=True)
        elif kind == "channel":
            rows = tuple(Shard(scales, 0, cut.start if cut.dim == 0 else 0) for cut, scales in of_cuts)
            yield CheckpointWeight(name, (shape[0], 1), rows, is_scale=True)
        else:
            blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
            yield CheckpointWeight(name, blocks, tuple(self._block_shards(of_cuts)), is_scale=True)
        if self.input_scale is not None:
            shard = Shard(self.input_scale[input_index : input_index + 1], 0, 0)
            yield CheckpointWeight(f"{path}.input_scale", (), (shard,), is_scale=True)

    def _scales_of(self, scale: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Of a matrix's scales those of a range."""
        if cut.dim == 0:
            first = cut.place // self.rows_each
            return scale[first : first + -(-cut.length // self.rows_each)]
        first = cut.place // BLOCK
        return scale[:, first : first + -(-cut.length // BLOCK)] if self.in_blocks else scale

    def _block_shards(self, of_cuts: Iterable[tuple[Cut, torch.Tensor]]) -> Iterator[Shard]:
        """Of the checkpoint's scales of blocks, where several of ours may take one's value."""
        for cut, scales in of_cuts:
            if cut.dim == 1 or self.rows_each == BLOCK:
                yield Shard(scales, cut.dim, cut.start // BLOCK)
            else:
                for index, line in enumerate(scales):
                    yield Shard(line[None], 0, (cut.start + index * self.rows_each) // BLOCK)

    def takes(self, config: GemmConfig) -> bool:
        """Whether a tile's rows share their scales, which some kernels ask, and the device has what they need."""
        if self.runs_on == "widened":
            return config.kernel == "library"
        if config.kernel == "specialized":
            return specialized.takes(self.for_kernel(), config)
        return config.kernel != "quantized_row" or not self.in_blocks or self.rows_each % 16 == 0

    def for_kernel(self) -> FP8Weight:
        return FP8Weight(self.weight, self.scale, self.rows_each, self.input_scale)

    @property
    def table_key(self) -> tuple[int, int, str]:
        """(rows, columns, type) of its products in the GEMM table."""
        return (*self.weight.shape, str(self.weight.dtype).removeprefix("torch."))  # type: ignore[return-value]

    @property
    def takes_rounded(self) -> bool:
        """Whoever makes the inputs may round them to e4m3: no scale of this matrix alone is for that, and kernels
        can."""
        return self.input_scale is None and self.runs_on != "widened"

    def matmul(
        self, x: torch.Tensor | FP8Rows, config: GemmConfig, gated: bool = False
    ) -> torch.Tensor | FP8Rows:
        """x [T, columns] -> x @ weight^T [T, rows], or float32 [config.parts, T, rows], sums over parts of columns.
        gated: gates are the first half of the rows; silu(gate) * up, [T, rows / 2], rounded by "specialized"."""
        return _PRODUCTS[self.runs_on](x, self.for_kernel(), config, gated=gated)


def quantized_matrix(
    quantization: Quantization, rows: int, columns: int, pieces: tuple[Piece, ...], dtype: torch.dtype,
    device: torch.device,
) -> FP8Matrix | Int4Matrix:  # fmt: skip
    """An empty weight of a linear layer of `dtype`."""
    if quantization.method == "int4":
        return Int4Matrix(quantization, rows, columns, dtype, device)
    cuts = [cut for piece in pieces for cut in piece.cuts]
    return FP8Matrix(quantization, rows, columns, cuts, len(pieces), device)
