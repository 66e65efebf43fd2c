"""4-bit weights of a linear layer: what it holds, and where a checkpoint's parts go."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.gemm import int4, int4_row
from nanovllm.kernels.gemm.int4 import SPAN, WORDS, Int4Weight
from nanovllm.kernels.moe import linear as experts
from nanovllm.kernels.moe.packed import PackedExperts
from nanovllm.kernels.plan.config import INT4
from nanovllm.kernels.plan.plan import Launch
from nanovllm.layers.step import Call
from nanovllm.layers.weights import CheckpointWeight, Cut, Shard
from nanovllm.model_config import Quantization

SCALES, ZEROS = "weight_scale", "weight_zero_point"
"""Names beside "weight" of what models/int4_tensors.py makes of a checkpoint's tensors."""


class Int4Matrix(nn.Module):
    """A weight [rows, columns] of 4 bits; x @ weight^T is what kernels/gemm/int4.py says.

    To a checkpoint it is words int16 [rows, blocks of 128 columns, 32], scales and zeros [rows, groups]
    (models/int4_tensors.py makes these of every layout). Where nothing is loaded the weight is zero.
    """

    type_name = INT4
    scale_rows: int | None = None
    has_static_inputs = False

    def __init__(
        self, quantization: Quantization, rows: int, columns: int, dtype: torch.dtype, device: torch.device,
        stack: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """stack: see FP8Matrix."""
        super().__init__()
        self.quantization, self.group = quantization, min(quantization.group, SPAN)
        held = Int4Weight.empty(rows, columns, self.group, quantization.has_zeros, dtype, device, stack)
        self.words = nn.Parameter(held.words, requires_grad=False)
        self.groups = nn.Parameter(held.groups, requires_grad=False)
        self.rows, self.columns = rows, columns

    def for_kernel(self) -> Int4Weight:
        return Int4Weight(self.words, self.groups, self.group, self.quantization.has_zeros, self.columns)

    def of_experts(self) -> PackedExperts:
        return PackedExperts(self.words, self.groups, INT4, self.group, self.quantization.has_zeros, self.columns)

    def checkpoint_weights(
        self, path: str, shape: tuple[int, int], cuts: tuple[Cut, ...], input_index: int = 0, expert: int | None = None
    ) -> Iterator[CheckpointWeight]:
        """Checkpoint tensors of the module `path`, a matrix of this shape of which `cuts` are kept; along columns they
        begin at multiples of 128. expert: its number, if there are several."""
        rows, columns = shape
        words, groups = (held if expert is None else held[expert] for held in (self.words, self.groups))
        scales, zeros = groups.unbind(-1)
        parts = [("weight", words.transpose(0, 1), SPAN), (SCALES, scales.T, self.group)]
        if self.quantization.has_zeros:
            parts.append((ZEROS, zeros.T, self.group))
        for name, held, each in parts:
            count = -(-columns // each) if each else 1
            whole = (rows, count, WORDS) if name == "weight" else (rows, count)
            shards = tuple(_shard(held, cut, each, count) for cut in cuts)
            yield CheckpointWeight(f"{path}.{name}", whole, shards, is_scale=name == SCALES)

    def multiply(self, x: torch.Tensor, launch: Launch, call: Call) -> torch.Tensor:
        """See Weight."""
        if self.words.dim() == 4:
            return experts.linear(x, self.of_experts(), launch.config, call.routing, **call.around(launch))
        linear: Any = int4_row.linear if launch.config.is_skinny else int4.linear
        return linear(x, self.for_kernel(), launch.config, **call.around(launch))


def _shard(held: torch.Tensor, cut: Cut, each: int, count: int) -> Shard:
    """Shard of a checkpoint part for a cut of the matrix. The part is [rows, columns / each, ...] and has `count`
    columns in the whole; it is [rows, 1] where `each` is 0."""
    if cut.dim == 0:
        return Shard(held[cut.place : cut.place + cut.length, :count], 0, cut.start)
    if not each:
        return Shard(held, 0, 0)
    return Shard(held.narrow(1, cut.place // each, -(-cut.length // each)), 1, cut.start // each)
