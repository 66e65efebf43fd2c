"""Experts' weights in MXFP4 (OCP Microscaling Formats, version 1.0): what a layer holds, and where a checkpoint's parts
go."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from nanovllm.kernels.gemm.int4 import SPAN, WORDS
from nanovllm.kernels.moe import linear as experts
from nanovllm.kernels.moe.packed import E2M1, E2M1_GROUP, PackedExperts
from nanovllm.kernels.plan.config import MXFP4
from nanovllm.kernels.plan.plan import Launch
from nanovllm.layers.step import Call
from nanovllm.layers.weights import CheckpointWeight, Cut, Shard

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of a stack's numbers and scales."""


class MXFP4Matrix(nn.Module):
    """Weights [experts, rows, columns]; x @ weight^T is what kernels/moe/packed.py says.

    To a checkpoint they are words int16 [experts, rows, blocks of 128 columns, 32] and the exponents of four groups in
    an int32 [experts, rows, blocks] (models/mxfp4.py makes these). Where nothing is loaded the weight is zero.
    """

    type_name = MXFP4
    scale_rows: int | None = None
    has_static_inputs = False

    def __init__(self, stack: tuple[int, ...], rows: int, columns: int, device: torch.device) -> None:
        super().__init__()
        shape, self.columns = (*stack, -(-columns // SPAN), rows), columns
        self.words = nn.Parameter(torch.zeros(*shape, WORDS, dtype=torch.int16, device=device), requires_grad=False)
        self.scales = nn.Parameter(torch.zeros(shape, dtype=torch.int32, device=device), requires_grad=False)

    def for_kernel(self) -> PackedExperts:
        return PackedExperts(self.words, self.scales, E2M1, E2M1_GROUP, False, self.columns)

    def rows_of_blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of words and scales, [experts, rows, blocks, ...]."""
        return self.words.transpose(1, 2), self.scales.transpose(1, 2)

    def multiply(self, x: torch.Tensor, launch: Launch, call: Call) -> torch.Tensor:
        """See Weight."""
        return experts.linear(x, self.for_kernel(), launch.config, call.routing, **call.around(launch))

    def checkpoint_weights(
        self, path: str, shape: tuple[int, int], cuts: tuple[Cut, ...], input_index: int = 0
    ) -> Iterator[CheckpointWeight]:
        raise NotImplementedError("a layer cuts its stack itself: stacked_weights")


def stacked_weights(
    path: str, rows: int, columns: int, dim: int, start: int, targets: Sequence[torch.Tensor]
) -> Iterator[CheckpointWeight]:
    """The tensors of a stack [experts, rows, columns] called `path`, of which a rank holds what begins at `start`, a
    row (dim 1) or a block of columns (dim 2). targets: of words and scales."""
    shape = (len(targets[0]), rows, -(-columns // SPAN))
    for end, tail, target in zip((BLOCKS, SCALES), ((WORDS,), ()), targets, strict=True):
        yield CheckpointWeight(path + end, (*shape, *tail), (Shard(target, dim, start),))
