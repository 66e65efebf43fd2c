"""Gated delta net (arXiv 2412.06464), the recurrent layer of Qwen3-Next, Qwen3.5 and OLMo Hybrid."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from nanovllm.kernels.plan.product import Around
from nanovllm.kernels.recurrent.delta import DeltaWeights
from nanovllm.kernels.recurrent.delta_prompt import DeltaSizes
from nanovllm.layers.context import Call, ModelContext
from nanovllm.layers.heads import HeadSplit
from nanovllm.layers.linear import ParallelLinear, RowParallelLinear
from nanovllm.layers.memory import Slot
from nanovllm.layers.quantized import aligned
from nanovllm.layers.rotary import PositionTables
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, WeightedModule, moved, parameter, whole
from nanovllm.model_config import LayerSpec


class DeltaNet(NamedTuple):
    """LayerSpec.options; counts are of the whole model."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution sees, its own among them."""
    layout: str = "joint"
    """Projections in the checkpoint. "joint": of q, k and v together, of z, of b and of a. "by key head": one whose
    rows are those of one key head after the other: its query, its key, its values, their z; and another one alike with
    b and a. "apart": six, and three convolutions."""
    most: float = 1.0
    """See DeltaWeights."""
    eps: float | None = None
    """Epsilon of the norm behind the rule; None: the model's."""


class GatedDeltaNet(WeightedModule):
    """[T, hidden] -> [wanted, hidden], a partial sum of this rank's value heads: projections to q, k, v, z, b and a,
    the convolution of q, k and v, the rule over them (kernels/recurrent/delta.py), and the output's projection."""

    can_capture = True
    checkpoint_name = "linear_attn"

    def __init__(self, context: ModelContext, spec: LayerSpec, tables: PositionTables, around: Around) -> None:
        super().__init__()
        self.whole = net = DeltaNet(*spec.options)  # type: ignore[misc]
        group, hidden = context.group, context.config.hidden_size
        if net.value_heads % group.size:
            raise ValueError(f"tensor_parallel_size={group.size}: must be a divisor of {net.value_heads} value heads")
        self.kernels = context.kernels
        self.heads = heads = HeadSplit(net.value_heads, net.key_heads, group.rank, group.size)
        self.sizes = sizes = DeltaSizes(heads.local_kv_heads, heads.local_heads, net.key_dim, net.value_dim)
        values = heads.local_heads * net.value_dim
        self.rows = (sizes.channels, values, heads.local_heads, heads.local_heads)
        precision, (of_values, of_gates) = spec.precision("qkv"), self._pieces(hidden)
        joined = precision is None
        self.in_proj = ParallelLinear(
            context, "in", aligned(sum(self.rows)) if joined else sum(self.rows[:2]), hidden,
            pieces=of_values + of_gates if joined else of_values, precision=precision,
            around=Around(around.before) if joined else Around(),
        )  # fmt: skip
        self.gate_proj = None
        if not joined:  # few rows would lower the rows that share a scale; nobody rounds what gates take too
            first = sizes.channels + values
            at_first = (piece._replace(cuts=tuple(moved(piece.cuts, -first, 0))) for piece in of_gates)
            self.gate_proj = ParallelLinear(context, "gates", aligned(sum(self.rows[2:])), hidden, pieces=at_first)
        self.out_proj = RowParallelLinear(
            context, net.value_heads * net.value_dim, hidden, name="out", pads=False, precision=spec.precision("o"),
            around=around.last(),
        )  # fmt: skip
        between = () if self.gate_proj is None else (self.gate_proj.product,)
        self.operations = (self.in_proj.product, *between, self.out_proj.product)
        dtype, device = context.dtype, context.device
        self.conv = parameter(sizes.channels, 1, net.width, dtype=dtype, device=device)
        self.A_log, self.dt_bias = (parameter(heads.local_heads, dtype=torch.float32, device=device) for _ in range(2))
        self.norm = parameter(net.value_dim, dtype=dtype, device=device)
        self.eps = context.config.norm_eps if net.eps is None else net.eps
        self.memory = (
            Slot((heads.local_heads, net.key_dim, net.value_dim), getattr(torch, context.config.state_dtype)),
            Slot((net.width - 1, sizes.channels), dtype),
        )  # fmt: skip

    def bind(self, *memory: torch.Tensor) -> None:
        self.states, self.last_inputs = memory

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        """The result of the wanted tokens, [N, hidden]; all go into the states."""
        assert call.step is not None
        rows, projected = call.step.rows, self.in_proj(x, call)
        if self.gate_proj is None:
            mixed, z, b, a, _ = projected.split([*self.rows, projected.shape[1] - sum(self.rows)], 1)
        else:
            mixed, z = projected.split(self.rows[:2], 1)
            b, a, *_ = self.gate_proj(x, call).split(self.heads.local_heads, 1)
        mixed = self.kernels.causal_conv(mixed, self.conv[:, 0], self.last_inputs, rows, None, self.sizes.unit)
        weights = DeltaWeights(self.A_log, self.dt_bias, self.norm, self.eps, self.whole.most)
        y = self.kernels.gated_delta_rule(mixed, a, b, z, weights, self.sizes, self.states, rows)
        return self.out_proj.of_wanted(y, call)

    # -- weights ------------------------------------------------------------------------------------------------

    def _channels(self) -> Iterator[tuple[str, int, tuple[Cut, ...]]]:
        """Tensors that the checkpoint has for the channels, which are all q, then all k, then all v: name, rows, and
        this rank's cuts."""
        net, heads, keys = self.whole, self.heads, self.sizes.key_heads * self.whole.key_dim
        all_keys, of_keys, of_values = net.key_heads * net.key_dim, heads.kv_cuts(net.key_dim), net.value_dim
        sizes = (all_keys, all_keys, net.value_heads * net.value_dim)
        cuts = (of_keys, moved(of_keys, keys, 0), moved(heads.query_cuts(of_values), 2 * keys, 0))
        if net.layout == "apart":
            yield from zip("qkv", sizes, map(tuple, cuts), strict=True)
        else:
            starts = (0, all_keys, 2 * all_keys)
            joint = (cut for part, start in zip(cuts, starts, strict=True) for cut in moved(part, 0, start))
            yield "qkv", sum(sizes), tuple(joint)

    def _pieces(self, hidden: int) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """Pieces of q, k, v and z, and of b and a, at their places among all of these."""
        net, heads = self.whole, self.heads
        z, b, a = (sum(self.rows[:end]) for end in (1, 2, 3))
        keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
        if net.layout != "by key head":
            of_heads = heads.query_cuts(1)
            return (
                *(Piece(f"in_proj_{name}", (rows, hidden), cuts) for name, rows, cuts in self._channels()),
                Piece("in_proj_z", (values, hidden), tuple(moved(heads.query_cuts(net.value_dim), z, 0))),
            ), (
                Piece("in_proj_b", (net.value_heads, hidden), tuple(moved(of_heads, b, 0))),
                Piece("in_proj_a", (net.value_heads, hidden), tuple(moved(of_heads, a, 0))),
            )  # fmt: skip
        each, of_keys = net.value_heads // net.key_heads, self.sizes.key_heads * net.key_dim
        block = 2 * net.key_dim + 2 * each * net.value_dim
        qkvz, ba = [], []
        for local in range(heads.local_kv_heads):
            begin = heads.kv_head(local) * block
            qkvz += [
                Cut(0, half * of_keys + local * net.key_dim, begin + half * net.key_dim, net.key_dim)
                for half in range(2)
            ]
        for local in range(heads.local_heads):
            key, index = divmod(heads.first_head + local, each)
            begin, size = key * block + 2 * net.key_dim + index * net.value_dim, net.value_dim
            qkvz += [
                Cut(0, 2 * of_keys + local * size, begin, size), Cut(0, z + local * size, begin + each * size, size)
            ]  # fmt: skip
            ba += [Cut(0, b + local, 2 * key * each + index, 1), Cut(0, a + local, (2 * key + 1) * each + index, 1)]
        return (
            (Piece("in_proj_qkvz", (2 * keys + 2 * values, hidden), tuple(qkvz)),),
            (Piece("in_proj_ba", (2 * net.value_heads, hidden), tuple(ba)),),
        )

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.in_proj.checkpoint_weights(prefix)
        if self.gate_proj is not None:
            yield from self.gate_proj.checkpoint_weights(prefix)
        yield from self.out_proj.checkpoint_weights(f"{prefix}.out_proj")
        for name, rows, cuts in self._channels():
            path = f"{prefix}.conv1d" if self.whole.layout != "apart" else f"{prefix}.{name}_conv1d"
            shards = tuple(cut.shard(self.conv) for cut in cuts)
            yield CheckpointWeight(f"{path}.weight", (rows, 1, self.whole.width), shards)
        yield self.heads.query_weight(f"{prefix}.A_log", self.A_log)
        yield self.heads.query_weight(f"{prefix}.dt_bias", self.dt_bias)
        yield whole(f"{prefix}.norm.weight", self.norm)
