"""Models that draft for another one, a module by method of speculative_config, and what they share (shared.py).

A method has `canonical` of (name of a tensor, target), its name here; `Drafter`, one rank's share; `Passes`, a
ModelDrafter; and `read` of (config.json, folder, target, names of the checkpoint's tensors or none where there is none,
num_speculative_tokens), a DrafterConfig, which raises ValueError for what cannot draft so. A further one is a module
here and a row in speculative.METHODS."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.config import EngineConfig
from nanovllm.layers.context import ModelContext
from nanovllm.layers.weights import TensorSource
from nanovllm.model_config import FP8_WHILE_LOADING, ModelConfig
from nanovllm.models.checkpoint import check_names, load_checkpoint, load_dummy, open_checkpoint
from nanovllm.models.drafters.shared import Drafter, ModelDrafter
from nanovllm.models.files import check_configuration, check_weights, read_json
from nanovllm.models.packed_tensors import CheckpointReader
from nanovllm.models.widened import widened


def _module(config: EngineConfig) -> Any:
    assert config.speculation is not None
    return import_module(f"{__name__}.{config.speculation.method}")


def with_drafter(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """The model with the one that config.speculative_config names, if any. Raises ValueError or FileNotFoundError where
    that cannot draft for it. config: has a folder for a hub id."""
    if not config.model_drafts or model.drafter is not None:
        return model
    assert config.speculation is not None
    raw: dict[str, Any] = {}
    folder = Path(config.speculation.model or config.model).absolute()
    if config.speculation.model is not None:
        check_configuration(str(folder), folder)
        if config.load_format == "auto":
            check_weights(str(folder), folder)
        raw = read_json(folder / "config.json")
    try:
        names = _tensors(folder, config, model)
        if not names and config.load_format == "auto":
            raise ValueError("no tensor in the checkpoint is one of a layer that drafts")
        drafter = _module(config).read(raw, str(folder), model, names, config.speculation.num_tokens)
        if config.speculation.quantization is not None:
            drafter = replace(drafter, model=_rounded(drafter.model))
        found = replace(model, drafter=drafter)
        found.check_tensor_parallel(config.tensor_parallel_size)
    except ValueError as error:
        raise _of_drafter(folder, error) from None
    return found


def _rounded(model: ModelConfig) -> ModelConfig:
    """A model that drafts, with layers and a head of its own in FP8."""
    layers = tuple(replace(spec, quantization=FP8_WHILE_LOADING) for spec in model.layers)
    return replace(model, layers=layers, head_precision=FP8_WHILE_LOADING)


def build(config: EngineConfig, context: ModelContext, target: Any) -> Drafter:
    """The Drafter of context.config, empty. target: the DecoderForCausalLM that it drafts for, whatever adapters rows
    have: it reads the streams that these have changed, and has none of its own. Raises ValueError where ranks cannot
    share it."""
    drafter = context.config.drafter
    assert drafter is not None
    try:
        found: Drafter = _module(config).Drafter(replace(context, config=drafter.model, adapters=None), drafter, target)
    except ValueError as error:
        raise _of_drafter(Path(drafter.folder), error) from None
    return found


def passes(config: EngineConfig, context: ModelContext, model: Drafter, backend: AttentionBackend) -> ModelDrafter:
    """The work of `model`, which was built with these, and whose layers the backend knows."""
    found: ModelDrafter = _module(config).Passes(model, config, context, backend)
    return found


def load(
    drafter: Drafter, model: ModelConfig, config: EngineConfig, device: torch.device, progress: Callable[[], None]
) -> None:
    """Fills the weights in, from their checkpoint or at random. model: the target's. Raises ValueError naming a tensor
    that is missing, surplus or misshapen."""
    assert model.drafter is not None
    weights, folder = list(drafter.checkpoint_weights()), Path(model.drafter.folder)
    dtype = getattr(torch, config.dtype)
    if config.load_format == "dummy":
        load_dummy(weights, dtype, device, config.seed, progress)
    else:
        try:
            reader = CheckpointReader(model.drafter.model, weights, dtype, device)
            tensors = dict(reader.read(_tensors(folder, config, model).items(), wide=False))
            check_names(weights, tensors, tied_head=False)
            load_checkpoint(weights, tensors, device, progress)
            drafter.check()
        except ValueError as error:
            raise _of_drafter(folder, error) from None


def _tensors(folder: Path, config: EngineConfig, model: ModelConfig) -> dict[str, TensorSource]:
    canonical = _module(config).canonical
    named = ((canonical(name, model), tensor) for name, tensor in open_checkpoint(folder, None).items())
    return dict(widened((name, tensor) for name, tensor in named if name is not None))


def _of_drafter(folder: Path, error: ValueError) -> ValueError:
    return ValueError(f"speculative_config: model={str(folder)!r}: {error}")
