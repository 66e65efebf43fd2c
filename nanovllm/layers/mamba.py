"""Mamba-2 (arXiv 2405.21060), the recurrent layer of Nemotron-H, Nemotron 3 and Granite 4."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from nanovllm.kernels.plan.product import Around
from nanovllm.kernels.recurrent.mamba import MambaSizes, MambaWeights
from nanovllm.layers.context import Call, ModelContext
from nanovllm.layers.heads import HeadSplit
from nanovllm.layers.linear import ParallelLinear, RowParallelLinear
from nanovllm.layers.memory import Slot
from nanovllm.layers.quantized import aligned
from nanovllm.layers.rotary import PositionTables
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, WeightedModule, moved, parameter
from nanovllm.model_config import LayerSpec


class Mamba(NamedTuple):
    """LayerSpec.options; counts are of the whole model."""

    heads: int
    groups: int
    dim: int
    """Width of a head."""
    state: int
    """Columns of a head's state for each of its dimensions."""
    width: int
    """Tokens that the convolution sees, its own among them."""
    least: float
    """Least step of the recurrence."""


class Mamba2(WeightedModule):
    """[T, hidden] -> [wanted, hidden], a partial sum of this rank's heads: projections to z, x, b, c and dt, the
    convolution of x, b and c, the recurrence over them (kernels/recurrent/mamba.py), the norm of each group's heads,
    and the output's projection. With more ranks than groups the heads of each rank are of one group, whose b and c it
    computes for itself."""

    can_capture = True
    checkpoint_name = "mamba"

    def __init__(self, context: ModelContext, spec: LayerSpec, tables: PositionTables, around: Around) -> None:
        super().__init__()
        net = Mamba(*spec.options)  # type: ignore[misc]
        group, hidden, dtype, device = context.group, context.config.hidden_size, context.dtype, context.device
        if net.heads % group.size or (net.groups % group.size and group.size % net.groups):
            bound = f"a divisor of {net.heads} heads, and a divisor or a multiple of their {net.groups} groups"
            raise ValueError(f"tensor_parallel_size={group.size}: must be {bound}")
        self.kernels, self.group = context.kernels, group
        self.heads = heads = HeadSplit(net.heads, net.groups, group.rank, group.size)
        self.sizes = sizes = MambaSizes(heads.local_heads, heads.local_kv_heads, net.dim, net.state)
        whole = MambaSizes(net.heads, net.groups, net.dim, net.state)
        of_group = heads.kv_cuts(net.state)
        self._channel_cuts: tuple[Cut, ...] = (
            *heads.query_cuts(net.dim), *moved(of_group, sizes.inner, whole.inner),
            *moved(of_group, sizes.inner + sizes.groups * net.state, whole.inner + net.groups * net.state),
        )  # fmt: skip
        self._shared_groups = net.groups if group.size > net.groups else None
        """Number of groups, where the heads of each are on several ranks."""
        self._share = net.groups / whole.inner
        self.rows = (sizes.inner, sizes.channels, sizes.heads)
        first, first_whole = sizes.inner + sizes.channels, whole.inner + whole.channels
        cuts = (
            *heads.query_cuts(net.dim), *moved(self._channel_cuts, sizes.inner, whole.inner),
            *moved(heads.query_cuts(1), first, first_whole),
        )  # fmt: skip
        self.in_proj = ParallelLinear(
            context, "in", aligned(sum(self.rows)), hidden, precision=spec.precision("qkv"),
            pieces=(Piece("in_proj", (first_whole + net.heads, hidden), cuts),), around=Around(around.before),
        )  # fmt: skip
        self.out_proj = RowParallelLinear(
            context, whole.inner, hidden, name="out", pads=False, precision=spec.precision("o"), around=around.last()
        )
        self.operations = (self.in_proj.product, self.out_proj.product)
        self.conv = parameter(sizes.channels, 1, net.width, dtype=dtype, device=device)
        self.conv_bias = parameter(sizes.channels, dtype=dtype, device=device)
        self._whole_channels = whole.channels
        self.A_log, self.dt_bias, self.D = (
            parameter(sizes.heads, dtype=torch.float32, device=device) for _ in range(3)
        )
        self.norm = parameter(sizes.inner, dtype=dtype, device=device)
        self.eps, self.least = context.config.norm_eps, net.least
        of_states = getattr(torch, context.config.state_dtype)
        self.memory = (Slot((sizes.heads, net.state, net.dim), of_states), Slot((net.width - 1, sizes.channels), dtype))

    def bind(self, *memory: torch.Tensor) -> None:
        self.states, self.last_inputs = memory

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        """The result of the wanted tokens, [N, hidden]; all go into the states."""
        assert call.step is not None
        rows, projected = call.step.rows, self.in_proj(x, call)
        z, mixed, dt, _ = projected.split([*self.rows, projected.shape[1] - sum(self.rows)], 1)
        mixed = self.kernels.causal_conv(mixed, self.conv[:, 0], self.last_inputs, rows, self.conv_bias)
        weights = MambaWeights(self.A_log, self.dt_bias, self.D, self.least)
        found = self.kernels.mamba(mixed, dt, weights, self.sizes, self.states, rows)
        return self.out_proj.of_wanted(self._normed(found, z), call)

    def _normed(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """The gated norm of x [T, columns of this rank's heads] over the groups of the whole model."""
        of_ranks: tuple[Any, ...] = ()
        if self._shared_groups is not None:
            group = self.heads.kv_head(0)
            part = self.kernels.gated_mean_squares(x, z, self._share, group, self._shared_groups)
            of_ranks = self.group.all_reduce(part), group
        return self.kernels.gated_norm(x, z, self.norm, self.eps, self.sizes.groups, *of_ranks)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.in_proj.checkpoint_weights(prefix)
        yield from self.out_proj.checkpoint_weights(f"{prefix}.out_proj")
        for name, target in (("weight", self.conv), ("bias", self.conv_bias)):
            shape = (self._whole_channels, *target.shape[1:])
            yield CheckpointWeight(
                f"{prefix}.conv1d.{name}", shape, tuple(cut.shard(target) for cut in self._channel_cuts)
            )
        for name in ("A_log", "dt_bias", "D"):
            yield self.heads.query_weight(f"{prefix}.{name}", getattr(self, name))
        yield self.heads.query_weight(f"{prefix}.norm.weight", self.norm)
