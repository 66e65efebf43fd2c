"""MXFP4 weights (OCP Microscaling Formats, version 1.0, section 5.4), widened when they are loaded.

A checkpoint holds a matrix [rows, columns] as `..._blocks` uint8 [rows, columns / 32, 16], two 4-bit numbers (1 bit of
sign, 2 of exponent, 1 of mantissa) in a byte, the lower half first, and `..._scales` uint8 [rows, columns / 32], powers
of two with bias 127 on 32 numbers each. bfloat16 holds every product exactly.
"""

from collections.abc import Mapping

import torch

from nanovllm.layers.weights import DerivedTensor, TensorSource

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"


def _widened(blocks: TensorSource, scales: TensorSource, device: torch.device) -> DerivedTensor:
    """blocks [experts, rows, columns / 32, 16] and scales as bfloat16 [experts, columns, rows]: transposed, as gpt-oss
    has experts that are not quantised. What is narrowed to is widened on `device`."""

    def wide(dim: int, start: int, length: int) -> torch.Tensor:
        """A range of blocks and scales: [experts, columns, rows]."""
        return _product(blocks.narrow(dim, start, length), scales.narrow(dim, start, length), device).transpose(1, 2)

    def narrow(dim: int, start: int, length: int) -> torch.Tensor:
        if dim != 1:
            return wide(1 if dim == 2 else dim, start, length)
        first, end = start // _GROUP, -(-(start + length) // _GROUP)
        return wide(2, first, end - first).narrow(1, start - first * _GROUP, length)

    experts, rows, groups, _ = blocks.shape
    return DerivedTensor(torch.Size((experts, groups * _GROUP, rows)), torch.bfloat16, narrow)


def _product(blocks: torch.Tensor, scales: torch.Tensor, device: torch.device) -> torch.Tensor:
    """bfloat16 [experts, rows, columns] on `device`."""
    values = torch.tensor([*_POSITIVE, *(-x for x in _POSITIVE)], dtype=torch.bfloat16, device=device)
    out = torch.empty(*blocks.shape, 2, dtype=torch.bfloat16, device=device)
    for expert, each in enumerate(out):  # one by one, since indices take several times the bytes of what they pick
        pairs, exponents = blocks[expert].to(device), scales[expert].to(device, torch.int32) - 127
        numbers = values[torch.stack([pairs & 15, pairs >> 4], dim=-1).int()]
        torch.ldexp(numbers, exponents[..., None, None], out=each)
    return out.flatten(2)


def widened(tensors: Mapping[str, TensorSource], device: torch.device) -> dict[str, TensorSource]:
    """The tensors of a checkpoint with one in place of each pair of blocks and scales. Raises ValueError for other
    tensors of bytes."""
    found: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
        base = name.removesuffix(_BLOCKS)
        scales = tensors.get(base + _SCALES)
        if base != name and scales is not None and tensor.shape == (*scales.shape, _GROUP // 2):
            for part, held in ((_BLOCKS, tensor), (_SCALES, scales)):
                if held.dtype != torch.uint8:
                    raise ValueError(f"weight {base + part!r} has type {held.dtype}: must be {torch.uint8} (MXFP4)")
            found[base] = _widened(tensor, scales, device)
        elif not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in tensors):
            if tensor.dtype == torch.uint8:
                raise ValueError(f"weight {name!r} has type U8 and is no part of an MXFP4 tensor")
            found[name] = tensor
    return found
