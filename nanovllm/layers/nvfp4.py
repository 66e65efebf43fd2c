"""NVFP4: numbers of e2m1, two in a byte, the lower half first; a scale in e4m3 for each 16 columns; and one in float32
for the tensor, which ModelOpt multiplies by, and compressed-tensors divides by."""

from collections.abc import Iterator
from functools import partial

import torch

from nanovllm.kernels.gemm.e2m1 import NV_FACTOR, NV_GROUP, SPAN, scales_of, words_of
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.layers.weights import PackedTensor, Packing
from nanovllm.model_config import Quantization

_NAMES = {
    "modelopt": ("weight", "weight_scale_2"), "compressed-tensors": ("weight_packed", "weight_global_scale"),
}  # fmt: skip
"""Quantization.layout -> names of the numbers, and of the tensor's scale."""


def _scales(scales: torch.Tensor) -> torch.Tensor:
    return scales_of(scales.contiguous().view(torch.uint8), NV_GROUP)


def _fault(scales: torch.Tensor) -> str:
    bad = scales.float()[~(scales.float() >= 0)]
    return f"holds {bad[0].item()}: scales must be finite and >= 0" if bad.numel() else ""


def tensors(held: PackedWeight, how: Quantization, columns: int) -> Iterator[PackedTensor]:
    """Numbers, scales of groups, and the tensor's."""
    assert held.factors is not None
    (numbers, of_tensor), divides = _NAMES[how.layout], how.layout == "compressed-tensors"
    packing = Packing(1, (columns // 2,), torch.uint8, SPAN // 2, partial(words_of, group=NV_GROUP))
    yield PackedTensor(numbers, held.words.transpose(0, 1), SPAN, packing)
    packing = Packing(1, (columns // NV_GROUP,), torch.float8_e4m3fn, 4, _scales, _fault)
    yield PackedTensor("weight_scale", held.scales.T, 4 * NV_GROUP, packing)
    packing = Packing(0, (), torch.float32, 1, lambda x: NV_FACTOR / x if divides else NV_FACTOR * x)
    yield PackedTensor(of_tensor, held.factors, None, packing, is_scale=True)
