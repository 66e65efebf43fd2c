"""EAGLE-3 (Li et al., arXiv 2503.01840): one layer, which attends over pairs of a token and the target's hidden states
before it, taken in from three layers; and the switches of EAGLE-3.1 (arXiv 2605.09992).

Checkpoints are those of its authors and of SpecForge (`midlayer.*`) or of speculators (`layers.0.*`,
`transformer_layer_config`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nanovllm.errors import refuse
from nanovllm.kernels.plan.product import SUMMED_AFTER, Around
from nanovllm.kernels.step.state import DeviceState, StepBuffers
from nanovllm.layers.attention import Attention, PagedAttention
from nanovllm.layers.context import ModelContext
from nanovllm.layers.norm import RowNorm
from nanovllm.layers.rotary import PositionTables
from nanovllm.layers.step import Call, ForwardStep, wanted_rows
from nanovllm.layers.vocab import VocabParallelEmbedding
from nanovllm.layers.weights import CheckpointWeight, parameter, whole
from nanovllm.model_config import DrafterConfig, ModelConfig
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.decoder import dense_mlp, make_norm
from nanovllm.models.drafters import shared
from nanovllm.models.drafters.shared import EMBEDDING, ModelDrafter, check_taps
from nanovllm.models.families.llama import read_llama

_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_OFFSETS = "d2t"
_LAYERS = "eagle_aux_hidden_state_layer_ids"


def canonical(name: str, model: ModelConfig) -> str | None:
    """Our name of a checkpoint's tensor; None: it is not needed."""
    name = name.removeprefix("model.")
    return None if name == "t2d" or name.endswith(".inv_freq") else name.replace("layers.0.", "midlayer.")


def read(raw: dict[str, Any], folder: str, model: ModelConfig, names: Collection[str], _: int) -> DrafterConfig:
    """See models/drafters/__init__.py."""
    layer = raw.get("transformer_layer_config", {})
    if not isinstance(layer, dict):
        refuse("transformer_layer_config", layer, "a dict")
    config = ConfigReader({"num_hidden_layers": 1, **layer, **raw})
    config.require(num_hidden_layers=1, target_hidden_size=model.hidden_size)
    nested = ConfigReader(config.get("eagle_config", {}))
    nested.require(use_aux_hidden_state=True)
    count = len(model.layers)
    found = nested.get(_LAYERS, config.get(_LAYERS, [2, count // 2, count - 3]))
    taps = check_taps(_LAYERS, found, 0, count - 1)
    config.require(num_aux_hidden_states=len(taps))
    switches = frozenset(name for name in _SWITCHES if config.flag(name))
    drafted = config.integer("draft_vocab_size", config.integer("vocab_size"))
    if drafted > model.vocab_size:
        refuse("draft_vocab_size", drafted, f"at most {model.vocab_size}, the target's vocab_size")
    fields = read_llama(config, {})
    config.finish()
    tensors = frozenset({EMBEDDING, _OFFSETS}.intersection(names))
    if EMBEDDING in tensors and fields["vocab_size"] < model.vocab_size:
        refuse("vocab_size", fields["vocab_size"], f"at least {model.vocab_size}, the target's")
    if EMBEDDING not in tensors and fields["hidden_size"] != model.hidden_size:
        refuse("hidden_size", fields["hidden_size"], f"{model.hidden_size}, the target's, whose embedding it takes")
    drafter = ModelConfig(architecture="LlamaForCausalLMEagle3", **{**fields, "eos_token_ids": ()})
    return DrafterConfig(drafter, folder, taps, drafted, tensors, switches)


class Drafter(shared.Drafter):
    """A layer for entries. One at position p is made of `taps` there and of the token at p + 1; a drafted token makes
    the next one with what the last entry has left."""

    def __init__(self, context: ModelContext, settings: DrafterConfig, target: Any) -> None:
        super().__init__(context, settings, target)
        config, [spec], switches = context.config, context.config.layers, settings.switches
        hidden_size, width = config.hidden_size, target.config.hidden_size
        self._feeds_normed, self._keeps_normed = "norm_output" in switches, "norm_before_residual" in switches
        norms = [width] * len(settings.taps) if "fc_norm" in switches else []
        self.fc_norm = nn.ModuleList(RowNorm(context, size, config.norm_eps) for size in norms)
        self.input_norm = None
        if "norm_before_fc" in switches:
            self.input_norm = RowNorm(context, width * len(settings.taps), config.norm_eps)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm, self.norm = (
            make_norm(context) for _ in range(4)
        )
        self.self_attn = Attention(context, spec, PositionTables.of(context), Around(adds_parts=True), 2 * hidden_size)
        self.mlp = dense_mlp(context, spec, SUMMED_AFTER)
        self.lm_head = VocabParallelEmbedding(context, settings.vocab_size, hidden_size, config.head_precision)
        self.logits, self.vocab_start = self.lm_head.logits, self.lm_head.vocab_start
        self._has_offsets = _OFFSETS in settings.tensors
        if self._has_offsets:
            self.offsets = parameter(settings.vocab_size, dtype=torch.int64, device=context.device)
        self._target_vocab = target.config.vocab_size

    def taken_in(self, taps: torch.Tensor) -> torch.Tensor:
        if len(self.fc_norm):
            parts = zip(self.fc_norm, taps.chunk(len(self.fc_norm), 1), strict=True)
            taps = torch.cat([norm(part.contiguous()) for norm, part in parts], 1)
        return super().taken_in(taps if self.input_norm is None else self.input_norm(taps))

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries of token_ids int32 [T] and hidden [T, hidden], which it may overwrite: of those that the step wants
        what `logits` takes, and what the next entry takes, [N, hidden] each, whole on every rank."""
        embedded = self.input_layernorm(self._sum(self._embed(token_ids)))
        normed = self.hidden_norm(hidden)
        attended = self.self_attn(torch.cat([embedded, normed], 1), Call(step))
        residual = wanted_rows(normed if self._keeps_normed else hidden, step.wanted)
        if not residual.shape[0]:
            return residual, residual
        x, residual = self._add(attended, residual, self.post_attention_layernorm)
        x, residual = self._add(self.mlp(x, Call(step, step.wanted)), residual, self.norm)
        return x, x if self._feeds_normed else residual

    def _add(self, partial: torch.Tensor, residual: torch.Tensor, norm: RowNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds a partial sum to the residual, in place; returns the normalised rows too."""
        x, residual = self._kernels.add_norms(self._sum(partial), residual, norm.for_kernel())
        assert isinstance(x, torch.Tensor)
        return x, residual

    def attention_layers(self) -> Sequence[PagedAttention]:
        return [self.self_attn]

    def checkpoint_weights(self, prefix: str = "") -> Iterator[CheckpointWeight]:
        yield from super().checkpoint_weights()
        for number, norm in enumerate(self.fc_norm):
            assert isinstance(norm, RowNorm)
            yield from norm.checkpoint_weights(f"fc_norm.{number}")
        if self.input_norm is not None:
            yield from self.input_norm.checkpoint_weights("input_norm")
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            yield from getattr(self, name).checkpoint_weights(f"midlayer.{name}")
        yield from self.self_attn.checkpoint_weights("midlayer.self_attn")
        yield from self.mlp.checkpoint_weights("midlayer.mlp")
        yield from self.norm.checkpoint_weights("norm")
        yield from self.lm_head.checkpoint_weights("lm_head")
        if self._has_offsets:
            yield whole(_OFFSETS, self.offsets)

    def check(self) -> None:
        """Raises ValueError where an id that is drafted is none of the target's."""
        ids = self.offsets + torch.arange(self.offsets.shape[0], device=self.offsets.device)
        bad = ids[(ids < 0) | (ids >= self._target_vocab)]
        if bad.numel():
            raise ValueError(f"weight {_OFFSETS!r} leads to id {bad[0].item()}: must be 0..{self._target_vocab - 1}")


class Passes(ModelDrafter):
    """A pass over the step's tokens, and then one for each further draft."""

    def _enter(self, hidden: torch.Tensor, buffers: StepBuffers, step: ForwardStep, num_rows: int) -> None:
        step = replace(step, taps={}, wanted=self.rows.index[:num_rows])
        for part, found in zip(self.rows.hidden, self.model(buffers.next_ids, hidden, step), strict=True):
            part[:num_rows].copy_(found)

    def draft(self, state: DeviceState, num_rows: int) -> None:
        rows, model, live = self.rows, self.model, slice(num_rows)
        [table] = {layer.cache.table for layer in model.attention_layers()}
        normed, hidden = rows.hidden[:, live].unbind()
        for place in range(self._num_drafts):
            if place:
                mappings = (rows.slot_mapping[live],) * (table + 1)
                step = self._step(state, rows.row_slot[live], rows.positions[live], rows.context_lens[live], mappings)
                normed, hidden = model(rows.input_ids[live], hidden, step)
            self._take(model.logits(normed), state, place, table)
