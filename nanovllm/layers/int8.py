"""Integers of 8 bits around zero, with a scale for each row or group of columns, as compressed-tensors writes them:
"pack-quantized", four in an int32, 128 more than they are, the first in its lowest bits, or as they are."""

from collections.abc import Iterator

import torch

from nanovllm.kernels.gemm.packed import SPAN, PackedWeight, pack_bytes
from nanovllm.layers.weights import PackedTensor, Packing
from nanovllm.model_config import Quantization


def _unsigned(numbers: torch.Tensor) -> torch.Tensor:
    return pack_bytes((numbers.contiguous().view(torch.uint8) ^ 128).view(torch.int8))


def tensors(held: PackedWeight, how: Quantization, columns: int) -> Iterator[PackedTensor]:
    """Numbers, and scales [rows, groups]."""
    name, packing = "weight", Packing(1, (columns,), torch.int8, SPAN, pack_bytes)
    if how.layout == "pack-quantized":
        name, packing = "weight_packed", Packing(1, (-(-columns // 4),), torch.int32, SPAN // 4, _unsigned)
    yield PackedTensor(name, held.words.transpose(0, 1), SPAN, packing)
    yield PackedTensor("weight_scale", held.scales[..., 0].T, held.group, is_scale=True)
