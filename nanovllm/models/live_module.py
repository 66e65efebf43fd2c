"""A transformers module that lives in this process: the engine computes with its parameters, without a second copy.

Projections that the engine fuses (queries, keys and values; gate and up) get one matrix, and each of the module's
parameters becomes its rows of it. Everything else is the module's own tensor. What cannot be shared that way (norm
weights that are kept as 1 + weight, what is kept in a wider type, rows in another order or in two places, padded
widths) is copied, and copied again after a change.
"""

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from nanovllm.errors import refuse
from nanovllm.layers.weights import CheckpointWeight, WeightedModule
from nanovllm.model_config import ModelConfig
from nanovllm.models.checkpoint import EMBEDDING, HEAD, check_names
from nanovllm.models.files import parse_json
from nanovllm.models.names import CheckpointNames
from nanovllm.models.registry import parse_config


def options_of(module: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Options of the engine with what the module settles. Raises ValueError where one says otherwise."""
    first = next(module.parameters(), None) if isinstance(module, nn.Module) else None
    if first is None:
        raise ValueError(f"module={type(module).__name__}: must have parameters")
    settled = {
        "device": first.device.type,
        "dtype": str(first.dtype).removeprefix("torch."),
        "tensor_parallel_size": 1,
        "load_format": "auto",
    }
    for name, value in settled.items():
        if str(options.get(name)).removeprefix("torch.") not in ("None", "auto", str(value)):
            refuse(name, options[name], f"{value!r}, as the module has it")
    return {**options, **settled}


def config_of(module: nn.Module, overrides: dict[str, Any]) -> ModelConfig:
    """Model configuration of a live module, as if it were in files, with `overrides` (EngineConfig.hf_overrides).
    Raises ValueError for an architecture or an entry that is not served."""
    config: Any = getattr(module, "config", None)
    generation: Any = getattr(module, "generation_config", None)
    if not hasattr(config, "to_json_string"):
        refuse("module", type(module).__name__, "a transformers model with its config")
    raw = {**parse_json(config.to_json_string()), "architectures": [type(module).__name__]}
    if (raw.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        raw["quantization_config"] = None  # the module's experts were widened; packed ones have other names
    generation = parse_json(generation.to_json_string()) if generation else {}
    found = parse_config(raw, generation, overrides=overrides)
    if any(layer.quantization is not None for layer in found.layers):
        refuse("module", type(module).__name__, "a module whose weights are not quantised")
    if found.moe is not None and found.moe.layout in ("experts", "turned"):
        found = replace(found, moe=replace(found.moe, layout="parameters"))
    return found


_State = tuple[int, int, int]


def _state(tensor: torch.Tensor) -> _State:
    """State of a tensor that changes with a write that torch counts, and with another tensor in its place."""
    return id(tensor), tensor.data_ptr(), tensor._version


class LiveModule:
    """The parameters of a module, by the names that a checkpoint of its family has for them."""

    def __init__(self, module: nn.Module, spelling: CheckpointNames) -> None:
        self._module, self._spelling = module, spelling
        self._pointers: dict[str, int] = {}
        """Address of the memory that each shared parameter shares."""
        self._copied: list[CheckpointWeight] = []
        self._seen: dict[str, _State] = {}
        self._was_optimized = False
        self.num_shared = self.num_copied = 0
        """Numbers of elements."""
        self._watch_optimizers()

    def _parameters(self) -> dict[str, torch.Tensor]:
        """The module's parameters by name, as they are now, and the buffers that its checkpoints have."""
        modules = self._module.named_modules(remove_duplicate=False)
        buffers = [
            (f"{path}.{name}" if path else name, buffer)
            for path, module in modules
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]
        return dict(self._spelling.select([*self._module.named_parameters(remove_duplicate=False), *buffers]))

    def _watch_optimizers(self) -> None:
        """torch does not count what fused optimizers write; but all of its optimizers say when they have stepped."""
        me = weakref.ref(self)

        def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (live := me()) is not None and not live._was_optimized:
                ours = {id(tensor) for tensor in live._parameters().values()}
                groups = (group["params"] for group in optimizer.param_groups)
                live._was_optimized = any(id(tensor) in ours for group in groups for tensor in group)

        handle = register_optimizer_step_post_hook(note)
        weakref.finalize(self, handle.remove)

    @torch.inference_mode(False)  # the module is trained with what is allocated here
    @torch.no_grad()
    def share(self, model: WeightedModule, is_tied: bool) -> None:
        """Puts the module's parameters into `model`, which is on one rank. Values stay as they are.

        Raises ValueError naming a parameter that is missing or surplus, or of another shape, type or device than the
        first, or that is no plain tensor.
        """
        weights, theirs = list(model.checkpoint_weights("model")), self._parameters()
        check_names(weights, theirs, is_tied)
        for weight in weights:
            _check(weight, theirs[weight.name], next(model.parameters()).device, next(self._module.parameters()).dtype)
        if is_tied and theirs.get(HEAD, theirs[EMBEDDING]) is not theirs[EMBEDDING]:
            raise ValueError("module: tie_word_embeddings=True, but its head is not its embedding (tie_weights())")
        by_memory: dict[int, list[CheckpointWeight]] = {}
        for weight in weights:
            for memory in {shard.target.untyped_storage().data_ptr() for shard in weight.shards}:
                by_memory.setdefault(memory, []).append(weight)
        for owner in model.modules():
            for attribute, ours in owner.named_parameters(recurse=False):
                shared = self._shared(ours, by_memory[ours.untyped_storage().data_ptr()], theirs)
                if shared is not None:
                    setattr(owner, attribute, nn.Parameter(shared, requires_grad=False))
                    self.num_shared += ours.numel()
                else:
                    self.num_copied += ours.numel()
        self._copied = [weight for weight in weights if weight.name not in self._pointers]
        self.refresh()

    def _shared(
        self, ours: torch.Tensor, held: list[CheckpointWeight], theirs: dict[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Tensor that replaces `ours`, made of the module's parameters for its parts `held`; None if they cannot be
        shared."""
        places = [weight.contiguous_target() for weight in held]
        tensors = [theirs[weight.name] for weight in held]
        if any(place is None for place in places) or any(tensor.dtype != ours.dtype for tensor in tensors):
            return None
        if len(held) == 1 and ours.numel() == tensors[0].numel() and tensors[0].is_contiguous():
            shared = tensors[0].detach()
        else:
            shared = torch.zeros_like(ours)  # the padding, where there is any, stays zero
            for place, tensor in zip(places, tensors, strict=True):
                assert place is not None
                part = shared.as_strided(place.shape, place.stride(), place.storage_offset())
                tensor.data = part.copy_(tensor)
        self._pointers.update((weight.name, tensor.data_ptr()) for weight, tensor in zip(held, tensors, strict=True))
        return shared

    def has_changed(self) -> bool:
        """Whether parameters were written since `refresh`, as far as torch tells (not through `.data`). Raises
        RuntimeError naming a parameter that is not shared any more."""
        now = self._parameters()
        for name, pointer in self._pointers.items():
            if name not in now or now[name].data_ptr() != pointer:
                raise RuntimeError(
                    f"module: parameter {name!r} is another tensor than the engine's, since .to(), "
                    "load_state_dict(assign=True) or an assignment: make a new engine"
                )
        if surplus := now.keys() - self._seen.keys():
            raise RuntimeError(f"module: parameter {min(surplus)!r} is not the engine's: make a new engine")
        return self._was_optimized or self._seen != {name: _state(tensor) for name, tensor in now.items()}

    @torch.inference_mode()
    def refresh(self) -> None:
        """Copies what is not shared."""
        now, self._was_optimized = self._parameters(), False
        self._seen = {name: _state(tensor) for name, tensor in now.items()}
        for weight in self._copied:
            weight.load(now[weight.name].detach())

    def report(self) -> dict[str, object]:
        """Share of the weights that is shared with the module, for engine_info."""
        return {"shared_parameters": self.num_shared, "copied_parameters": self.num_copied}


def _check(weight: CheckpointWeight, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """dtype: the module's, of which some tensors are kept wider than they come."""
    weight.check(tensor)
    wanted = weight.shards[0].target.dtype
    is_widened = tensor.dtype == dtype and wanted.is_floating_point and wanted.itemsize > dtype.itemsize
    if tensor.device != device or not (tensor.dtype == wanted or is_widened or weight.offset):
        found = f"is {tensor.dtype} on {tensor.device}"
        raise ValueError(f"module: parameter {weight.name!r} {found}: must be {wanted} on {device}")
    if type(tensor.data) is not torch.Tensor or tensor.is_inference():
        found = "an inference tensor" if tensor.is_inference() else f"a {type(tensor.data).__name__}"
        raise ValueError(f"module: parameter {weight.name!r} is {found}: must be a plain tensor")
