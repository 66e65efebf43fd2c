"""DFlash (Chen et al., arXiv 2602.06036): layers of Qwen3's kind, whose keys and values of a text are made of the
target's hidden states. The last token and masks for those to draft go through them in one pass, each of which sees the
text and all of these.

Checkpoints are those of its authors (`DFlashDraftModel`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nanovllm.errors import refuse
from nanovllm.kernels.step.state import DeviceState, StepBuffers
from nanovllm.layers.attention import PagedAttention
from nanovllm.layers.context import ModelContext, Stream
from nanovllm.layers.rotary import PositionTables
from nanovllm.layers.step import ForwardStep
from nanovllm.layers.vocab import VocabParallelEmbedding
from nanovllm.layers.weights import CheckpointWeight
from nanovllm.model_config import DrafterConfig, ModelConfig
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.decoder import DecoderLayer, make_norm, taken_in
from nanovllm.models.drafters import shared
from nanovllm.models.drafters.shared import EMBEDDING, HEAD, ModelDrafter, check_taps
from nanovllm.models.families.llama import read_qwen3
from nanovllm.models.renaming import in_checkpoint

_LAYERS = "target_layer_ids"


def canonical(name: str, model: ModelConfig) -> str | None:
    """Our name of a checkpoint's tensor; None: it is not needed."""
    return None if name.endswith(".inv_freq") else name.removeprefix("model.")


def read(
    raw: dict[str, Any], folder: str, model: ModelConfig, names: Collection[str], num_tokens: int
) -> DrafterConfig:
    """See models/drafters/__init__.py."""
    return read_block(raw, folder, model, names, 1 + num_tokens, "DFlashDraftModel")


def read_block(
    raw: dict[str, Any], folder: str, model: ModelConfig, names: Collection[str], num_queries: int, architecture: str
) -> DrafterConfig:
    """Reads config.json of a model that passes over the last token and masks, so many in all."""
    nested = raw.get("dflash_config", {})
    if not isinstance(nested, dict):
        refuse("dflash_config", nested, "a dict")
    config = ConfigReader({**raw, **nested})
    count = len(model.layers)
    config.require(
        architectures=[architecture], is_causal=False, causal=False, output_multiplier=1.0, input_embedding_scale=1.0,
        num_target_layers=count, markov_head_type="vanilla",
    )  # fmt: skip
    if (size := config.integer("block_size")) < num_queries:
        refuse("block_size", size, f"at least {num_queries}, the tokens of a pass")
    taps = check_taps(_LAYERS, config.get(_LAYERS), -1, count - 2)
    mask = config.integer("mask_token_id", low=0)
    if mask >= model.vocab_size:
        refuse("mask_token_id", mask, f"below {model.vocab_size}, the target's vocab_size")
    fields = read_qwen3(config, {})
    if any(spec.window is not None for spec in fields["layers"]):
        refuse("sliding_window", config.get("sliding_window", 4096), "of no layer (windows are not supported)")
    markov = config.integer("markov_rank", 0, low=0)
    config.finish()
    for name in ("hidden_size", "vocab_size"):
        if fields[name] != (wanted := getattr(model, name)):
            refuse(name, fields[name], f"{wanted}, the target's")
    wide = frozenset({("qkv", None)})  # whatever else is rounded: `keep` reads a part of it
    layers = tuple(replace(spec, others=wide) for spec in fields["layers"])
    drafter = ModelConfig(architecture="Qwen3ForCausalLM", **{**fields, "layers": layers, "eos_token_ids": ()})
    tensors = frozenset({EMBEDDING, HEAD}.intersection(names))
    before = tuple(layer + 1 for layer in taps)  # entries are layers behind which they read, -1 the embedding
    return DrafterConfig(drafter, folder, before, model.vocab_size, tensors, mask_token_id=mask, markov_rank=markov)


class Drafter(shared.Drafter):
    """Layers that the last token and masks go through, and the output head."""

    skipped = 1
    """Tokens of a pass before the first that one is drafted at."""
    layers: list[DecoderLayer]

    def __init__(self, context: ModelContext, settings: DrafterConfig, target: Any) -> None:
        super().__init__(context, settings, target)
        config, tables, before = context.config, PositionTables.of(context), None
        self._config, self.mask_token_id = config, settings.mask_token_id
        self.hidden_norm = make_norm(context)
        self.layers = nn.ModuleList()  # type: ignore[assignment]  # a list that modules() walks
        for spec in config.layers:
            self.layers.append(before := DecoderLayer(context, spec, tables, before))
        self.norm = taken_in(context, make_norm(context), before)
        head = target.lm_head
        if HEAD in settings.tensors:
            self.lm_head = head = VocabParallelEmbedding(
                context, config.vocab_size, config.hidden_size, config.head_precision
            )
        self.logits, self.vocab_start = head.logits, head.vocab_start

    def taken_in(self, taps: torch.Tensor) -> torch.Tensor:
        return self.hidden_norm(super().taken_in(taps))

    def enter(self, hidden: torch.Tensor, step: ForwardStep) -> None:
        """Stores the entries of a step's tokens, which `taken_in` has made: their keys and values in each layer."""
        for layer in self.layers:
            layer.self_attn.keep(hidden, step)

    def forward(self, token_ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """Token ids int32 [T] -> what `logits` takes [T, hidden], whole on every rank."""
        embedded = self._embed(token_ids)
        stream = Stream(embedded) if self._group.size == 1 else Stream(None, embedded)
        for layer in self.layers:
            stream = layer(stream, step)
        return self.norm(stream)[0]

    def followed(self, logits: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Logits [N, this rank's ids] of tokens that come after `previous`, int32 [N]."""
        return logits

    def attention_layers(self) -> Sequence[PagedAttention]:
        return [layer.self_attn for layer in self.layers]

    def checkpoint_weights(self, prefix: str = "") -> Iterator[CheckpointWeight]:
        yield from super().checkpoint_weights()
        yield from self.hidden_norm.checkpoint_weights("hidden_norm")
        for index, layer in enumerate(self.layers):
            yield from in_checkpoint(layer.checkpoint_weights(f"layers.{index}"), self._config)
        assert self.norm.norm is not None
        yield from self.norm.norm.checkpoint_weights("norm")
        if hasattr(self, "lm_head"):
            yield from self.lm_head.checkpoint_weights("lm_head")


class Passes(ModelDrafter):
    """One pass over the last token of each row and masks."""

    def _enter(self, hidden: torch.Tensor, buffers: StepBuffers, step: ForwardStep, num_rows: int) -> None:
        self.model.enter(hidden, step)

    def draft(self, state: DeviceState, num_rows: int) -> None:
        """Drafts in a pass, of fewer tokens where the row has no block for all of them."""
        num_rows = min(num_rows, self.most_rows)
        rows, model, first, drafted = self.rows, self.model, slice(num_rows), self._num_drafts
        slots, before, latest = rows.slot[first], rows.positions[first], rows.latest[first]
        count, device = model.skipped + drafted, slots.device
        positions = before[:, None] + torch.arange(1, count + 1, dtype=torch.int32, device=device)
        live = (positions <= latest[:, None]) & (rows.row_slot[first] >= 0)[:, None]
        seen = torch.where(live, (positions[:, -1].minimum(latest) + 1)[:, None], 0)
        positions = torch.where(live, positions, 0)
        line = slots.clamp(min=0).long()
        blocks = state.block_table[line[:, None], :, (positions // self._block_size).long()]  # [rows, count, tables]
        places = blocks * self._block_size + (positions % self._block_size)[..., None]
        places = torch.where(live[..., None], places, -1).permute(2, 0, 1).flatten(1)
        ids = torch.full_like(positions, model.mask_token_id)
        ids[:, 0] = previous = state.last_token[line]
        row_slot = torch.where(live, slots[:, None], -1)
        step = self._step(state, row_slot.flatten(), positions.flatten(), seen.flatten(), places.unbind())
        hidden = model(ids.flatten(), step).view(num_rows, count, -1)[:, model.skipped :]
        logits = model.logits(hidden.flatten(0, 1)).view(num_rows, drafted, -1)
        rows.row_slot[first] = row_slot[:, model.skipped]
        latest -= 1 + model.skipped  # `_take` goes on by entries, so far before the tokens at which it drafts
        for place in range(drafted):
            self._take(model.followed(logits[:, place], previous), state, place)
            previous = rows.input_ids[first]
