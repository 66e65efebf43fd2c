"""One rank's adapters: all that were loaded, in host memory by digest, and the slots that hold some on the device."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.functional import pad

from nanovllm.layers.adapted import AdaptedMatrix, AdapterPart
from nanovllm.model_config import ModelConfig
from nanovllm.models.adapter_files import Adapter, check_targets, read_adapter
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
        self._held: dict[str, dict[str, Halves]] = {}
        """Halves of each layer that an adapter has, by the adapter's digest and the layer's name."""

    @torch.inference_mode()
    def put(self, folder: Path) -> tuple[str, str]:
        """Reads an adapter into host memory. Returns its digest and what is wrong with it, "" where nothing is: a rank
        that raised would be gone."""
        try:
            adapter = read_adapter(folder, self._max_rank)
            if adapter.digest not in self._held:
                self._held[adapter.digest] = self._halves(adapter)
        except (OSError, ValueError) as error:
            return "", str(error)
        return adapter.digest, ""

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

    def _halves(self, adapter: Adapter) -> dict[str, Halves]:
        """Raises ValueError where the adapter is not one of this model."""
        made: dict[str, Halves] = {}
        given, dtype = {}, next(iter(self._layers.values())).a.dtype
        for module in adapter.modules:
            name = self._names.canonical(f"{module}.weight") or module
            given[name.removesuffix(".weight")] = module
        parts = [(path, *found) for path in self._layers for found in self._parts(path, made)]
        of_model = {given.get(module, module) for _, module, _ in parts}
        check_targets(adapter.config, given.values(), of_model)
        for _, module, part in parts:
            if module in given:
                name = given[module]
                a, b = adapter.modules[name]
                for half, tensor, weight, dim in (("lora_A", a, part.a, 1), ("lora_B", b, part.b, 0)):
                    if tensor.shape[dim] != weight.shape[dim]:
                        bound = f"must be {weight.shape[dim]} of {name}"
                        raise ValueError(f"{name}: {half} is {list(tensor.shape)}: dimension {dim} {bound}")
                    if not tensor.to(dtype).isfinite().all():
                        raise ValueError(f"{name}: {half} with its scale does not fit into {dtype}")
                part.a.load(pad(a, (0, 0, 0, part.a.shape[0] - len(a))))
                part.b.load(pad(b, (0, part.b.shape[1] - b.shape[1])))
        used = {path for path, module, _ in parts if module in given}
        return {path: halves for path, halves in made.items() if path in used}

    def _parts(self, path: str, made: dict[str, Halves]) -> Iterator[tuple[str, AdapterPart]]:
        """The parts of a layer with their modules in the checkpoint, in host memory that `made` gets. A module that the
        checkpoint holds as one with others has one A for all of them, and B of all their rows."""
        layer = self._layers[path]
        is_pinned = layer.a.is_cuda
        a, b = (torch.zeros(one.shape[1:], dtype=one.dtype, pin_memory=is_pinned) for one in (layer.a, layer.b))
        made[path] = a, b
        parts = list(layer.parts(a, b))
        of_b = {weight.name: weight for weight in in_checkpoint((part.b for part in parts), self._config)}
        for part in parts:
            module = self._names.module(part.path)
            yield module, part._replace(b=of_b[f"{module}.weight"])
