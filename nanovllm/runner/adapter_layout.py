"""Layouts of a rank's memory for adapters: which tensor goes where, worked out once for all of the same names and
shapes, such as a trainer sends step by step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from nanovllm.errors import refuse
from nanovllm.layers.adapted import AdaptedMatrix, AdapterPart
from nanovllm.layers.weights import CheckpointWeight
from nanovllm.model_config import ModelConfig
from nanovllm.models.adapter_files import (
    IDLE,
    Adapter,
    LoRAPair,
    check_targets,
    is_parameter,
    modules_of,
    turns_experts,
)
from nanovllm.models.registry import names_of
from nanovllm.models.renaming import in_checkpoint

Halves = tuple[torch.Tensor, torch.Tensor]
"""A [parts * rank, columns] and B [rows, rank] of a layer on this rank."""
View = tuple[torch.Size, tuple[int, ...], Any]
"""Size, strides and offset, as `as_strided` takes them."""
_MOST_LAYOUTS = 8
_GROUP = 64  # copies that a thread makes in one call


class Copied(NamedTuple):
    """Part of an adapter's tensor, and its place."""

    tensor: int
    """Number of the tensor, in the order in which the adapter has them."""
    part: View | None
    """None: the whole."""
    place: View

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.part is None:
            return tensor
        size, strides, offset = self.part
        return tensor.as_strided(size, strides, tensor.storage_offset() + offset)


class Layout(NamedTuple):
    """Memory of a rank for adapters of one kind, in one piece, and what goes where."""

    shapes: dict[str, tuple[torch.Size, torch.Size]]
    """Shapes of the halves of each layer that has some, which lie one after the other."""
    copies: list[tuple[float, list[Copied]]]
    """Copies that make it, in groups, with the number that each group is multiplied by."""
    is_full: bool
    """Whether all of the memory is written."""

    @property
    def size(self) -> int:
        return sum(shape.numel() for shapes in self.shapes.values() for shape in shapes)

    def halves(self, memory: torch.Tensor) -> dict[str, Halves]:
        """Views of `memory` [size], by layer."""
        shapes = [shape for pair in self.shapes.values() for shape in pair]
        pieces = memory.split([shape.numel() for shape in shapes])
        views = iter([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])
        return {path: (a, b) for path, a, b in zip(self.shapes, views, views, strict=True)}

    def fill(self, memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Writes an adapter's tensors into `memory` [size], on a CPU by several threads."""
        if not self.is_full:
            memory.zero_()
        fill = partial(_fill, memory, tensors)
        if memory.is_cuda:
            for group in self.copies:
                fill(group)
            return
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(fill, self.copies))


@torch.inference_mode()
def _fill(memory: torch.Tensor, tensors: Sequence[torch.Tensor], group: tuple[float, list[Copied]]) -> None:
    """Copies parts of tensors, times a factor, which is rounded once."""
    factor, copies = group
    parts = [one.part_of(tensors[one.tensor]) for one in copies]
    places = [memory.as_strided(*one.place) for one in copies]
    # A power of two changes no digits; but float16 has less range than what it is copied from.
    is_exact = factor >= 1 and math.frexp(factor)[0] == 0.5 and memory.dtype != torch.float16
    is_late = is_exact or all(part.dtype == memory.dtype for part in parts)
    if not is_late and factor != 1:
        parts = list(torch._foreach_mul([part.float() for part in parts], factor))
    torch._foreach_copy_(places, parts)
    if is_late and factor != 1:
        torch._foreach_mul_(places, factor)


class AdapterLayouts:
    """Layouts of adapters on one rank."""

    def __init__(self, layers: Mapping[str, AdaptedMatrix], config: ModelConfig, max_rank: int) -> None:
        self._layers, self._config, self._max_rank = layers, config, max_rank
        self._names = names_of(config)
        self._made: dict[Any, Layout] = {}

    def of(self, adapter: Adapter) -> Layout:
        """Raises ValueError naming what the model does not have, or what has not its shape."""
        told = repr({name: value for name, value in adapter.config.items() if name not in IDLE})
        key = told, *((name, *_kind(tensor)) for name, tensor in adapter.tensors.items())
        if (found := self._made.get(key)) is None:
            found = self._make(adapter)
            if len(self._made) == _MOST_LAYOUTS:
                self._made.clear()
            self._made[key] = found
        return found

    def _make(self, adapter: Adapter) -> Layout:
        blanks = [_blank(tensor) for tensor in adapter.tensors.values()]
        numbers = {blank.untyped_storage()._cdata: number for number, blank in enumerate(blanks)}
        modules = modules_of(adapter._replace(tensors=dict(zip(adapter.tensors, blanks, strict=True))), self._max_rank)
        wanted = self._wanted(adapter.config, modules)
        shapes = {path: (self._layers[path].a.shape[1:], self._layers[path].b.shape[1:]) for path in wanted}
        layout = Layout(shapes, [], False)
        memory = torch.empty(layout.size, device="meta")
        found: dict[View, tuple[float, Copied]] = {}  # by place, as parts of one module of the checkpoint share its B
        for path, halves in layout.halves(memory).items():
            for _, part in self._parts(path, halves):
                for name in wanted[path].get(part.path, ()):
                    for place, source, factor in self._copies(name, modules[name], adapter.config, part):
                        number = numbers[source.untyped_storage()._cdata]
                        view = None if _kind(source) == _kind(blanks[number]) else _view(source)
                        found[_view(place)] = factor, Copied(number, view, _view(place))
        by_factor: dict[float, list[Copied]] = {}
        for factor, copied in found.values():
            by_factor.setdefault(factor, []).append(copied)
        groups = [
            (factor, copies[at : at + _GROUP])
            for factor, copies in by_factor.items() for at in range(0, len(copies), _GROUP)
        ]  # fmt: skip
        return Layout(shapes, groups, sum(size.numel() for size, *_ in found) == layout.size)

    def _wanted(self, config: Mapping[str, Any], modules: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
        """Names in an adapter, by our layer and by the part of it. Raises ValueError where they are others than those
        that its configuration names, or none of the model."""
        given, top = {}, self._names.of("model")
        for module in modules:
            name = self._names.canonical(f"{module}.weight") or module
            if name.startswith("model."):  # as transformers has it, whatever files call it
                name = name.replace("model", top, 1)
            given[name.removesuffix(".weight")] = module
        of_model, of_experts = [], set()
        for path, module, part in self.all_parts:
            if stack := self._layers[path].stack:
                names = names_of_experts(module, part.path, *stack)
                of_model += names[0] if given.keys() & {*names[0]} else []
                of_experts |= {*names[1]}
            else:
                of_model.append(module)
        checked = [given[name] for name in given if name not in of_experts]
        check_targets(config, checked, [given.get(name, name) for name in of_model])
        wanted: dict[str, dict[str, list[str]]] = {}
        for path, module, part in self.all_parts:
            stack, found = self._layers[path].stack, [given[module]] if module in given else []
            if stack:
                found = given_of_experts(config, given, *names_of_experts(module, part.path, *stack))
            if found:
                wanted.setdefault(path, {})[part.path] = found
        return wanted

    def _copies(
        self, name: str, pair: LoRAPair, config: Mapping[str, Any], part: AdapterPart
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        """Places in a part of a layer, or in one of its experts, with what goes there of the adapter under this name,
        and its factor. Raises ValueError where shapes do not fit."""
        a, b, scale = pair
        of_a, of_b, kind = part.a, part.b, part.path.rpartition(".")[2]
        if len(of_a.shape) > a.dim():
            of_a, of_b = (_of_expert(weight, int(name.split(".")[-2])) for weight in (of_a, of_b))
        elif a.dim() == len(of_a.shape) == 3:
            interleaves = self._config.moe is not None and self._config.moe.layout == "transposed"
            columns, is_square = of_a.shape[2], a.shape[2] == b.shape[1]
            turns = turns_experts(config) if is_square else b.shape[1] == columns != a.shape[2]
            if turns and not interleaves and is_parameter(config, name):
                a, b = b.transpose(1, 2), a.transpose(1, 2)
            if name.endswith("gate_up_proj"):
                second = int(kind == "up_proj")
                b = b[:, second::2] if interleaves else b.chunk(2, 1)[second]
        for half, tensor, weight, dim in (("lora_A", a, of_a, -1), ("lora_B", b, of_b, -2)):
            if tensor.shape[dim] != weight.shape[dim] or tensor.dim() != len(weight.shape):
                bound = f"dimension {dim} of {len(weight.shape)} must be {weight.shape[dim]}"
                raise ValueError(f"{name}: {half} is {list(tensor.shape)}: {bound}")
            if tensor.dim() == 3 and tensor.shape[0] not in (1, weight.shape[0]):
                raise ValueError(f"{name}: {half} is of {tensor.shape[0]} experts: must be 1 or {weight.shape[0]}")
        for tensor, weight, dim, factor in ((a, of_a, -2, 1.0), (b, of_b, -1, scale)):
            of_ranks = _of_first_ranks(weight, dim, a.shape[-2])
            for place, source in of_ranks.parts(tensor.expand(of_ranks.shape)):
                yield place, source, factor

    @cached_property
    def all_parts(self) -> list[tuple[str, str, AdapterPart]]:
        """Parts of all layers as of _parts, each behind its layer's path, in no memory."""
        return [(path, *part) for path in self._layers for part in self._parts(path)]

    def _parts(self, path: str, halves: Halves | None = None) -> Iterator[tuple[str, AdapterPart]]:
        """The parts of a layer with their modules in the checkpoint, in these halves; None: in no memory. A module that
        the checkpoint holds as one with others has one A for all of them, and B of all their rows."""
        layer = self._layers[path]
        a, b = halves or (torch.empty_like(one[0], device="meta") for one in (layer.a, layer.b))
        parts = list(layer.parts(a, b))
        of_b = {weight.name: weight for weight in in_checkpoint((part.b for part in parts), self._config)}
        for part in parts:
            module = self._names.of(f"{part.path}.weight").removesuffix(".weight")
            if not layer.stack:
                module = self._names.module(part.path)
                part = part._replace(b=of_b[f"{module}.weight"])
            yield module, part


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _view(tensor: torch.Tensor) -> View:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def names_of_experts(module: str, path: str, count: int) -> tuple[list[str], list[str]]:
    """Names that an adapter of so many experts' gates, ups or downs can have: those of each expert, and of a parameter
    that holds all. module, path: of all experts, by the checkpoint's name and by ours."""
    (parent, _, last), (our_parent, _, ours) = module.rpartition("."), path.rpartition(".")
    each = [f"{parent}.{number}.{last}" for number in range(count)]
    parameters = ("down_proj",) if ours == "down_proj" else (ours, "gate_up_proj")
    return each, [f"{place}.{name}" for place in (parent, our_parent) for name in parameters]


def given_of_experts(
    config: Mapping[str, Any], given: Mapping[str, str], each: list[str], whole: list[str]
) -> list[str]:
    """Modules of an adapter that are of these experts. given: modules by their names here. Raises ValueError where it
    has both forms, or lacks the one that its configuration names."""
    found, stacked = ([given[name] for name in dict.fromkeys(names) if name in given] for names in (each, whole))
    if len(stacked) > 1 or (found and stacked):
        raise ValueError(f"{stacked[0]}: has an adapter, and so has {[*found, *stacked[1:]][0]}")
    if not stacked and (wanted := [name for name in whole if is_parameter(config, name)]):
        refuse("target_parameters", config["target_parameters"], f"without {wanted[0]}, which has no lora_A and lora_B")
    return [*found, *stacked]


def _of_expert(weight: CheckpointWeight, number: int) -> CheckpointWeight:
    """One expert's part of a weight of all."""
    shards = (replace(shard, target=shard.target[number], dim=max(0, shard.dim - 1)) for shard in weight.shards)
    return replace(weight, shape=weight.shape[1:], shards=tuple(shards))


def _of_first_ranks(weight: CheckpointWeight, dim: int, count: int) -> CheckpointWeight:
    """The part of an A or B that adapters of this rank have; `dim`: that of ranks, counted from the end."""
    shape = [*weight.shape]
    shape[dim] = count
    shards = (replace(shard, target=shard.target.narrow(dim, 0, count)) for shard in weight.shards)
    return replace(weight, shape=tuple(shape), shards=tuple(shards))
