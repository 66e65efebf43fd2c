"""Models that draft for another one, a module by method of speculative_config: `read` takes a checkpoint's config.json
as a DrafterConfig, `Drafter` is one rank's share, `canonical` the spelling of its tensors. A further method is a module
here and a row in speculative.METHODS."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from nanovllm.config import EngineConfig
from nanovllm.layers.attention import PagedAttention
from nanovllm.layers.context import ModelContext
from nanovllm.layers.step import ForwardStep
from nanovllm.layers.weights import CheckpointWeight, TensorSource
from nanovllm.model_config import DrafterConfig, ModelConfig
from nanovllm.models.checkpoint import check_names, load_checkpoint, load_dummy, open_checkpoint
from nanovllm.models.files import check_configuration, check_weights, read_json


class Drafter(Protocol):
    """One rank's share of a model that drafts. An entry at position p is made of `taps` of the other model there and of
    the token at p + 1; a drafted token makes the next one with what the last entry has left."""

    offsets: torch.Tensor
    """int64 [vocab_size]: of the other model's ids to those that it drafts."""
    vocab_start: int
    """First of this rank's ids."""

    def taken_in(self, taps: torch.Tensor) -> torch.Tensor:
        """Residual streams [T, taps * hidden of the other model] -> [T, hidden]."""

    def __call__(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries of token_ids int32 [T] and hidden [T, hidden], which it may overwrite: of those that the step wants
        what `logits` takes, and what the next entry takes, [N, hidden] each, whole on every rank."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, this rank's ids, padding at the end]."""

    def attention_layers(self) -> Sequence[PagedAttention]:
        """Layers of its own, which keep keys and values in the blocks of the other model's."""

    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        """All tensors by the names that `canonical` gives them."""

    def check(self) -> None:
        """Raises ValueError for loaded tensors that it cannot draft with."""


def _module(config: EngineConfig) -> Any:
    assert config.speculation is not None
    return import_module(f"{__name__}.{config.speculation.method}")


def with_drafter(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """The model with the one that config.speculative_config names, if any. Raises ValueError or FileNotFoundError where
    that cannot draft for it. config: has a folder for a hub id."""
    if not config.model_drafts or model.drafter is not None:
        return model
    assert config.speculation is not None and config.speculation.model is not None
    folder = Path(config.speculation.model).absolute()
    check_configuration(str(folder), folder)
    if config.load_format == "auto":
        check_weights(str(folder), folder)
    names = _tensors(folder, _module(config).canonical)
    try:
        drafter = _module(config).read(read_json(folder / "config.json"), str(folder), model, names)
        found = replace(model, drafter=drafter)
        found.check_tensor_parallel(config.tensor_parallel_size)
    except ValueError as error:
        raise _of_drafter(folder, error) from None
    return found


def build(config: EngineConfig, context: ModelContext, target: Any) -> Any:
    """The Drafter of context.config, empty. target: the DecoderForCausalLM that it drafts for."""
    drafter = context.config.drafter
    assert drafter is not None
    return _module(config).Drafter(replace(context, config=drafter.model), drafter, target)


def load(
    drafter: Drafter, settings: DrafterConfig, config: EngineConfig, device: torch.device,
    progress: Callable[[], None],
) -> None:  # fmt: skip
    """Fills the weights in, from their checkpoint or at random. Raises ValueError naming a tensor that is missing,
    surplus or misshapen."""
    weights, folder = list(drafter.checkpoint_weights()), Path(settings.folder)
    if config.load_format == "dummy":
        load_dummy(weights, getattr(torch, config.dtype), device, config.seed, progress)
    else:
        try:
            tensors = _tensors(folder, _module(config).canonical)
            check_names(weights, tensors, tied_head=False)
            load_checkpoint(weights, tensors, device, progress)
            drafter.check()
        except ValueError as error:
            raise _of_drafter(folder, error) from None


def _tensors(folder: Path, canonical: Callable[[str], str | None]) -> dict[str, TensorSource]:
    named = ((canonical(name), tensor) for name, tensor in open_checkpoint(folder, None).items())
    return {name: tensor for name, tensor in named if name is not None}


def _of_drafter(folder: Path, error: ValueError) -> ValueError:
    return ValueError(f"speculative_config: model={str(folder)!r}: {error}")
