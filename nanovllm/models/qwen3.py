"""Qwen3, dense (Qwen3 Technical Report, arXiv 2505.09388, section 2): grouped-query attention with QK-norm, SwiGLU,
RMSNorm before each block, rotary embedding, embeddings tied to the head in the small sizes.

Each block starts by taking in the partial sums of the block before it (see ReduceAddNorm), so a layer hands on
(partial sum of its MLP, residual stream) and communicates exactly twice.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nanovllm.attention.base import AttentionBackend, AttentionSpec
from nanovllm.kernels import Kernels
from nanovllm.kernels.gemm.push import Partial
from nanovllm.layers.attention import Attention, AttentionOptions, ForwardStep, wanted_rows
from nanovllm.layers.few_rows import linear_residual, linear_silu_mul, norm_linear, norm_linear_silu_mul
from nanovllm.layers.linear import HeadSplit, MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.norm import Normed, ReduceAddNorm
from nanovllm.layers.rotary import cos_sin_table
from nanovllm.layers.vocab import VocabParallelEmbedding
from nanovllm.layers.weights import CheckpointWeight, WeightedModule
from nanovllm.model_config import FULL, LayerSpec, ModelConfig
from nanovllm.parallel.group import TensorParallelGroup
from nanovllm.parallel.two_batch import UnderWay

Halves = tuple[UnderWay[Normed], UnderWay[Normed]]
"""The norms that a block starts with, of a step's first and second half of tokens."""
HalfSteps = tuple[ForwardStep, ForwardStep]


@dataclass(frozen=True)
class ModelContext:
    """What a model is built with on one rank."""

    config: ModelConfig
    heads: HeadSplit
    group: TensorParallelGroup
    kernels: Kernels
    backend: AttentionBackend
    dtype: torch.dtype
    device: torch.device
    max_model_len: int

    def norm(self) -> ReduceAddNorm:
        config = self.config
        return ReduceAddNorm(config.hidden_size, config.norm_eps, self.group, self.kernels, self.dtype, self.device)


def attention_options(config: ModelConfig, layer: LayerSpec) -> AttentionOptions:
    """What an attention layer is built with."""
    return AttentionOptions(
        head_dim=layer.head_dim,
        scale=config.attention_scale,
        window=layer.window,
        softcap=config.attention_softcap,
        has_sinks=layer.has_sinks,
        rotary_dim=config.ropes[layer.rope].rotary_dim(layer.head_dim) if layer.rope else 0,
        rope_in_float32=config.float_rope,
        qk_norm=config.qk_norm,
        norm_after_rope=config.qk_norm_after_rope,
        norm_in_float32=config.norm_kind == "rms_float32",
        eps=config.norm_eps,
        norm_weight_offset=float(config.norm_adds_one),
        qkv_bias=config.qkv_bias,
    )


def attention_specs(config: ModelConfig, rank: int, size: int) -> tuple[AttentionSpec, ...]:
    """The kinds of attention layers of one of `size` ranks, each once."""
    specs = (
        attention_options(config, layer).spec(HeadSplit(config.num_attention_heads, layer.num_kv_heads, rank, size))
        for layer in config.layers
    )
    return tuple(dict.fromkeys(specs))


class Qwen3MLP(WeightedModule):
    """SwiGLU: [T, hidden] -> [T, hidden], a partial sum."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        config, group, dtype, device = context.config, context.group, context.dtype, context.device
        outputs = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.kernels = context.kernels
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, outputs, group, dtype, device)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, group, dtype, device)

    def forward(self, x: torch.Tensor) -> Partial:
        return self.down_proj(linear_silu_mul(x, self.gate_up_proj, self.kernels))

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.gate_up_proj.checkpoint_weights(prefix)
        yield from self.down_proj.checkpoint_weights(f"{prefix}.down_proj")


class Qwen3DecoderLayer(WeightedModule):
    def __init__(self, context: ModelContext, cos_sin: torch.Tensor) -> None:
        super().__init__()
        config = context.config
        self.input_layernorm = context.norm()
        parts = (context.group, context.kernels, context.backend, context.dtype, context.device)
        options = attention_options(config, config.layers[0])
        self.self_attn = Attention(config.hidden_size, context.heads, options, cos_sin, *parts)
        self.post_attention_layernorm = context.norm()
        self.mlp = Qwen3MLP(context)

    def forward(
        self,
        partial: Partial,
        residual: torch.Tensor | None,
        step: ForwardStep,
        wanted: torch.Tensor | None = None,
    ) -> tuple[Partial, torch.Tensor]:
        """`wanted` int [N], on one rank: the tokens whose results anybody will read, here and in what follows."""
        x, residual = self.input_layernorm(partial, residual)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
        x, residual = self.post_attention_layernorm(self.self_attn(x, step, wanted), residual)
        return self.mlp(x), residual

    def forward_in_halves(self, halves: Halves, steps: HalfSteps, following: ReduceAddNorm) -> Halves:
        """The same layer where each half's sums run beside what the other computes. The second half's attention comes
        behind the first half's keys. `following`: the norm that comes after this layer, which is started."""

        def attend(x: torch.Tensor, half: int) -> Partial:
            return self.self_attn(x, steps[half])

        halves = self._each_half(halves, attend, self.post_attention_layernorm)
        return self._each_half(halves, lambda x, half: self.mlp(x), following)

    @staticmethod
    def _each_half(halves: Halves, block: Callable[[torch.Tensor, int], Partial], norm: ReduceAddNorm) -> Halves:
        """Takes in each half's norm, runs `block` on it, and starts the next norm."""
        (x, residual), other = halves[0].wait(), halves[1]
        first = norm.start(block(x, 0), residual, 0)
        x, residual = other.wait()
        return first, norm.start(block(x, 1), residual, 1)

    def forward_few_rows(self, residual: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """The same layer for a handful of rows on one rank, with norm, activation and residual inside the products that
        our kernels make; updates and returns `residual`."""
        attention, mlp = self.self_attn, self.mlp
        qkv = norm_linear(residual, self.input_layernorm, attention.qkv_proj)
        linear_residual(attention.attend(qkv, step), attention.o_proj, residual)
        activated = norm_linear_silu_mul(residual, self.post_attention_layernorm, mlp.gate_up_proj)
        return linear_residual(activated, mlp.down_proj, residual)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for name, module in self.named_children():
            assert isinstance(module, WeightedModule)
            yield from module.checkpoint_weights(f"{prefix}.{name}")


class Qwen3ForCausalLM(WeightedModule):
    """One rank's share of the model."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        config = context.config
        self.cos_sin = cos_sin_table(
            config.ropes[FULL], config.head_dim, context.max_model_len, config.max_position_embeddings, context.device
        )
        parts = (context.group, context.kernels, context.dtype, context.device)
        vocab = (config.vocab_size, config.hidden_size, *parts)
        self.embed_tokens = VocabParallelEmbedding(*vocab)
        self.layers = [Qwen3DecoderLayer(context, self.cos_sin) for _ in range(config.num_hidden_layers)]
        self.norm = context.norm()
        self.group = context.group
        self.fused_rows: set[int] = set()
        """Numbers of rows that take forward_few_rows; set with the kernels' choices (runner/tuning.py)."""
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else VocabParallelEmbedding(*vocab)

    def forward(self, input_ids: torch.Tensor, step: ForwardStep, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Token ids int32 [T] -> final hidden states [T, hidden], normalised and complete on every rank; of the tokens
        `wanted`, int [N], alone [N, hidden].

        Of a prompt only the last token is drawn from, and what the last layer does after its attention goes nowhere
        else: one rank leaves it out for the others. (With several, rows of the residual stream are not all here.)
        """
        if input_ids.shape[0] in self.fused_rows:
            hidden = self.embed_tokens.embed(input_ids)
            for layer in self.layers:
                hidden = layer.forward_few_rows(hidden, step)
            return wanted_rows(self.norm(hidden, None)[0], wanted)
        partial, residual = self.embed_tokens.embed(input_ids), None
        for layer in self.layers[:-1]:
            partial, residual = layer(partial, residual, step)
        chosen_early = self.group.size == 1
        partial, residual = self.layers[-1](partial, residual, step, wanted if chosen_early else None)
        hidden = self.norm(partial, residual)[0]
        return hidden if chosen_early else wanted_rows(hidden, wanted)

    def forward_in_halves(
        self, input_ids: torch.Tensor, steps: HalfSteps, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """forward for many tokens on several ranks, cut into two halves (parallel/two_batch.py)."""
        first, second = input_ids.split([step.positions.shape[0] for step in steps])
        norms = [*(layer.input_layernorm for layer in self.layers), self.norm]
        embed = self.embed_tokens.embed
        halves = norms[0].start(embed(first), None, 0), norms[0].start(embed(second), None, 1)
        for layer, following in zip(self.layers, norms[1:], strict=True):
            halves = layer.forward_in_halves(halves, steps, following)
        return wanted_rows(torch.cat([half.wait()[0] for half in halves]), wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, hidden] -> logits [B, this rank's part of the padded vocabulary]."""
        return self.lm_head.logits(hidden)

    def attention_layers(self) -> list[Attention]:
        return [layer.self_attn for layer in self.layers]

    def checkpoint_weights(self, prefix: str = "model") -> Iterator[CheckpointWeight]:
        yield from self.embed_tokens.checkpoint_weights(f"{prefix}.embed_tokens")
        for index, layer in enumerate(self.layers):
            yield from layer.checkpoint_weights(f"{prefix}.layers.{index}")
        yield from self.norm.checkpoint_weights(f"{prefix}.norm")
        if self.lm_head is not self.embed_tokens:
            yield from self.lm_head.checkpoint_weights("lm_head")
