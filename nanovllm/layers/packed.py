"""Weights of 4 and 8 bits: what a linear layer or experts hold, and where a checkpoint's tensors go.

Each format has a file that says which tensors a checkpoint has, and how these are packed: int4.py, int8.py, mxfp4.py,
nvfp4.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.gemm import packed_row
from nanovllm.kernels.gemm import packed_tile as gemm
from nanovllm.kernels.gemm.e2m1 import E2M1
from nanovllm.kernels.gemm.packed import INT8, SPAN, PackedWeight
from nanovllm.kernels.moe import linear as experts
from nanovllm.kernels.plan.config import INT4
from nanovllm.kernels.plan.plan import Launch
from nanovllm.layers import int4, int8, mxfp4, nvfp4
from nanovllm.layers.step import Call
from nanovllm.layers.weights import CheckpointWeight, Cut, PackedTensor, Shard
from nanovllm.model_config import Quantization

FORMATS: dict[str, tuple[str, Callable[[PackedWeight, Quantization, int], Iterator[PackedTensor]]]] = {
    "int4": (INT4, int4.tensors), "int8": (INT8, int8.tensors),
    "mxfp4": (E2M1, mxfp4.tensors), "nvfp4": (E2M1, nvfp4.tensors),
}
"""Quantization.method -> code of a number, and the tensors of a weight [rows, columns]."""


class PackedMatrix(nn.Module):
    """A weight [rows, columns], or [experts, rows, columns]; x @ weight^T is what kernels/gemm/packed.py says. Where
    nothing is loaded the weight is zero."""

    scale_rows: int | None = None
    has_static_inputs = False

    def __init__(
        self, quantization: Quantization, rows: int, columns: int, dtype: torch.dtype, device: torch.device,
        stack: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """stack: see FP8Matrix."""
        super().__init__()
        self.quantization, self.type_name = quantization, quantization.method
        code, self._tensors = FORMATS[quantization.method]
        group, has_zeros = min(quantization.group, SPAN), quantization.has_zeros
        held = PackedWeight.empty(rows, columns, group, has_zeros, dtype, device, stack, code)
        self._made = code, group, has_zeros, columns
        self.words = nn.Parameter(held.words, requires_grad=False)
        self.scales = nn.Parameter(held.scales, requires_grad=False)
        self.factors = None if held.factors is None else nn.Parameter(held.factors, requires_grad=False)

    def for_kernel(self) -> PackedWeight:
        return PackedWeight(self.words, self.scales, *self._made, self.factors)

    def rows_of_blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of experts' words and scales, [experts, rows, blocks, ...]."""
        return self.words.transpose(1, 2), self.scales.transpose(1, 2)

    def checkpoint_weights(
        self, path: str, shape: tuple[int, int], cuts: tuple[Cut, ...], input_index: int = 0, expert: int | None = None
    ) -> Iterator[CheckpointWeight]:
        """Checkpoint tensors of the module `path`, a matrix of this shape of which `cuts` are kept; along columns they
        begin at multiples of 128. expert: its number, if there are several."""
        held = self.for_kernel().of_expert(expert)
        for one in self._tensors(held, self.quantization, shape[1]):
            count = () if one.each is None else (-(-shape[1] // one.each) if one.each else 1,)
            whole = (shape[0], *count, *one.held.shape[2:]) if count else ()
            shards = tuple(_shard(one.held, cut, one.each, *count) for cut in cuts)
            yield CheckpointWeight(f"{path}.{one.name}", whole, shards, is_scale=one.is_scale, packing=one.packing)

    def multiply(self, x: torch.Tensor, launch: Launch, call: Call) -> torch.Tensor | FP8Rows:
        """See Weight."""
        if self.words.dim() == 4:
            return experts.linear(x, self.for_kernel(), launch.config, call.routing, **call.around(launch))
        linear: Any = (packed_row if launch.config.is_skinny else gemm).linear
        return linear(x, self.for_kernel(), launch.config, **call.around(launch))


def _shard(held: torch.Tensor, cut: Cut, each: int | None, count: int = 1) -> Shard:
    """Shard of a checkpoint's tensor for a cut of the matrix. The tensor is [rows, columns / each, ...] and has `count`
    columns in the whole; it is [rows, 1] where `each` is 0, and one number for `held` [rows] where that is None."""
    if cut.dim == 0:
        rows = held[cut.place : cut.place + cut.length]
        return Shard(rows, 0, 0) if each is None else Shard(rows[:, :count], 0, cut.start)
    if not each:
        return Shard(held, 0, 0)
    return Shard(held.narrow(1, cut.place // each, -(-cut.length // each)), 1, cut.start // each)
