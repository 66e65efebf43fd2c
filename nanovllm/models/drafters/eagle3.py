"""EAGLE-3 (Li et al., arXiv 2503.01840): one layer, which attends over pairs of a token and the target's hidden states
before it, taken in from three layers; and the switches of EAGLE-3.1 (arXiv 2605.09992).

Checkpoints are those of its authors and of SpecForge (`midlayer.*`) or of speculators (`layers.0.*`,
`transformer_layer_config`).
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from nanovllm.errors import is_integer, refuse
from nanovllm.kernels.plan.product import SUMMED_AFTER, Around
from nanovllm.kernels.pointwise.norm import add_up
from nanovllm.layers.attention import Attention, PagedAttention
from nanovllm.layers.context import ModelContext
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.norm import RowNorm
from nanovllm.layers.rotary import PositionTables
from nanovllm.layers.step import OUTSIDE, Call, ForwardStep, wanted_rows
from nanovllm.layers.vocab import VocabParallelEmbedding
from nanovllm.layers.weights import CheckpointWeight, WeightedModule, parameter, whole
from nanovllm.model_config import DrafterConfig, ModelConfig
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.decoder import dense_mlp, make_norm
from nanovllm.models.families.llama import read_llama

_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_EMBEDDING, _OFFSETS = "embed_tokens.weight", "d2t"
_LAYERS = "eagle_aux_hidden_state_layer_ids"


def canonical(name: str) -> str | None:
    """Our name of a checkpoint's tensor; None: it is not needed."""
    name = name.removeprefix("model.")
    return None if name == "t2d" or name.endswith(".inv_freq") else name.replace("layers.0.", "midlayer.")


def read(raw: dict[str, Any], folder: str, model: ModelConfig, names: Collection[str]) -> DrafterConfig:
    """raw: config.json; names: of the checkpoint's tensors, empty where there is none. Raises ValueError for what
    cannot draft for `model`."""
    layer = raw.get("transformer_layer_config", {})
    if not isinstance(layer, dict):
        refuse("transformer_layer_config", layer, "a dict")
    config = ConfigReader({"num_hidden_layers": 1, **layer, **raw})
    config.require("num_hidden_layers", 1)
    nested = ConfigReader(config.get("eagle_config", {}))
    nested.require("use_aux_hidden_state", True)
    config.require("target_hidden_size", model.hidden_size)
    count = len(model.layers)
    taps = nested.get(_LAYERS, config.get(_LAYERS, [2, count // 2, count - 3]))
    numbers = isinstance(taps, list) and all(is_integer(tap) and 0 <= tap < count for tap in taps)
    if not numbers or not taps or sorted(set(taps)) != taps:
        refuse(_LAYERS, taps, f"ascending numbers from 0 to {count - 1}, below the target's layers")
    config.require("num_aux_hidden_states", len(taps))
    switches = frozenset(name for name in _SWITCHES if config.flag(name))
    drafted = config.integer("draft_vocab_size", config.integer("vocab_size"))
    if drafted > model.vocab_size:
        refuse("draft_vocab_size", drafted, f"at most {model.vocab_size}, the target's vocab_size")
    fields = read_llama(config, {})
    config.finish()
    tensors = frozenset({_EMBEDDING, _OFFSETS}.intersection(names))
    if _EMBEDDING in tensors and fields["vocab_size"] < model.vocab_size:
        refuse("vocab_size", fields["vocab_size"], f"at least {model.vocab_size}, the target's")
    if _EMBEDDING not in tensors and fields["hidden_size"] != model.hidden_size:
        refuse("hidden_size", fields["hidden_size"], f"{model.hidden_size}, the target's, whose embedding it takes")
    own = ModelConfig(architecture="LlamaForCausalLMEagle3", **{**fields, "eos_token_ids": ()})
    return DrafterConfig(own, folder, tuple(taps), drafted, tensors, switches)


class Drafter(WeightedModule):
    """See models/drafters/__init__.py."""

    def __init__(self, context: ModelContext, settings: DrafterConfig, target: Any) -> None:
        super().__init__()
        config, [spec], switches = context.config, context.config.layers, settings.switches
        hidden_size, width = config.hidden_size, target.config.hidden_size
        self._group, self._kernels, self._dtype = context.group, context.kernels, context.dtype
        self._shares_width = hidden_size == width  # as peer memory was laid out for
        self._feeds_normed, self._keeps_normed = "norm_output" in switches, "norm_before_residual" in switches
        embedding = target.embed_tokens
        if _EMBEDDING in settings.tensors:
            self.embed_tokens = embedding = VocabParallelEmbedding(context, config.vocab_size, hidden_size)
        self._embed = embedding.embed
        norms = [width] * len(settings.taps) if "fc_norm" in switches else []
        self.fc_norm = nn.ModuleList(RowNorm(context, size, config.norm_eps) for size in norms)
        self.input_norm = None
        if "norm_before_fc" in switches:
            self.input_norm = RowNorm(context, width * len(settings.taps), config.norm_eps)
        self.fc = RowParallelLinear(context, width * len(settings.taps), hidden_size)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm, self.norm = (
            make_norm(context) for _ in range(4)
        )
        self.self_attn = Attention(context, spec, PositionTables.of(context), Around(adds_parts=True), 2 * hidden_size)
        self.mlp = dense_mlp(context, spec, SUMMED_AFTER)
        self.lm_head = VocabParallelEmbedding(context, settings.vocab_size, hidden_size)
        self.vocab_start = self.lm_head.vocab_start
        self.offsets = parameter(settings.vocab_size, dtype=torch.int64, device=context.device)
        self._has_offsets = _OFFSETS in settings.tensors
        if not self._has_offsets:
            self.offsets.zero_()
        self._target_vocab = target.config.vocab_size

    def taken_in(self, taps: torch.Tensor) -> torch.Tensor:
        """Residual streams [T, taps * hidden of the target] -> [T, hidden], whole on every rank."""
        if len(self.fc_norm):
            norms: list[Any] = list(self.fc_norm)
            parts = zip(norms, taps.chunk(len(norms), 1), strict=True)
            taps = torch.cat([self._normed(part.contiguous(), norm) for norm, part in parts], 1)
        if self.input_norm is not None:
            taps = self._normed(taps, self.input_norm)
        if self._group.size > 1:
            size = self.fc.product.k
            taps = taps[:, self._group.rank * size :][:, :size]
            taps = pad(taps, (0, size - taps.shape[1])).contiguous()
        return self._sum(self.fc(taps, OUTSIDE))

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Drafter.__call__."""
        embedded = self._normed(self._sum(self._embed(token_ids)), self.input_layernorm)
        normed = self._normed(hidden, self.hidden_norm)
        attended = self.self_attn(torch.cat([embedded, normed], 1), Call(step))
        residual = wanted_rows(normed if self._keeps_normed else hidden, step.wanted)
        if not residual.shape[0]:
            return residual, residual
        x, residual = self._add(attended, residual, self.post_attention_layernorm)
        x, residual = self._add(self.mlp(x, Call(step, step.wanted)), residual, self.norm)
        return x, x if self._feeds_normed else residual

    def _normed(self, x: torch.Tensor, norm: RowNorm) -> torch.Tensor:
        found, _ = self._kernels.add_norms(x, None, norm.for_kernel())
        assert isinstance(found, torch.Tensor)
        return found

    def _add(self, partial: torch.Tensor, residual: torch.Tensor, norm: RowNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds a partial sum to the residual, in place; returns the normalised rows too."""
        x, residual = self._kernels.add_norms(self._sum(partial), residual, norm.for_kernel())
        assert isinstance(x, torch.Tensor)
        return x, residual

    def _sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The ranks' partial sum [T, hidden], or parts of one, whole on every rank."""
        peers = self._group.fused_all_reduce(partial.shape[-2]) if self._shares_width else None
        if peers is not None:
            return peers.all_reduce(partial)
        if partial.dim() == 3:
            partial = add_up(partial, self._dtype, self._group.exact_bits == "tp")
        return self._group.all_reduce(partial) if self._group.size > 1 else partial

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head.logits(x)

    def attention_layers(self) -> Sequence[PagedAttention]:
        return [self.self_attn]

    def checkpoint_weights(self, prefix: str = "") -> Iterator[CheckpointWeight]:
        if hasattr(self, "embed_tokens"):
            yield from self.embed_tokens.checkpoint_weights("embed_tokens")
        for number, norm in enumerate(self.fc_norm):
            assert isinstance(norm, RowNorm)
            yield from norm.checkpoint_weights(f"fc_norm.{number}")
        if self.input_norm is not None:
            yield from self.input_norm.checkpoint_weights("input_norm")
        yield from self.fc.checkpoint_weights("fc")
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
