"""The decoder of all families, with their switches (ModelConfig): x + attention(norm(x)), then x + mlp(norm(x)), where
norms may come after a block too, or only there, or both blocks run side by side.

A norm and the addition before it are one step here, the joint (ReduceAddNorm), since the ranks' partial sums meet
there. So each block starts by taking in the result of the block before it, a layer hands on (partial sum of its MLP,
residual stream), and a layer communicates exactly twice.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanovllm.attention.base import AttentionBackend, AttentionSpec
from nanovllm.layers.attention import Attention, ForwardStep, attention_spec, wanted_rows
from nanovllm.layers.context import LayerContext
from nanovllm.layers.heads import heads_of
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.mlp import MLP
from nanovllm.layers.moe import MoE
from nanovllm.layers.norm import ReduceAddNorm, RowNorm
from nanovllm.layers.rotary import cos_sin_table
from nanovllm.layers.vocab import VocabParallelEmbedding
from nanovllm.layers.weights import CheckpointWeight, WeightedModule
from nanovllm.model_config import LayerSpec, ModelConfig
from nanovllm.models.renaming import in_checkpoint
from nanovllm.parallel.two_batch import Block, run_micro_batches


@dataclass(frozen=True)
class ModelContext(LayerContext):
    """What a model is built with on one rank."""

    config: ModelConfig
    backend: AttentionBackend
    max_model_len: int

    def norm(self) -> RowNorm:
        config = self.config
        return RowNorm(
            self, config.hidden_size, config.norm_eps, kind=config.norm_kind, adds_one=config.norm_adds_one,
            has_bias=config.norm_bias,
        )  # fmt: skip

    def joint(self, norm: RowNorm | None, after: RowNorm | None) -> ReduceAddNorm:
        return ReduceAddNorm(self, norm, after, self.config.residual_multiplier)


def attention_specs(config: ModelConfig, rank: int, size: int) -> tuple[AttentionSpec, ...]:
    """The kinds of attention layers of one of `size` ranks, each once."""
    specs = (attention_spec(config, layer, heads_of(config, layer, rank, size)) for layer in config.layers)
    return tuple(dict.fromkeys(specs))


@dataclass(frozen=True)
class PositionTables:
    """What depends on the position alone, one for all layers; lengths are the engine's longest context."""

    cos_sin: dict[str, torch.Tensor]
    """By name; see cos_sin_table."""
    query_scale: torch.Tensor | None
    """float32 [max_position]: factor on queries."""

    @classmethod
    def of(cls, context: ModelContext) -> "PositionTables":
        config, length, device = context.config, context.max_model_len, context.device
        args = (config.head_dim, length, config.max_position_embeddings, device)
        scale = None
        if config.query_scaling is not None:
            beta, original = config.query_scaling
            positions = torch.arange(length, dtype=torch.float32, device="cpu")
            scale = (1 + beta * torch.log1p(torch.floor(positions / original))).to(device)
        return cls({name: cos_sin_table(rope, *args) for name, rope in config.ropes.items()}, scale)


def dense_mlp(context: ModelContext, spec: LayerSpec) -> MLP:
    config = context.config
    return MLP(
        context, config.hidden_size, config.intermediate_size, activation=config.activation, gated=config.gated_mlp,
        bias=config.mlp_bias, precisions=(spec.precision("gate_up"), spec.precision("down")),
    )  # fmt: skip


def moe_mlp(context: ModelContext, spec: LayerSpec) -> MoE:
    assert context.config.moe is not None
    return MoE(context, context.config.hidden_size, context.config.moe, spec.precision)


MLPS: dict[str, Callable[[ModelContext, LayerSpec], Any]] = {"dense": dense_mlp, "moe": moe_mlp}
"""What builds a layer's MLP, by LayerSpec.mlp: [T, hidden] -> [T, hidden], a partial sum."""


class DecoderLayer(WeightedModule):
    """Attention and MLP with the joints before each."""

    def __init__(
        self, context: ModelContext, spec: LayerSpec, tables: PositionTables, incoming: RowNorm | None
    ) -> None:
        """incoming: the norm of what the layer before this one hands on, where that has one."""
        super().__init__()
        place = context.config.norm_placement
        self.signature: Hashable = spec.signature
        self.is_parallel = place == "parallel"
        self.norms: dict[str, RowNorm] = {}
        if place != "post":
            self.norms["attention_norm"] = context.norm()
        if place in ("post", "sandwich"):
            self.norms["attention_out_norm"], self.norms["mlp_out_norm"] = context.norm(), context.norm()
        if place in ("pre", "sandwich"):
            self.norms["mlp_norm"] = context.norm()
        get = self.norms.get
        self.input_layernorm = context.joint(get("attention_norm"), incoming)
        cos_sin = None if spec.rope is None else tables.cos_sin[spec.rope]
        self.self_attn = Attention(context, context.config, spec, context.backend, cos_sin, tables.query_scale)
        self.mlp: Any = MLPS[spec.mlp](context, spec)
        if self.is_parallel:
            for module in self.modules():
                if isinstance(module, RowParallelLinear):
                    module.takes_parts = False  # the blocks' results are added before a joint sees them
        else:
            self.post_attention_layernorm = context.joint(get("mlp_norm"), get("attention_out_norm"))
            self.input_layernorm.rounds = self.self_attn.qkv_proj.takes_rounded
            self.post_attention_layernorm.rounds = self.mlp.takes_rounded

    def forward(
        self, partial: torch.Tensor, residual: torch.Tensor | None, step: ForwardStep,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """`wanted` int [N], on one rank: the tokens whose results are read, here and in what follows."""
        x, residual = self.input_layernorm(partial, residual)
        if wanted is not None and not wanted.shape[0]:  # GEMMs take one row or more
            self.self_attn.attend(self.self_attn.qkv_proj(x), step)
            return residual[:0], residual[:0]
        attended = self.self_attn(x, step, wanted)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
        if self.is_parallel:
            return attended + self.mlp(wanted_rows(x, wanted)), residual
        x, residual = self.post_attention_layernorm(attended, residual)
        return self.mlp(x), residual

    def precedes(self, joint: ReduceAddNorm) -> None:
        """Tells the joints that take in its sums, its own and `joint` behind it, after which rows PDL gains."""
        if not self.is_parallel:
            self.post_attention_layernorm.dependent_rows = self.self_attn.o_proj.pdl_rows
            joint.dependent_rows = getattr(self.mlp, "pdl_rows", frozenset())

    def blocks(self, steps: tuple[ForwardStep, ForwardStep]) -> Iterator[Block]:
        """The same as joints and what follows each, for the halves of a step (run_micro_batches)."""
        if self.is_parallel:
            yield self.input_layernorm, lambda x, half: self.self_attn(x, steps[half]) + self.mlp(x)
        else:
            yield self.input_layernorm, lambda x, half: self.self_attn(x, steps[half])
            yield self.post_attention_layernorm, lambda x, half: self.mlp(x)

    def forward_fused(self, residual: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """The same layer for a handful of rows on one rank, with norm, activation and residual inside our
        skinny GEMM kernels; updates and returns `residual`. For layers that can_fuse."""
        attention, mlp, joint = self.self_attn, self.mlp, self.input_layernorm
        qkv = attention.qkv_proj.forward_normed(residual, joint.row_norm, joint.kernels)
        attention.o_proj.add_to(residual, attention.attend(qkv, step))
        return mlp.add_normed_to(residual, self.post_attention_layernorm.row_norm)

    @property
    def can_fuse(self) -> bool:
        return not self.is_parallel and self.input_layernorm.is_plain and getattr(self.mlp, "can_fuse", False)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for name, norm in self.norms.items():
            yield from norm.checkpoint_weights(f"{prefix}.{name}")
        yield from self.self_attn.checkpoint_weights(f"{prefix}.self_attn")
        yield from self.mlp.checkpoint_weights(f"{prefix}.mlp")


class DecoderForCausalLM(WeightedModule):
    """One rank's share of the model."""

    layers: list[DecoderLayer]

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        self.config = config = context.config
        tables = PositionTables.of(context)
        self.embed_tokens = VocabParallelEmbedding(context, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList()  # type: ignore[assignment]  # a list that modules() walks
        incoming = None
        for spec in config.layers:
            self.layers.append(layer := DecoderLayer(context, spec, tables, incoming))
            incoming = layer.norms.get("mlp_out_norm")
        self.norm = context.joint(context.norm(), incoming)
        joints = [*(layer.input_layernorm for layer in self.layers), self.norm]
        for layer, joint in zip(self.layers, joints[1:], strict=True):
            layer.precedes(joint)
        self.group = context.group
        self.fused_rows: set[int] = set()
        """Numbers of rows that take forward_fused; set with the kernels' choices (runner/tuning.py)."""
        self.can_fuse = self.norm.is_plain and all(layer.can_fuse for layer in self.layers)
        """forward_fused computes the same: an addition and an RMSNorm at each joint, SwiGLU, no multipliers."""
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = VocabParallelEmbedding(context, config.vocab_size, config.hidden_size)
        self._embedding_multiplier = config.embedding_multiplier
        if config.rounds_embedding_multiplier:
            self._embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=context.dtype).item()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids int32 [T] -> [T, hidden], a partial sum."""
        x = self.embed_tokens.embed(input_ids)
        return x if self._embedding_multiplier == 1.0 else x.mul_(self._embedding_multiplier)

    def forward(self, input_ids: torch.Tensor, step: ForwardStep, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Token ids int32 [T] -> final hidden states [T, hidden], normalised and complete on every rank; of the tokens
        `wanted`, int [N], alone [N, hidden].

        Of a prompt only the last token is sampled from, and what the last layer does after its attention goes nowhere
        else: one rank leaves it out for the others. (With several, rows of the residual stream are not all here.)
        """
        if input_ids.shape[0] in self.fused_rows:
            hidden = self.embed(input_ids)
            for layer in self.layers:
                hidden = layer.forward_fused(hidden, step)
            return wanted_rows(self.norm(hidden, None)[0], wanted)
        partial, residual = self.embed(input_ids), None
        *layers, last = self.layers
        for layer in layers:
            partial, residual = layer(partial, residual, step)
        chosen_early = self.group.size == 1
        partial, residual = last(partial, residual, step, wanted if chosen_early else None)
        hidden = self.norm(partial, residual)[0]
        return hidden if chosen_early else wanted_rows(hidden, wanted)

    def forward_two_batch(
        self, input_ids: torch.Tensor, steps: tuple[ForwardStep, ForwardStep], wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """forward for many tokens on several ranks, cut into two halves (parallel/two_batch.py)."""
        first, second = input_ids.split([step.positions.shape[0] for step in steps])
        blocks = [block for layer in self.layers for block in layer.blocks(steps)]
        return wanted_rows(run_micro_batches((self.embed(first), self.embed(second)), blocks, self.norm), wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, hidden] -> logits [B, this rank's part of the padded vocabulary]."""
        logits, cap = self.lm_head.logits(hidden), self.config.logits_softcap
        if self.config.logits_multiplier != 1.0:
            logits.mul_(self.config.logits_multiplier)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def attention_layers(self) -> list[Attention]:
        return [layer.self_attn for layer in self.layers]

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Within it the model has two layers of each signature. They launch every kernel that all would: layers of one
        signature differ in their weights alone, but a prompt leaves rows out of the last one."""
        layers, found = self.layers, Counter[Hashable]()
        kept = nn.ModuleList()
        for layer in layers:
            found[layer.signature] += 1
            if found[layer.signature] <= 2:
                kept.append(layer)
        self.layers = kept  # type: ignore[assignment]
        try:
            yield
        finally:
            self.layers = layers

    def checkpoint_weights(self, prefix: str = "model") -> Iterator[CheckpointWeight]:
        """All tensors by their names in the checkpoint (of one whose names are stripped; see CheckpointNames)."""
        return in_checkpoint(self._canonical_weights(prefix), self.config)

    def _canonical_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.embed_tokens.checkpoint_weights(f"{prefix}.embed_tokens")
        for index, layer in enumerate(self.layers):
            yield from layer.checkpoint_weights(f"{prefix}.layers.{index}")
        assert self.norm.norm is not None
        yield from self.norm.norm.checkpoint_weights(f"{prefix}.norm")
        if self.lm_head is not self.embed_tokens:
            yield from self.lm_head.checkpoint_weights("lm_head")
