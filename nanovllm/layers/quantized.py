"""Weights in fewer bits than the model's dtype: how a linear layer holds them, and how a checkpoint brings them."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from nanovllm.kernels.fp8 import gemm
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.reference import BLOCK, FP8
from nanovllm.kernels.moe import linear as experts
from nanovllm.kernels.plan.config import FP8 as FP8_NAME
from nanovllm.kernels.plan.plan import Launch
from nanovllm.layers.step import Call
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, Scales, Shard, parameter
from nanovllm.model_config import Quantization

_ALIGNMENT = 8
"""Elements; what our kernels ask of the inputs of a layer."""


def aligned(size: int) -> int:
    """The size with padding at its end, as our kernels ask."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def column_multiple(quantization: Quantization | None, ranks: int = 0) -> int:
    """Multiple that a rank's share of a layer's inputs must be: ranks that cut within a group of columns would round
    otherwise. One rank cuts nothing, and weights of 4 bits pad their columns themselves."""
    is_whole = ranks == 1 and quantization is not None and quantization.method != "fp8"
    return _ALIGNMENT if quantization is None or is_whole else BLOCK


def has_measured_inputs(quantization: Quantization | None) -> bool:
    """Whether rows in e4m3 have scales that are measured, so that whoever makes them may round them."""
    return quantization is not None and quantization.method == "fp8" and not quantization.static_inputs


class FP8Matrix(nn.Module):
    """A weight [rows, columns] in e4m3 with float32 scales; x @ weight^T is what kernels/fp8/reference.py says."""

    type_name = FP8_NAME

    def __init__(
        self, quantization: Quantization, rows: int, columns: int, pieces: tuple[Piece, ...], device: torch.device,
        stack: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """pieces: all that the checkpoint brings, each with a scale of activations where these are static. stack:
        (number of experts,) where there is a matrix for each. Where nothing is loaded the weight is zero."""
        super().__init__()
        cuts = [cut for piece in pieces for cut in piece.cuts]
        self.quantization = quantization
        self.in_blocks = quantization.scales == "block"
        self.rows_each = 1
        """Rows that share scales: a whole block, or less where ranges begin elsewhere."""
        if self.in_blocks:
            self.rows_each = math.gcd(BLOCK, *(n for cut in cuts if cut.dim == 0 for n in (cut.place, cut.start)))
        self.scale_rows = self.rows_each if self.in_blocks else None
        self.has_static_inputs = quantization.static_inputs
        groups = -(-columns // BLOCK) if self.in_blocks else 1
        self.weight = parameter(*stack, rows, columns, dtype=FP8, device=device)
        self.weight.view(torch.uint8).zero_()
        self.scale = parameter(*stack, -(-rows // self.rows_each), groups, dtype=torch.float32, device=device)
        self.scale.fill_(1.0)
        self.input_scale: nn.Parameter | None = None
        if quantization.static_inputs:
            self.input_scale = parameter(len(pieces), dtype=torch.float32, device=device)
            self.input_scale.fill_(1.0)

    def checkpoint_weights(
        self, path: str, shape: tuple[int, int], cuts: tuple[Cut, ...], input_index: int = 0, expert: int | None = None
    ) -> Iterator[CheckpointWeight]:
        """Checkpoint tensors of the module `path`, a matrix of this shape of which `cuts` are kept; `expert`: its
        number, if there are several."""
        made, kind = self.quantization, self.quantization.scales
        weight, scale = (held if expert is None else held[expert] for held in (self.weight, self.scale))
        of_cuts = [(cut, self._scales_of(scale, cut)) for cut in cuts]
        shards = tuple(cut.shard(weight, Scales(scales, self.rows_each, self.in_blocks)) for cut, scales in of_cuts)
        if made.while_loading:
            yield CheckpointWeight(f"{path}.weight", shape, shards)
            return
        name = f"{path}.weight_scale"
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
        """View of the scales of one range of a matrix."""
        if cut.dim == 0:
            first = cut.place // self.rows_each
            return scale[first : first + -(-cut.length // self.rows_each)]
        first = cut.place // BLOCK
        return scale[:, first : first + -(-cut.length // BLOCK)] if self.in_blocks else scale

    def _block_shards(self, of_cuts: Iterable[tuple[Cut, torch.Tensor]]) -> Iterator[Shard]:
        """Shards of the checkpoint's block scales; several of our scales may take the value of one of its."""
        for cut, scales in of_cuts:
            if cut.dim == 1 or self.rows_each == BLOCK:
                yield Shard(scales, cut.dim, cut.start // BLOCK)
            else:
                for index, line in enumerate(scales):
                    yield Shard(line[None], 0, (cut.start + index * self.rows_each) // BLOCK)

    def for_kernel(self) -> FP8Weight:
        return FP8Weight(self.weight, self.scale, self.rows_each, self.input_scale)

    def multiply(self, x: torch.Tensor | FP8Rows, launch: Launch, call: Call) -> torch.Tensor | FP8Rows:
        """See Weight."""
        if self.weight.dim() == 3:
            around, config = call.around(launch), launch.config
            return experts.linear(x, self.for_kernel(), config, call.routing, rounds=launch.rounds, **around)
        return gemm.linear(x, self.for_kernel(), launch.config, **call.around(launch))
