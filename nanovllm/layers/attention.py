"""Self-attention of one rank's heads over the paged KV cache."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch
from torch.nn.functional import linear

from nanovllm.attention.base import AttentionSpec, KVCache
from nanovllm.kernels.base.padded_rows import empty_rows
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.fp8.reference import GROUP
from nanovllm.kernels.plan.product import Around
from nanovllm.kernels.pointwise.rope import QKNormRope
from nanovllm.layers.context import ModelContext
from nanovllm.layers.heads import HeadSplit, heads_of
from nanovllm.layers.linear import ParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.memory import Pages
from nanovllm.layers.quantized import aligned
from nanovllm.layers.rotary import PositionTables
from nanovllm.layers.step import Call, ForwardStep, wanted_rows
from nanovllm.layers.weights import CheckpointWeight, Piece, WeightedModule, joined, parameter, whole
from nanovllm.model_config import LayerSpec, ModelConfig, Quantization


def attention_spec(config: ModelConfig, layer: LayerSpec, heads: HeadSplit) -> AttentionSpec:
    """Attention that a rank with these heads asks of the backend."""
    scale = layer.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    sizes = (heads.local_heads, heads.local_kv_heads, layer.head_dim)
    return AttentionSpec(*sizes, scale, layer.window, config.attention_softcap, layer.has_sinks)


def _norm_rope(config: ModelConfig, layer: LayerSpec, heads: HeadSplit) -> QKNormRope:
    """Norm and rotation of this layer, as qk_norm_rope_store takes them."""
    rotary_dim = 0 if layer.rope is None else config.ropes[layer.rope].rotary_dim(layer.head_dim)
    kv_heads = 0 if layer.shares_keys else heads.local_kv_heads
    return QKNormRope(
        heads.local_heads, kv_heads, layer.head_dim, rotary_dim, config.qk_norm, config.norm_eps,
        config.qk_norm_after_rope, norm_in_float32=config.norm_kind == "rms_float32",
        rope_in_float32=config.float_rope, value_norm=config.value_norm, values_are_keys=layer.values_are_keys,
    )  # fmt: skip


class GateParallelLinear(ParallelLinear):
    """Gates of this rank's heads: [T, hidden] -> [T, gates, and padding to a multiple of 8]. Wide where the checkpoint
    has a projection for them."""

    def __init__(
        self, context: ModelContext, activation: str, heads: HeadSplit, head_dim: int, precision: Quantization | None
    ) -> None:
        """precision: of the queries' projection."""
        config = context.config
        each = 1 if config.gate_per_head else head_dim
        pieces = (Piece("g_proj", (heads.num_heads * each, config.hidden_size), heads.query_cuts(each)),)
        if config.gate_in_queries:
            shape = (2 * heads.num_heads * head_dim, config.hidden_size)
            pieces = (Piece("q_proj", shape, heads.part_cuts(head_dim, 1, 2)),)
        rows = aligned(heads.local_heads * each)
        precision = precision if config.gate_in_queries else None
        super().__init__(context, "gate", rows, config.hidden_size, pieces=pieces, precision=precision)
        self.kernels, self.activation = context.kernels, activation
        self.elements = head_dim // each
        """Number of elements of attention's result that a gate is for."""

    def gated(self, attended: torch.Tensor, x: torch.Tensor, call: Call) -> torch.Tensor:
        """Multiplies attended [T, heads * head_dim] in place by the activated gates of x [T, hidden]."""
        return self.kernels.gate_heads(attended, self(x, call), self.activation, self.elements)


class PagedAttention:
    """Attention that a layer asks of the backend, over keys and values of its own or of another layer."""

    can_capture = True

    spec: AttentionSpec
    cache: KVCache
    shares_keys = False
    """Keys and values are another layer's."""
    readers: "tuple[PagedAttention, ...]" = ()
    """Others that share its keys and values."""

    @property
    def memory(self) -> tuple[Pages, ...]:
        """Declarations of what it remembers; see layers/memory.py."""
        spec = self.spec
        pages = Pages(spec.num_kv_heads, (spec.head_dim, spec.head_dim), spec.window, takes_fp8=True)
        return () if self.shares_keys else (pages,)

    def bind(self, *memory: KVCache) -> None:
        """Takes its part of the KV cache, if it has one, for those that share it too."""
        for cache in memory:
            for one in (self, *self.readers):
                one.cache = cache


class Attention(WeightedModule, PagedAttention):
    """Projections, QK-norm, rotary embedding, KV store and attention: [T, hidden] -> [T, hidden], a partial sum."""

    def __init__(
        self, context: ModelContext, layer: LayerSpec, tables: PositionTables, around: Around,
        in_features: int | None = None,
    ) -> None:  # fmt: skip
        """in_features: of the rows; None: the hidden size."""
        super().__init__()
        config = context.config
        self.group, self.kernels, self.shares_keys = context.group, context.kernels, layer.shares_keys
        self.heads = heads = heads_of(config, layer, self.group.rank, self.group.size)
        self.spec, self.norm_rope = attention_spec(config, layer, heads), _norm_rope(config, layer, heads)
        self.cos_sin = None if layer.rope is None else tables.cos_sin[layer.rope, layer.head_dim]
        self.query_scale = tables.query_scale
        dtype, device = context.dtype, context.device
        head_dim, hidden_size = layer.head_dim, config.hidden_size
        gate = config.attention_gate
        self.qkv_proj = QKVParallelLinear(
            context, in_features or hidden_size, heads, head_dim, bias=config.qkv_bias,
            precision=layer.precision("qkv"), around=around.first() if gate is None else Around(),
            query_parts=2 if config.gate_in_queries else 1,
            others=() if layer.shares_keys else ("k_proj", "v_proj")[: 1 if layer.values_are_keys else 2],
        )  # fmt: skip
        before = "attention" if head_dim == GROUP and gate is None else "wide attention"
        self.o_proj = RowParallelLinear(
            context, heads.num_heads * head_dim, hidden_size, name="o", bias=config.o_bias, pads=False,
            precision=layer.precision("o"), around=around.last(before),
        )  # fmt: skip
        self.g_proj = None
        if gate is not None:
            self.g_proj = GateParallelLinear(context, gate, heads, head_dim, layer.precision("qkv"))
        between = () if self.g_proj is None else (self.g_proj.product,)
        self.operations = (self.qkv_proj.product, *between, self.o_proj.product)
        self.q_norm_weight = self.k_norm_weight = self.sinks = None
        self._norm_offset = float(config.norm_adds_one)
        """Number that the checkpoint's norm weights lack: 1 where a model multiplies by 1 + weight. The sum is kept in
        float32."""
        self._norms_are_loaded = config.qk_norm_scale is None
        if config.qk_norm_scale is not None:
            self.q_norm_weight = torch.full((head_dim,), config.qk_norm_scale, dtype=dtype, device=device)
            self.k_norm_weight = torch.ones(head_dim, dtype=dtype, device=device)
        elif config.qk_norm is not None:
            norm_dtype = torch.float32 if config.norm_adds_one else dtype
            counts = (1, 1) if config.qk_norm == "head" else (heads.local_heads, heads.local_kv_heads)
            self.q_norm_weight, self.k_norm_weight = (
                parameter(count * head_dim, dtype=norm_dtype, device=device) for count in counts
            )
        if layer.shares_keys:
            self.k_norm_weight = self.q_norm_weight  # of no keys
        if config.qk_norm == "width":
            counted = torch.tensor(heads.kv_heads_held_first, dtype=torch.float32, device=device)
            self._k_shares = counted / (heads.num_kv_heads * head_dim)
        if layer.has_sinks:
            self.sinks = parameter(heads.local_heads, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor | FP8Rows, call: Call) -> torch.Tensor:
        """The result of the wanted tokens, [N, hidden], as call.residual is; all have their keys stored."""
        assert call.step is not None
        wanted, attended = call.step.wanted, self.attend(self.qkv_proj(x, call), call)
        if isinstance(attended, FP8Rows):
            return self.o_proj(attended, call)
        if wanted is not None:
            call, attended = call._replace(rows=wanted), wanted_rows(attended, wanted)
        if not attended.shape[0]:  # GEMMs take one row or more
            return attended.new_empty(0, self.o_proj.product.n)
        if self.g_proj is not None:
            assert isinstance(x, torch.Tensor)  # nobody rounds what a gate takes
            attended = self.g_proj.gated(attended, wanted_rows(x, wanted), call)
        return self.o_proj(attended, call)

    def attend(self, qkv: torch.Tensor, call: Call) -> torch.Tensor | FP8Rows:
        """Computes everything between the projections: [T, (heads + 2 * kv_heads) * head_dim], without values of their
        own fewer, -> [T, heads * head_dim], rounded only where all are wanted."""
        cache, step = self.cache, call.step
        assert step is not None
        q = self._stored(qkv, self.norm_rope, step, self.qkv_proj.bias)
        out = empty_rows(q.shape[0], q.shape[1] * q.shape[2], qkv.dtype, q.device).view(q.shape)
        behind = self.o_proj.launch(q.shape[0], call)
        if behind.rounded and step.wanted is not None:
            behind = replace(behind, rounded=False)
        attended = step.backend.forward(q, cache, step.attention, out, self.spec, self.sinks, behind)
        return attended if isinstance(attended, FP8Rows) else out.view(out.shape[0], -1)

    def keep(self, x: torch.Tensor, step: ForwardStep) -> None:
        """Stores keys and values of rows x [T, hidden] that ask for nothing. Weights must not be quantised."""
        weight, bias, rules = self.qkv_proj.weight, self.qkv_proj.bias, self.norm_rope
        first = rules.num_heads * rules.head_dim
        kv = linear(x, weight[first:])
        self._stored(kv, replace(rules, num_heads=0), step, None if bias is None else bias[first:])

    def _stored(
        self, qkv: torch.Tensor, rules: QKNormRope, step: ForwardStep, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The queries of qkv, see qk_norm_rope_store, which stores its keys and values."""
        cache = self.cache
        return self.kernels.qk_norm_rope_store(
            qkv, rules, step.positions, step.slot_mappings[cache.table], cache.k, cache.v,
            cos_sin=self.cos_sin, q_norm_weight=self.q_norm_weight, k_norm_weight=self.k_norm_weight,
            mean_squares=self._mean_squares(qkv) if rules.norm == "width" else None, bias=bias,
            query_scale=self.query_scale, kv_scales=cache.scales,
        )  # fmt: skip

    def _mean_squares(self, qkv: torch.Tensor) -> torch.Tensor:
        """float32 [T, 2]: of the whole model's queries and keys, the same on every rank."""
        q_share = 1 / (self.heads.num_heads * self.spec.head_dim)
        part = self.kernels.qk_mean_squares(qkv, self.norm_rope, q_share, self._k_shares, self.qkv_proj.bias)
        return self.group.all_reduce(part)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        gates = () if self.g_proj is None else self.g_proj.checkpoint_weights(prefix)
        yield from joined(chain(self.qkv_proj.checkpoint_weights(prefix), gates))
        yield from self.o_proj.checkpoint_weights(f"{prefix}.o_proj")
        if self._norms_are_loaded and self.q_norm_weight is not None and self.k_norm_weight is not None:
            offset, heads = self._norm_offset, self.heads
            of_q, of_k = (whole, whole) if self.norm_rope.norm == "head" else (heads.query_weight, heads.kv_weight)
            yield replace(of_q(f"{prefix}.q_norm.weight", self.q_norm_weight), offset=offset)
            if not self.shares_keys:
                yield replace(of_k(f"{prefix}.k_norm.weight", self.k_norm_weight), offset=offset)
        if self.sinks is not None:
            yield self.heads.query_weight(f"{prefix}.sinks", self.sinks)
