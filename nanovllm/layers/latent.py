"""Latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1), the mixer of DeepSeek-V2 and V3, Kimi-K2,
GLM-4.7-Flash and Mistral 4."""

from collections.abc import Iterator

import torch

from nanovllm.attention.base import AttentionSpec
from nanovllm.kernels.plan.product import Around
from nanovllm.kernels.pointwise.norm import Norm
from nanovllm.layers.attention import PagedAttention
from nanovllm.layers.context import Call, ModelContext
from nanovllm.layers.heads import heads_of
from nanovllm.layers.linear import ParallelLinear, RowParallelLinear
from nanovllm.layers.memory import Pages
from nanovllm.layers.norm import RowNorm
from nanovllm.layers.quantized import aligned
from nanovllm.layers.rotary import PositionTables
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, WeightedModule, parameter, whole
from nanovllm.model_config import LatentSizes, LayerSpec

_EPS = 1e-6
"""Epsilon of the norms inside, whatever the model's is."""


class LatentAttention(WeightedModule, PagedAttention):
    """[T, hidden] -> [wanted, hidden], a partial sum of this rank's query heads. Of a token one row is cached for all
    heads, whole on every rank: its normalised latent, of which keys and values are projections, and its rotated key.

    The projections stand on the other side of attention ("absorbed"): a head's query is multiplied by its keys'
    projection before, and the result by its values' projection behind. So prompts, chunks and decodes are one
    arithmetic."""

    def __init__(self, context: ModelContext, spec: LayerSpec, tables: PositionTables, around: Around) -> None:
        super().__init__()
        config, dtype, device = context.config, context.dtype, context.device
        assert isinstance(spec.options, LatentSizes) and spec.rope is not None and config.attention_scale is not None
        self.options = options = spec.options
        self.kernels, self.query_scale = context.kernels, tables.query_scale
        self.heads = heads = heads_of(config, spec, context.group.rank, context.group.size)
        self.cos_sin = tables.cos_sin[spec.rope, spec.head_dim]
        self.head_dim, self.row = options.nope + spec.head_dim, options.width + spec.head_dim
        precision, hidden, of_all = spec.precision("qkv"), config.hidden_size, heads.num_heads * self.head_dim
        queries, rank = heads.query_cuts(self.head_dim), options.query_rank
        self.first_rows = rank or heads.local_heads * self.head_dim
        first = Piece("q_a_proj", (rank, hidden), (Cut(0, 0, 0, rank),))
        if not rank:
            first = Piece("q_proj", (of_all, hidden), queries)
        last = Piece("kv_a_proj_with_mqa", (self.row, hidden), (Cut(0, self.first_rows, 0, self.row),))
        self.in_proj = ParallelLinear(
            context, "in", aligned(self.first_rows + self.row), hidden, pieces=(first, last), precision=precision,
            around=Around(around.before),
        )  # fmt: skip
        self.q_norm = self.q_proj = None
        if rank:
            self.q_norm = RowNorm(context, rank, _EPS)
            self.q_proj = ParallelLinear(
                context, "queries", heads.local_heads * self.head_dim, rank, precision=precision, around=Around(),
                pieces=(Piece("q_b_proj", (of_all, rank), queries),),
            )  # fmt: skip
        self.kv_norm = parameter(options.width, dtype=dtype, device=device)
        rows = heads.local_heads * (options.nope + options.value)
        self.kv_proj = parameter(rows, options.width, dtype=dtype, device=device)
        """Each head's projection of latents to keys, and to values; never quantised."""
        self.o_proj = RowParallelLinear(
            context, heads.num_heads * options.value, hidden, name="o", pads=False, precision=spec.precision("o"),
            around=around.last(),
        )  # fmt: skip
        between = () if self.q_proj is None else (self.q_proj.product,)
        self.operations = (self.in_proj.product, *between, self.o_proj.product)
        self.spec = AttentionSpec(heads.local_heads, 1, self.row, config.attention_scale, value_dim=options.width)
        self.elements_inside = heads.local_heads * (self.row + options.width)
        """Elements of a token's queries and of what they attend to, which no product makes."""

    @property
    def memory(self) -> tuple[Pages, ...]:
        return (Pages(1, (self.row,)),)

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        """The result of the wanted tokens, [N, hidden]; all have their rows stored."""
        step, cache, (width, nope) = call.step, self.cache, self.options[1:3]
        assert step is not None
        projected = self.in_proj(x, call)
        q, kv, _ = projected.tensor_split((self.first_rows, self.first_rows + self.row), 1)
        if self.q_proj is not None and self.q_norm is not None:
            q = self.q_proj(self.q_norm(q), call)
        q, of_heads = q.unflatten(1, (-1, self.head_dim)), self.kv_proj.unflatten(0, (self.heads.local_heads, -1))
        if self.query_scale is not None:
            q = q * self.query_scale[step.positions.long()].to(q.dtype)[:, None, None]
        absorbed = q.new_empty(*q.shape[:2], self.row)
        _by_head(q[..., :nope], of_heads[:, :nope], absorbed[..., :width])
        slots, pages = step.slot_mappings[cache.table], cache.k[:, 0]
        self.kernels.latent_rope_store(
            q, kv, Norm(self.kv_norm, _EPS), step.positions, self.cos_sin, slots, pages, absorbed,
            self.options.interleaved,
        )  # fmt: skip
        attended = q.new_empty(*q.shape[:2], width)
        step.backend.forward(absorbed, cache, step.attention, attended, self.spec)
        out = q.new_empty(*q.shape[:2], self.options.value)
        _by_head(attended, of_heads[:, nope:].mT, out)
        return self.o_proj.of_wanted(out.flatten(1), call)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.in_proj.checkpoint_weights(prefix)
        if self.q_proj is not None and self.q_norm is not None:
            yield from self.q_norm.checkpoint_weights(f"{prefix}.q_a_layernorm")
            yield from self.q_proj.checkpoint_weights(prefix)
        yield whole(f"{prefix}.kv_a_layernorm.weight", self.kv_norm)
        yield self.heads.query_weight(f"{prefix}.kv_b_proj.weight", self.kv_proj)
        yield from self.o_proj.checkpoint_weights(f"{prefix}.o_proj")


def _by_head(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Writes x [T, heads, n] @ weight [heads, n, m] into out [T, heads, m]; the library multiplies."""
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
