"""MXFP4 (OCP Microscaling Formats, version 1.0): numbers of e2m1, two in a byte, the lower half first, and a power of
two for each 32 columns, its exponent with bias 127; of modules as compressed-tensors writes them, and of gpt-oss's
stacks."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from nanovllm.kernels.gemm.e2m1 import MOST_EXPONENT, MX_GROUP, SPAN, quantize, scales_of, words_of
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.layers.weights import CheckpointWeight, PackedTensor, Packing, Rounding, Shard
from nanovllm.model_config import Quantization

_BLOCKS, _SCALES = "_blocks", "_scales"
"""Ends of the names of a stack's numbers and scales; wide, it has none, and the matrices transposed."""


def _fault(exponents: torch.Tensor) -> str:
    found = int(exponents.max())
    return "" if found <= MOST_EXPONENT else (
        f"holds the exponent {found}: must be at most {MOST_EXPONENT} (weights up to 12)"
    )  # fmt: skip


def _packings(columns: int) -> tuple[Packing, Packing]:
    """Packings of numbers and scales of a matrix with so many columns."""
    groups = -(-columns // MX_GROUP)
    numbers, scales = partial(words_of, group=MX_GROUP), partial(scales_of, group=MX_GROUP)
    of_numbers = Rounding(columns, (".weight_packed", ".weight"), lambda wide: quantize(wide)[0])
    of_scales = Rounding(columns, (".weight_scale", ".weight"), lambda wide: quantize(wide)[1])
    return (
        Packing(1, (groups * MX_GROUP // 2,), torch.uint8, SPAN // 2, numbers, rounding=of_numbers),
        Packing(1, (groups,), torch.uint8, SPAN // MX_GROUP, scales, _fault, of_scales),
    )


def tensors(held: PackedWeight, how: Quantization, columns: int) -> Iterator[PackedTensor]:
    """Numbers and scales of a module."""
    numbers, scales = _packings(columns)
    yield PackedTensor("weight_packed", held.words.transpose(0, 1), SPAN, numbers)
    yield PackedTensor("weight_scale", held.scales.T, SPAN, scales)


def stacked_weights(
    path: str, rows: int, columns: int, dim: int, start: int, targets: Sequence[torch.Tensor]
) -> Iterator[CheckpointWeight]:
    """The tensors of a stack [experts, rows, columns] called `path`, of which a rank holds what begins at `start`, a
    row (dim 1) or a block of columns (dim 2). targets: of words and scales."""
    groups, half = -(-columns // MX_GROUP), MX_GROUP // 2
    words = Packing(
        2, (groups, half), torch.uint8, SPAN // MX_GROUP, lambda blocks: words_of(blocks.flatten(-2), MX_GROUP),
        rounding=Rounding(columns, (_BLOCKS, ""), lambda wide: quantize(wide)[0].unflatten(-1, (-1, half))),
    )  # fmt: skip
    scales = _packings(columns)[1]
    of_scales = Rounding(columns, (_SCALES, ""), lambda wide: quantize(wide)[1])
    shape = (len(targets[0]), rows, -(-columns // SPAN))
    shards = [(Shard(target, dim, start),) for target in targets]
    yield CheckpointWeight(path + _BLOCKS, (*shape, SPAN // 4), shards[0], packing=words)
    yield CheckpointWeight(path + _SCALES, shape, shards[1], packing=scales._replace(dim=2, rounding=of_scales))
