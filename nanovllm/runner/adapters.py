"""One rank's adapters: all that were loaded, in host memory by digest, and the slots that hold some on the device."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.nn.functional import pad

from nanovllm.errors import refuse, short, shown
from nanovllm.layers.adapted import AdaptedMatrix, AdapterPart
from nanovllm.layers.weights import CheckpointWeight
from nanovllm.model_config import ModelConfig
from nanovllm.models.adapter_files import (
    Adapter,
    check_finite,
    check_targets,
    is_finite,
    is_parameter,
    read_adapter,
    turns_experts,
)
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import names_of
from nanovllm.models.renaming import in_checkpoint
from nanovllm.runner.device_io import DeviceIO

Halves = tuple[torch.Tensor, torch.Tensor]
"""A [parts * rank, columns] and B [rows, rank] of a layer on this rank."""


class RankAdapters:
    def __init__(self, model: DecoderForCausalLM, config: ModelConfig, max_rank: int, io: DeviceIO) -> None:
        self._config, self._max_rank, self._io = config, max_rank, io
        self._names = names_of(config)
        self._layers = {name: part for name, part in model.named_modules() if isinstance(part, AdaptedMatrix)}
        self._dtype = next(iter(self._layers.values())).a.dtype
        self._held: dict[str, dict[str, Halves]] = {}
        """Halves of each layer that an adapter has, by the adapter's digest and the layer's name."""
        self._reading: _Reading | None = None

    def read(self, folder: Path) -> None:
        """Begins to read an adapter into host memory, in a thread beside the steps; what was being read before is
        dropped."""
        self._reading = _Reading(self, folder)
        self._reading.start()

    def is_reading(self) -> bool:
        assert self._reading is not None
        return self._reading.is_alive()

    def put(self) -> tuple[str, str]:
        """Takes the adapter that was read. Returns its digest and what is wrong with it, "" where nothing is: a rank
        that raised would be gone."""
        reading, self._reading = self._reading, None
        assert reading is not None
        reading.join()
        if reading.halves is not None:
            self._held[reading.digest] = reading.halves
        return reading.digest, reading.fault

    def drop(self, digests: list[str]) -> None:
        """Forgets adapters that no row has any more. Those that are in slots stay there until others come."""
        for digest in digests:
            self._held.pop(digest, None)

    @torch.inference_mode()
    def place(self, slot: int, digest: str) -> None:
        """Copies an adapter into a slot, in the order of launches: a later step finds it there, and steps launched
        before have read what was there."""
        held = self._held[digest]
        with self._io.stream_context():
            for path, layer in self._layers.items():
                if (halves := held.get(path)) is None:
                    layer.b[slot].zero_()
                else:
                    layer.a[slot].copy_(halves[0], non_blocking=True)
                    layer.b[slot].copy_(halves[1], non_blocking=True)

    @torch.inference_mode()
    def halves_of(self, folder: Path) -> tuple[str, dict[str, Halves] | None]:
        """Digest of the adapter in a folder, and its halves on this rank; None: they are held. From any thread. Raises
        ValueError where it is not one of this model."""
        with self._io.stream_context():  # of this rank's device
            adapter = read_adapter(folder, self._max_rank)
            return adapter.digest, None if adapter.digest in self._held else self._halves(adapter)

    def _halves(self, adapter: Adapter) -> dict[str, Halves]:
        given, top = {}, self._names.of("model")
        for module in adapter.modules:
            name = self._names.canonical(f"{module}.weight") or module
            if name.startswith("model."):  # as transformers has it, whatever files call it
                name = name.replace("model", top, 1)
            given[name.removesuffix(".weight")] = module
        of_model, of_experts = [], set()
        for path, module, part in self._all_parts:
            if stack := self._layers[path].stack:
                names = names_of_experts(module, part.path, *stack)
                of_model += names[0] if given.keys() & {*names[0]} else []
                of_experts |= {*names[1]}
            else:
                of_model.append(module)
        checked = [given[name] for name in given if name not in of_experts]
        check_targets(adapter.config, checked, [given.get(name, name) for name in of_model])
        wanted: dict[str, dict[str, list[str]]] = {}  # names in the adapter, by our layer and by the part of it
        for path, module, part in self._all_parts:
            stack, found = self._layers[path].stack, [given[module]] if module in given else []
            if stack:
                found = given_of_experts(adapter.config, given, *names_of_experts(module, part.path, *stack))
            if found:
                wanted.setdefault(path, {})[part.path] = found
        flat, held = self._room([*wanted])
        for path, names_of_part in wanted.items():
            for _, part in self._parts(path, held[path]):
                for name in names_of_part.get(part.path, ()):
                    self._load(name, adapter, part)
        if not is_finite(flat):
            check_finite(adapter, self._dtype)
        return held

    def _room(self, paths: list[str]) -> tuple[torch.Tensor, dict[str, Halves]]:
        """Zeros for the halves of these layers, and the one piece of memory that they are in, pinned where slots are on
        a GPU: the driver takes as long for each piece as for copying a megabyte."""
        shapes = [half.shape[1:] for path in paths for half in (self._layers[path].a, self._layers[path].b)]
        sizes = [shape.numel() for shape in shapes]
        is_pinned = next(iter(self._layers.values())).a.is_cuda
        flat = torch.zeros(sum(sizes), dtype=self._dtype, pin_memory=is_pinned)
        halves = iter([piece.view(shape) for piece, shape in zip(flat.split(sizes), shapes, strict=True)])
        return flat, {path: (a, b) for path, a, b in zip(paths, halves, halves, strict=True)}

    def _load(self, name: str, adapter: Adapter, part: AdapterPart) -> None:
        """Loads what an adapter has under this name into a part of a layer, or into one of its experts."""
        a, b, scale = adapter.modules[name]
        b = b if scale == 1 else (b if b.dtype == self._dtype else b.float()) * scale
        of_a, of_b, kind = part.a, part.b, part.path.rpartition(".")[2]
        if len(of_a.shape) > a.dim():
            of_a, of_b = (_of_expert(weight, int(name.split(".")[-2])) for weight in (of_a, of_b))
        elif a.dim() == len(of_a.shape) == 3:
            interleaves = self._config.moe is not None and self._config.moe.layout == "transposed"
            columns, is_square = of_a.shape[2], a.shape[2] == b.shape[1]
            turns = turns_experts(adapter.config) if is_square else b.shape[1] == columns != a.shape[2]
            if turns and not interleaves and is_parameter(adapter.config, name):
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
        if more := of_a.shape[-2] - a.shape[-2]:
            a, b = pad(a, (0, 0, 0, more)), pad(b, (0, more))
        for tensor, weight in ((a, of_a), (b, of_b)):
            weight.load(tensor.expand(weight.shape))

    @cached_property
    def _all_parts(self) -> list[tuple[str, str, AdapterPart]]:
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


class _Reading(Thread):
    """An adapter that is read into a rank's host memory."""

    def __init__(self, adapters: RankAdapters, folder: Path) -> None:
        super().__init__(name="nanovllm-adapter", daemon=True)
        self._adapters, self._folder = adapters, folder
        self.digest, self.fault = "", ""
        self.halves: dict[str, Halves] | None = None

    def run(self) -> None:
        try:
            self.digest, self.halves = self._adapters.halves_of(self._folder)
        except (OSError, ValueError) as error:
            self.fault = str(error)
        except Exception as error:  # of a library that reads what is none
            said = f"must be an adapter as PEFT writes it: {type(error).__name__}: {short(error)}"
            self.fault = f"lora_path={shown(str(self._folder))}: {said}"


def names_of_experts(module: str, path: str, count: int) -> tuple[list[str], list[str]]:
    """Names that an adapter of so many experts' gates, ups or downs can have: those of each expert, and of a parameter
    that holds all. module, path: of all experts, by the checkpoint's name and by ours."""
    (parent, _, last), (own_parent, _, own) = module.rpartition("."), path.rpartition(".")
    each = [f"{parent}.{number}.{last}" for number in range(count)]
    parameters = ("down_proj",) if own == "down_proj" else (own, "gate_up_proj")
    return each, [f"{place}.{name}" for place in (parent, own_parent) for name in parameters]


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
