"""Readers of checkpoints: they translate tensors, of packed matrices too, in the range that is asked for, into what
ranks hold."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch.nn.functional import pad

from nanovllm.kernels.gemm.e2m1 import NV_FACTOR, NV_GROUP, SPAN, scales_of, widened, words_of
from nanovllm.layers.weights import CheckpointWeight, DerivedTensor, TensorSource, all_of, turned
from nanovllm.model_config import ModelConfig
from nanovllm.models.checkpoint import HEAD
from nanovllm.models.int4_tensors import AT_ONCE, Int4Reader
from nanovllm.models.stacked_experts import experts_apart
from nanovllm.models.widened import widened as kv_widened

UNUSED = ("input_scale", "input_global_scale", "input_zero_point", "weight_shape")
"""Last parts of names of what nobody needs who does not round activations."""

_HEAD = (HEAD, "lm_head.weight_scale", "lm_head.weight_scale_2")
"""Tensors of a head in NVFP4 of ModelOpt."""


class PackedReader(Protocol):
    """Translation of a checkpoint's tensors for a model that holds some matrices in 4 or 8 bits."""

    def read(self, tensors: Iterable[tuple[str, TensorSource]], wide: bool = True) -> list[tuple[str, TensorSource]]:
        """A checkpoint's (name, tensor) pairs by the names of the model's weights. wide: matrices in a wide type are
        quantised; else they raise ValueError, as do types and shapes that are none of the format's."""
        ...


class CheckpointReader:
    """Translation of a checkpoint's tensors for any model: experts, latents' projections, and packed matrices."""

    def __init__(
        self, config: ModelConfig, weights: Iterable[CheckpointWeight], dtype: torch.dtype, device: torch.device
    ) -> None:
        """dtype: the model's."""
        weights, made = list(weights), {found for spec in config.layers for found in spec.formats}
        self._needed = frozenset(weight.name for weight in weights)
        self._readers: list[PackedReader] = []
        """Readers of formats, one after the other: each leaves the others' tensors as they are."""
        for one in [one for one in made if one.method == "int4"][:1]:
            self._readers.append(Int4Reader(weights, one, dtype, device))
        if any(one.method not in ("int4", "fp8") or (one.scales == "tensor" and not one.while_loading) for one in made):
            self._readers.append(PackingReader(weights, any(one.while_loading for one in made), dtype, device))

    def read(self, tensors: Iterable[tuple[str, TensorSource]], wide: bool = True) -> list[tuple[str, TensorSource]]:
        """See PackedReader. tensors: by their canonical names (CheckpointNames)."""
        found = [*kv_widened(experts_apart(tensors, self._needed))]
        for reader in self._readers:
            found = reader.read(found, wide)
        return found


class PackingReader:
    """Reader by what `weights` say themselves (CheckpointWeight.packing)."""

    def __init__(
        self, weights: Iterable[CheckpointWeight], while_loading: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """dtype: of a head that comes packed."""
        self.device, self._dtype, self._while_loading = device, dtype, while_loading
        self._needed = {weight.name: weight for weight in weights}
        self._held = {name: weight for name, weight in self._needed.items() if weight.packing is not None}
        self._of_wide: dict[str, list[CheckpointWeight]] = {}
        for name, weight in self._held.items():
            if weight.packing is not None and weight.packing.rounding is not None:
                end, of_wide = weight.packing.rounding.ends
                self._of_wide.setdefault(name.removesuffix(end) + of_wide, []).append(weight)

    def read(self, tensors: Iterable[tuple[str, TensorSource]], wide: bool = True) -> list[tuple[str, TensorSource]]:
        """See PackedReader."""
        given = dict(tensors)
        parts = [given.pop(name) for name in _HEAD] if given.keys() >= {*_HEAD} else []
        head = [(HEAD, self._widened(*parts))] if parts else []
        return head + [found for name, tensor in given.items() for found in self._translated(name, tensor, wide)]

    def _widened(self, numbers: TensorSource, scales: TensorSource, of_tensor: TensorSource) -> DerivedTensor:
        """A head in NVFP4 of ModelOpt as a wide one, which is what models have."""
        columns = 2 * numbers.shape[1]

        def narrow(dim: int, start: int, length: int) -> torch.Tensor:
            assert dim == 0
            out = torch.empty(length, columns, dtype=self._dtype, device=self.device)
            for part in torch.arange(start, start + length).split(max(1, AT_ONCE // columns)):
                rows = 0, int(part[0]), len(part)
                words, held = (one.narrow(*rows).to(self.device) for one in (numbers, scales))
                padded = pad(held.view(torch.uint8), (0, -held.shape[1] % (SPAN // NV_GROUP)))
                factors = NV_FACTOR * all_of(of_tensor).float().to(self.device).expand(len(part))
                sets, words = scales_of(padded, NV_GROUP).T, words_of(words, NV_GROUP).transpose(0, 1)
                out[rows[1] - start :][: len(part)] = widened(words, sets, NV_GROUP, factors)[:, :columns]
            return out

        return DerivedTensor(torch.Size((numbers.shape[0], columns)), self._dtype, narrow)

    def _translated(self, name: str, tensor: TensorSource, wide: bool) -> Iterator[tuple[str, TensorSource]]:
        if name in self._held:
            yield name, self._packed(self._held[name], tensor)
        elif name in self._of_wide:
            for weight in self._of_wide[name]:
                yield weight.name, self._rounded(name, weight, tensor, wide)
        elif name in self._needed or name.rpartition(".")[2] not in UNUSED:
            yield name, tensor

    def _packed(self, weight: CheckpointWeight, tensor: TensorSource) -> DerivedTensor:
        packing = weight.packing
        assert packing is not None
        if tensor.dtype != packing.dtype:
            raise ValueError(f"weight {weight.name!r} has type {tensor.dtype}: must be {packing.dtype}, packed")
        wanted = (*weight.shape[: packing.dim], *packing.tail)
        if tuple(tensor.shape) != wanted and (weight.shape or tuple(tensor.shape) != (1,)):
            found = f"has shape {tuple(tensor.shape)}, the configuration needs {wanted}"
            raise ValueError(f"weight {weight.name!r} {found}")

        def make(part: torch.Tensor) -> torch.Tensor:
            if fault := packing.fault(part):
                raise ValueError(f"weight {weight.name!r} {fault}")
            return packing.pack(part)

        if not weight.shape:
            return DerivedTensor(torch.Size(()), tensor.dtype, lambda *_: make(all_of(tensor)))
        if isinstance(tensor, torch.Tensor) and packing.fault(tensor):
            make(tensor)  # which raises, before anything is replaced
        return self._derived(weight, tensor, packing.each, make)

    def _rounded(self, name: str, weight: CheckpointWeight, tensor: TensorSource, wide: bool) -> DerivedTensor:
        packing = weight.packing
        assert packing is not None
        rounding = packing.rounding
        assert rounding is not None
        if not (wide or self._while_loading) or not tensor.dtype.is_floating_point:
            raise ValueError(f"weight {name!r} has type {tensor.dtype}: must be {weight.name!r}, packed")
        source = tensor if packing.dim == 1 else turned(tensor)
        wanted = (*weight.shape[: packing.dim], rounding.columns)
        if tuple(source.shape) != wanted:
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}: must be {wanted}, or packed")
        return self._derived(weight, source, SPAN, lambda part: packing.pack(rounding.of_wide(part)))

    def _derived(
        self, weight: CheckpointWeight, source: TensorSource, each: int, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> DerivedTensor:
        """Tensor that `make` makes on the device of `source`; `each` columns of this are one of the weight's."""
        assert weight.packing is not None
        columns = weight.packing.dim

        def narrow(dim: int, start: int, length: int) -> torch.Tensor:
            first, stop = start, start + length
            if dim == columns:
                first, stop = each * start, min(source.shape[dim], each * stop)
            return _in_pieces(source.narrow(dim, first, stop - first), lambda part: make(part.to(self.device)))

        return DerivedTensor(torch.Size(weight.shape), weight.shards[0].target.dtype, narrow)


def _in_pieces(part: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`make` of some rows at a time, or of an expert's, side by side."""
    pieces = part.split(max(1, AT_ONCE // part[0].numel()))
    first = make(pieces[0])
    out = first.new_empty(len(part), *first.shape[1:])
    for index, piece in enumerate(pieces):
        out[index * len(pieces[0]) :][: len(piece)] = first if index == 0 else make(piece)
    return out
