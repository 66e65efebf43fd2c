"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): a layer in the model's own checkpoint, trained
with it. It attends over pairs of the final hidden states at a token and the embedding of the token behind it, and
drafts one token after another.

DeepSeek-V3, GLM-4.5 (arXiv 2508.06471) and GLM-4.7-Flash have it as one layer more, Qwen3-Next, Qwen3.5 and Qwen3.6
beside the others (`mtp.*`). Embedding and output head are the model's.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from nanovllm.errors import refuse
from nanovllm.layers.attention import PagedAttention
from nanovllm.layers.context import ModelContext, Stream
from nanovllm.layers.rotary import PositionTables
from nanovllm.layers.step import ForwardStep, wanted_rows
from nanovllm.layers.weights import CheckpointWeight
from nanovllm.model_config import DrafterConfig, LayerSpec, ModelConfig
from nanovllm.models.decoder import DecoderLayer, make_norm, taken_in
from nanovllm.models.drafters import shared
from nanovllm.models.drafters.eagle3 import Passes
from nanovllm.models.registry import names_of
from nanovllm.models.renaming import in_checkpoint

__all__ = ["Drafter", "Passes", "canonical", "read"]


class _Kind(NamedTuple):
    """A family's layer, and the names of its tensors in a checkpoint."""

    prefix: str
    """Beginning of all names, where {}, if it is there, is the number of the model's layers."""
    embedding_norm: str
    hidden_norm: str
    fc: str
    layer: str
    norm: str
    begins_empty: bool
    """The entry at position 0 has zeros for its embedding."""
    feeds_normed: bool
    """The next entry takes what the head takes; else what that is the norm of."""


_GLM = _Kind("model.layers.{}.", "enorm", "hnorm", "eh_proj", "", "shared_head.norm", True, False)
_QWEN = _Kind("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0.", "norm", False, True)
_KINDS = {
    "Glm4MoeForCausalLM": _GLM, "Glm4MoeLiteForCausalLM": _GLM, "DeepseekV3ForCausalLM": _GLM,
    "Qwen3NextForCausalLM": _QWEN, "Qwen3_5ForCausalLM": _QWEN, "Qwen3_5MoeForCausalLM": _QWEN,
}  # fmt: skip
_OF_MODEL = ("embed_tokens.", "shared_head.head.")
"""Beginnings, behind the prefix, of copies of tensors that are the model's."""
_STACKED = "mlp.experts.gate_up_proj"


def _kind(model: ModelConfig) -> tuple[_Kind, str]:
    """The kind of layer that drafts for a model, and the prefix of its tensors. Raises ValueError where there is none
    here."""
    if model.architecture not in _KINDS:
        bound = f"another for {model.architecture}: here are layers that draft of {', '.join(_KINDS)}"
        refuse("speculative_config: method", "mtp", bound)
    kind = _KINDS[model.architecture]
    return kind, kind.prefix.format(len(model.layers))


def canonical(name: str, model: ModelConfig) -> str | None:
    """Our name of a tensor in the model's checkpoint; None: it is not needed."""
    _, prefix = _kind(model)
    if prefix not in name:
        return None
    found = replace(names_of(model), skipped=(), unused=(), only=(prefix,)).canonical(name)
    return None if found is None or found.removeprefix(prefix).startswith(_OF_MODEL) else found


def read(raw: dict[str, Any], folder: str, model: ModelConfig, names: Collection[str], _: int) -> DrafterConfig:
    """See models/drafters/__init__.py. The layer is as the model's last one with attention, but for what the names of
    its tensors say."""
    kind, prefix = _kind(model)
    spec = next(layer for layer in reversed(model.layers) if layer.mixer in ("attention", "latent"))
    moe, path = model.moe, prefix + kind.layer
    if names:
        spec = _as_saved(spec, names)
        if moe is not None:
            moe = replace(moe, layout="parameters" if path + _STACKED in names else "experts")
    drafter = replace(model, layers=(spec,), moe=moe, eos_token_ids=(), drafter=None)
    return DrafterConfig(drafter, folder, (len(model.layers),), model.vocab_size)


def _as_saved(spec: LayerSpec, names: Collection[str]) -> LayerSpec:
    """The layer, quantised where its tensors in the checkpoint are."""
    if spec.quantization is None or spec.quantization.while_loading:
        return spec
    is_quantised = any("scale" in name.rpartition(".")[2] for name in names)
    return spec if is_quantised else replace(spec, quantization=None, others=frozenset())


class Drafter(shared.Drafter):
    """A layer for entries. One at position p is made of the model's final hidden states there and of the token at
    p + 1; a drafted token makes the next one with what the last entry has left."""

    def __init__(self, context: ModelContext, settings: DrafterConfig, target: Any) -> None:
        config = context.config
        super().__init__(context, settings, target, 2 * config.hidden_size)
        self._config, self._kind = config, _KINDS[config.architecture]
        self._prefix = self._kind.prefix.format(*settings.taps)
        [spec] = config.layers
        self.embedding_norm, self.hidden_norm = make_norm(context), make_norm(context)
        self.layer = DecoderLayer(context, spec, PositionTables.of(context), None)
        self.norm = taken_in(context, make_norm(context, is_last=True), self.layer)
        self.logits, self.vocab_start = target.logits, target.lm_head.vocab_start

    def taken_in(self, taps: torch.Tensor) -> torch.Tensor:
        return taps  # `fc` reads them beside embeddings, in `forward`: what drafted tokens leave goes through it too

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries of token_ids int32 [T] and hidden [T, hidden]: of those that the step wants what `logits` takes, and
        what the next entry takes, [N, hidden] each, whole on every rank."""
        embedded = self._sum(self._embed(token_ids))
        if self._kind.begins_empty:
            embedded = embedded.masked_fill((step.positions == 0)[:, None], 0.0)
        pairs = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        stream, is_alone = Stream(super().taken_in(torch.cat(pairs, 1))), self._group.size == 1
        stream = self.layer(stream, step if is_alone else replace(step, wanted=None))
        x, residual = self.norm(stream)
        assert isinstance(x, torch.Tensor)
        if not is_alone:
            x, residual = (wanted_rows(rows, step.wanted) for rows in (x, self.norm.complete(residual)))
        return x, x if self._kind.feeds_normed else residual

    def attention_layers(self) -> Sequence[PagedAttention]:
        return [part for part in self.layer.self_attn.modules() if isinstance(part, PagedAttention)]

    def checkpoint_weights(self, prefix: str = "") -> Iterator[CheckpointWeight]:
        kind, begin = self._kind, self._prefix
        yield from self.embedding_norm.checkpoint_weights(begin + kind.embedding_norm)
        yield from self.hidden_norm.checkpoint_weights(begin + kind.hidden_norm)
        yield from self.fc.checkpoint_weights(begin + kind.fc)
        yield from in_checkpoint(self.layer.checkpoint_weights((begin + kind.layer).removesuffix(".")), self._config)
        assert self.norm.norm is not None
        yield from self.norm.norm.checkpoint_weights(begin + kind.norm)
