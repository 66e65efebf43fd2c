"""A checkpoint's MXFP4 experts in the form that layers/mxfp4.py takes, kept packed.

A checkpoint holds a stack of matrices [experts, rows, columns] as `..._blocks` uint8 [experts, rows, columns / 32, 16],
two 4-bit numbers (1 bit of sign, 2 of exponent, 1 of mantissa) in a byte, the lower half first, and `..._scales` uint8
[experts, rows, columns / 32], powers of two with bias 127 on 32 numbers each. Wide, it has the matrices transposed,
[experts, columns, rows], without an end of the name. Each tensor is translated in the range that is asked for, one
expert at a time.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F

from nanovllm.kernels.gemm.int4 import SPAN
from nanovllm.kernels.moe.packed import E2M1_GROUP, MOST_EXPONENT, quantize, scales_of, words_of
from nanovllm.layers.mxfp4 import BLOCKS, SCALES
from nanovllm.layers.weights import CheckpointWeight, DerivedTensor, TensorSource
from nanovllm.model_config import ModelConfig, Quantization

_EACH = SPAN // E2M1_GROUP
"""Groups of a block."""


class MXFP4Reader:
    """Translation of a checkpoint's tensors for a model that holds its experts in MXFP4."""

    def __init__(
        self, weights: Iterable[CheckpointWeight], quantization: Quantization, config: ModelConfig, device: torch.device
    ) -> None:
        assert config.moe is not None
        self.device = device
        self._while_loading = quantization.while_loading
        self._held = {weight.name: weight for weight in weights if weight.name.endswith((BLOCKS, SCALES))}
        self._columns = {"gate_up_proj": config.hidden_size, "down_proj": config.moe.intermediate_size}

    def read(self, tensors: Iterable[tuple[str, TensorSource]], wide: bool = True) -> list[tuple[str, TensorSource]]:
        """A checkpoint's (name, tensor) pairs by the names of `weights`. wide: stacks in a wide type are quantised;
        else they raise ValueError, as do other types, shapes, and exponents that are too large."""
        return [found for name, tensor in tensors for found in self._translated(name, tensor, wide)]

    def _translated(self, name: str, tensor: TensorSource, wide: bool) -> Iterator[tuple[str, TensorSource]]:
        if name in self._held:
            yield name, self._packed(name, tensor)
        elif name + BLOCKS in self._held:
            if not (wide or self._while_loading) or not tensor.dtype.is_floating_point:
                found = f"has type {tensor.dtype}, and quantization_config says MXFP4"
                raise ValueError(f"weight {name!r} {found}: must be {name}{BLOCKS} and {name}{SCALES}")
            yield from self._quantized(name, tensor)
        else:
            yield name, tensor

    def _packed(self, name: str, tensor: TensorSource) -> DerivedTensor:
        held, is_words = self._held[name], name.endswith(BLOCKS)
        columns = self._columns[name.rpartition(".")[2].removesuffix(BLOCKS).removesuffix(SCALES)]
        wanted = (*held.shape[:2], -(-columns // E2M1_GROUP), *((E2M1_GROUP // 2,) if is_words else ()))
        if tensor.dtype != torch.uint8:
            raise ValueError(f"weight {name!r} has type {tensor.dtype}: must be {torch.uint8} (MXFP4)")
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}, the configuration needs {wanted}")

        def exponents(part: torch.Tensor) -> torch.Tensor:
            if part.device.type != "meta" and int(part.max()) > MOST_EXPONENT:
                found = f"holds the exponent {int(part.max())}"
                raise ValueError(f"weight {name!r} {found}: must be at most {MOST_EXPONENT} (weights up to 12)")
            return scales_of(part)

        if not is_words and isinstance(tensor, torch.Tensor):
            exponents(tensor)  # before anything is replaced

        def narrow(dim: int, start: int, length: int) -> torch.Tensor:
            each = _EACH if dim == 2 else 1
            stop = min(tensor.shape[dim], each * (start + length))
            part = tensor.narrow(dim, each * start, stop - each * start)
            return self._by_expert(part, words_of if is_words else exponents)

        return DerivedTensor(torch.Size(held.shape), torch.int16 if is_words else torch.int32, narrow)

    def _quantized(self, name: str, tensor: TensorSource) -> Iterator[tuple[str, TensorSource]]:
        count, rows = self._held[name + BLOCKS].shape[:2]
        wanted = (count, self._columns[name.rpartition(".")[2]], rows)
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}, the configuration needs {wanted}")
        for index, end in enumerate((BLOCKS, SCALES)):

            def packed(part: torch.Tensor, index: int = index) -> torch.Tensor:
                columns = part.T
                found = quantize(F.pad(columns, (0, -columns.shape[1] % E2M1_GROUP)))
                return (words_of, scales_of)[index](found[index])

            def narrow(dim: int, start: int, length: int, packed: Callable[..., torch.Tensor] = packed) -> torch.Tensor:
                first, stop = start, start + length
                if dim == 2:
                    first, stop = SPAN * start, min(wanted[1], SPAN * stop)
                return self._by_expert(tensor.narrow((0, 2, 1)[dim], first, stop - first), packed)

            held = self._held[name + end]
            yield name + end, DerivedTensor(torch.Size(held.shape), (torch.int16, torch.int32)[index], narrow)

    def _by_expert(self, part: torch.Tensor, packed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`packed` of each expert's part, on the device."""
        first = packed(part[0].to(self.device))
        out = first.new_empty(len(part), *first.shape)
        for index, each in enumerate(part):
            out[index] = first if index == 0 else packed(each.to(self.device))
        return out
