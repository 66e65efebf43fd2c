"""Integers of 4 bits: the tensors that models/int4_tensors.py makes of every layout."""

from collections.abc import Iterator

from nanovllm.kernels.gemm.packed import SPAN, PackedWeight
from nanovllm.layers.weights import PackedTensor
from nanovllm.model_config import Quantization

SCALES, ZEROS = "weight_scale", "weight_zero_point"
"""Names beside "weight"."""


def tensors(held: PackedWeight, how: Quantization, columns: int) -> Iterator[PackedTensor]:
    """Words int16 [rows, blocks of 128 columns, 32], scales and zeros [rows, groups]."""
    yield PackedTensor("weight", held.words.transpose(0, 1), SPAN)
    scales, zeros = held.scales.unbind(-1)
    yield PackedTensor(SCALES, scales.T, held.group, is_scale=True)
    if held.has_zeros:
        yield PackedTensor(ZEROS, zeros.T, held.group)
