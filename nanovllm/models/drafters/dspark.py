"""DSpark (DeepSeek, 2026): DFlash whose first draft comes from the last token itself, and where each drafted token adds
to the logits of the next, a product of two narrow tables.

Checkpoints are those of DeepSpec (`Qwen3DSparkModel`); without these tables they are what it calls DFlash. A head that
says how sure the drafts are is left out.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.nn.functional import embedding

from nanovllm.layers.context import ModelContext
from nanovllm.layers.vocab import VocabParallelEmbedding
from nanovllm.layers.weights import CheckpointWeight, parameter, whole
from nanovllm.model_config import DrafterConfig, ModelConfig
from nanovllm.models.drafters import dflash
from nanovllm.models.drafters.dflash import Passes

__all__ = ["Drafter", "Passes", "canonical", "read"]


def canonical(name: str, model: ModelConfig) -> str | None:
    """Our name of a checkpoint's tensor; None: it is not needed."""
    name = name.removeprefix("model.")
    return None if name.startswith("confidence_head.") else dflash.canonical(name, model)


def read(
    raw: dict[str, Any], folder: str, model: ModelConfig, names: Collection[str], num_tokens: int
) -> DrafterConfig:
    """See models/drafters/__init__.py."""
    return dflash.read_block(raw, folder, model, names, num_tokens, "Qwen3DSparkModel")


class Drafter(dflash.Drafter):
    """DFlash's layers, and the tables."""

    skipped = 0

    def __init__(self, context: ModelContext, settings: DrafterConfig, target: Any) -> None:
        super().__init__(context, settings, target)
        rank, vocab_size = settings.markov_rank, settings.vocab_size
        self._has_tables = rank > 0
        if self._has_tables:
            self.markov_w1 = parameter(vocab_size, rank, dtype=context.dtype, device=context.device)
            self.markov_w2 = VocabParallelEmbedding(context, vocab_size, rank)

    def followed(self, logits: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        if not self._has_tables:
            return logits
        return logits + self.markov_w2.logits(embedding(previous, self.markov_w1))

    def checkpoint_weights(self, prefix: str = "") -> Iterator[CheckpointWeight]:
        yield from super().checkpoint_weights()
        if self._has_tables:
            yield whole("markov_head.markov_w1.weight", self.markov_w1)
            yield from self.markov_w2.checkpoint_weights("markov_head.markov_w2")
