"""MXFP4 weights (OCP Microscaling Formats, version 1.0, section 5.4), widened when they are loaded.

A checkpoint holds a matrix [rows, columns] as `..._blocks` uint8 [rows, columns / 32, 16], two 4-bit numbers (1 bit of
sign, 2 of exponent, 1 of mantissa) in a byte, the lower half first, and `..._scales` uint8 [rows, columns / 32], powers
of two with bias 127 on 32 numbers each. bfloat16 holds every product exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nanovllm.layers.weights import TensorSource
from nanovllm.models.checkpoint import FileTensor

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class WidenedTensor:
    """blocks [experts, rows, columns / 32, 16] and scales as bfloat16 [experts, columns, rows]: transposed, as gpt-oss
    has experts that are not quantised. What is narrowed to is widened on `device`."""

    blocks: FileTensor
    scales: FileTensor
    device: torch.device

    dtype = torch.bfloat16

    @property
    def shape(self) -> torch.Size:
        experts, rows, groups, _ = self.blocks.shape
        return torch.Size((experts, groups * _GROUP, rows))

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        if dim != 1:
            of_blocks = 1 if dim == 2 else dim
            return self._widened(of_blocks, start, length).transpose(1, 2)
        first, end = start // _GROUP, -(-(start + length) // _GROUP)
        wide = self._widened(2, first, end - first)
        return wide.narrow(2, start - first * _GROUP, length).transpose(1, 2)

    def _widened(self, dim: int, start: int, length: int) -> torch.Tensor:
        """A range of blocks and scales: [experts, rows, columns]."""
        blocks, scales = (source.narrow(dim, start, length) for source in (self.blocks, self.scales))
        experts, rows, groups, half = blocks.shape
        values = torch.tensor([*_POSITIVE, *(-x for x in _POSITIVE)], dtype=torch.bfloat16, device=self.device)
        out = torch.empty(experts, rows, groups, half, 2, dtype=torch.bfloat16, device=self.device)
        for expert in range(experts):  # one by one, since indices take several times the bytes of what they pick
            pairs, exponents = blocks[expert].to(self.device), scales[expert].to(self.device, torch.int32) - 127
            numbers = values[torch.stack([pairs & 15, pairs >> 4], dim=-1).int()]
            torch.ldexp(numbers, exponents[..., None, None], out=out[expert])
        return out.flatten(2)


def widened(tensors: Mapping[str, FileTensor], device: torch.device) -> dict[str, TensorSource]:
    """The tensors of a checkpoint with one in place of each pair of blocks and scales. Raises ValueError for other
    tensors of bytes."""
    found: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
        base = name.removesuffix(_BLOCKS)
        scales = tensors.get(base + _SCALES)
        if base != name and scales is not None and tensor.shape == (*scales.shape, _GROUP // 2):
            found[base] = WidenedTensor(tensor, scales, device)
        elif not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in tensors):
            if tensor.dtype == torch.uint8:
                raise ValueError(f"weight {name!r} has type U8 and is no part of an MXFP4 tensor")
            found[name] = tensor
    return found
