"""Mixture of experts of one rank (Shazeer et al., arXiv 1701.06538; Fedus et al., arXiv 2101.03961).

Every rank holds a range of the width of every expert, as of a dense MLP: the result is a partial sum for the next
all-reduce, no token goes to another rank, and no rank waits for the one with the popular experts.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from nanovllm.kernels.fp8 import few_experts
from nanovllm.kernels.gemm import skinny
from nanovllm.kernels.moe import few_rows
from nanovllm.kernels.moe.experts import ExpertActivation
from nanovllm.kernels.moe.router import router_logits
from nanovllm.kernels.moe.routing import TopK
from nanovllm.kernels.plan.config import FP8, GemmConfig
from nanovllm.kernels.plan.plan import Experts, ExpertsLaunch
from nanovllm.kernels.plan.rules import FEW_ROUTER
from nanovllm.kernels.pointwise.norm import MOST_PARTS, Norm
from nanovllm.layers.context import LayerContext, ModelContext, Place
from nanovllm.layers.linear import part_of
from nanovllm.layers.matrix import experts_of
from nanovllm.layers.mlp import MLP
from nanovllm.layers.quantized import FP8Matrix, column_multiple
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, Shard, WeightedModule, parameter, whole
from nanovllm.model_config import LayerSpec, MoEConfig


class Router(WeightedModule):
    """x [T, hidden] -> logits float32 [parts, T, experts], and one more column where a shared expert has a gate."""

    def __init__(self, context: LayerContext, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config, dtype, device = config, context.dtype, context.device
        self.weight = parameter(config.num_experts + config.shared_gate, hidden_size, dtype=dtype, device=device)
        self.bias = self.correction = None
        if config.bias:
            self.bias = parameter(config.num_experts, dtype=dtype, device=device)
        if config.scoring != "softmax":
            self.correction = parameter(config.num_experts, dtype=torch.float32, device=device)

    def forward(self, x: torch.Tensor, config: GemmConfig, norm: Norm | None = None) -> torch.Tensor:
        """x [T, hidden] -> float32 [T, experts] by a kernel for few rows, which computes `norm` of x too; by others
        [parts, T, experts]."""
        if config.is_skinny:
            return skinny.linear(x, self.weight, config, norm=norm, out_dtype=torch.float32)
        return router_logits(x, self.weight, config)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        count = self.config.num_experts
        yield whole(f"{prefix}.gate.weight", self.weight[:count])
        if self.bias is not None:
            yield whole(f"{prefix}.gate.bias", self.bias)
        if self.correction is not None:
            shape = (count,) if self.config.scoring == "sigmoid" else (1, count)
            yield whole(f"{prefix}.gate.e_score_correction_bias", self.correction.view(shape))
        if self.config.shared_gate:
            yield whole(f"{prefix}.{self.config.shared_name}_gate.weight", self.weight[count:])


class MoE(WeightedModule):
    """x [T, hidden] -> a partial sum: [T, hidden], or [top_k, T, hidden] whose sum it is, for a ReduceAddNorm.

    gate_up [experts, 2 I, hidden], gates first, and down [experts, hidden, I], where I is this rank's part of the
    width, padded with zeros to a multiple of 8.
    """

    def __init__(self, context: ModelContext, spec: LayerSpec, place: Place) -> None:
        super().__init__()
        group, config, hidden_size = context.group, context.config.moe, context.config.hidden_size
        assert config is not None
        self.config, self.kernels, self.group_size = config, context.kernels, group.size
        self.hidden_size = hidden_size
        self.router = Router(context, hidden_size, config)
        how, device = spec.precision("experts"), context.planner.rules.device
        if how is not None and how.method == "fp8" and device.is_cuda and not device.has_tma:
            raise ValueError("quantization: FP8 experts need a GPU of compute capability 9.x or 10.x")
        self.size, self.begin, self.valid = part_of(config.intermediate_size, group, column_multiple(how))
        count = config.num_experts
        gate, up, down = self.pieces
        self.gate_up = experts_of(how, count, 2 * self.size, hidden_size, (gate, up), context.dtype, context.device)
        self.down = experts_of(how, count, hidden_size, self.size, (down,), context.dtype, context.device)
        self.gate_up_bias = self.down_bias = None
        if config.bias:
            make = partial(parameter, dtype=context.dtype, device=context.device)
            self.gate_up_bias, self.down_bias = make(count, 2 * self.size), make(count, hidden_size)
            self.gate_up_bias.zero_()
        self.adds_bias = group.rank == 0
        self.shared: MLP | None = None
        if config.shared_size:
            precisions = (spec.precision("shared_gate_up"), spec.precision("shared_down"))
            self.shared = MLP(
                context, hidden_size, config.shared_size, precisions=precisions, adds_parts=False  # combine adds it
            )
        self.top_k = TopK(
            count, config.top_k, config.scoring == "sigmoid", config.renormalise, config.num_groups,
            config.top_groups, config.scale,
        )  # fmt: skip
        self.activation = ExpertActivation(config.activation_limit, config.activation_alpha)
        self.experts = self._experts(context, place.fuses)
        self.launches = context.planner.launches(self.experts)
        self.operations = (self.experts, *(() if self.shared is None else self.shared.operations))

    def _experts(self, context: LayerContext, fuses: bool) -> Experts:
        top_k, x_dtype = self.top_k, str(context.dtype).removeprefix("torch.")
        plain, can_add = is_plain_mixture(self.config), True
        if isinstance(self.gate_up, FP8Matrix) and isinstance(self.down, FP8Matrix):
            takes = few_experts.takes(self.gate_up.for_kernel(), self.down.for_kernel())
            can_add = context.planner.rules.device.has_tma and takes
        after = "residual" if fuses and plain and can_add else ""
        later = self.shared is None and self.group_size == 1 and 1 < top_k.top_k <= MOST_PARTS
        sizes = (top_k.num_experts, top_k.top_k, self.hidden_size, self.size)
        return Experts(*sizes, self.gate_up.type_name, x_dtype, plain, after, later)

    @property
    def pieces(self) -> tuple[Piece, Piece, Piece]:
        """An expert's gate, up and down, of which this rank keeps a range of the width."""
        width, hidden = self.config.intermediate_size, self.hidden_size
        gate, up = (Cut(0, half * self.size, self.begin, self.valid) for half in range(2))
        down = Cut(1, 0, self.begin, self.valid)
        return (
            Piece("gate_proj", (width, hidden), (gate,)), Piece("up_proj", (width, hidden), (up,)),
            Piece("down_proj", (hidden, width), (down,)),
        )  # fmt: skip

    def forward(
        self, x: torch.Tensor, *, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """norm, of x, and residual [T, hidden], which the sum is added to in place: both or neither, for the plan of
        a layer that is complete (LayerPlan)."""
        gate_up: Any = self.gate_up.for_kernel()
        down: Any = self.down.for_kernel()
        if residual is not None:
            assert norm is not None
            logits = self.router(x, FEW_ROUTER, norm)
            add_experts: Any = (few_experts if self.experts.dtype == FP8 else few_rows).add_experts
            return add_experts(residual, norm, logits, self.top_k, gate_up, down)
        launch: ExpertsLaunch = self.launches[x.shape[0]]
        logits = self.router(x, launch.router)
        if launch.tiles is None:
            return few_rows.sum_experts(x, logits, self.top_k, gate_up, down)
        kernels, tiles = self.kernels, launch.tiles
        routing = kernels.route(logits, self.top_k, tiles.down.block_m, self.router.bias, self.router.correction)
        shared = self.shared(x) if self.shared is not None else None
        # Parts of many rows are large: they are rounded, as a dense MLP's results are.
        part_dtype = x.dtype if launch.rounds_parts else torch.float32
        h = kernels.expert_gate_up(x, gate_up, routing, tiles.gate_up, self.activation, self.gate_up_bias)
        down_bias = self.down_bias if self.adds_bias else None
        parts = kernels.expert_down(h, down, routing, tiles.down, part_dtype, down_bias)
        if self.experts.is_summed_later:
            return parts
        gate = logits if self.config.shared_gate else None
        return kernels.combine(parts, x.dtype, shared, gate, self.top_k.num_experts)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.router.checkpoint_weights(prefix)
        yield from _LAYOUTS[self.config.layout](self, prefix)
        if self.shared is not None:
            yield from self.shared.checkpoint_weights(f"{prefix}.{self.config.shared_name}")

    def gate_and_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """View of gate_up or its bias without padding: [experts, 2, I, ...]."""
        count, rows = tensor.shape[:2]
        return tensor.view(count, 2, rows // 2, *tensor.shape[2:])[:, :, : self.valid]


def is_plain_mixture(config: MoEConfig) -> bool:
    """Whether the mixture is a softmax, experts without biases and their sum, and nothing else."""
    only_experts = not config.bias and config.activation_limit is None and not config.shared_size
    return only_experts and config.scoring == "softmax" and config.num_groups == 1


def _experts(moe: MoE, prefix: str) -> Iterator[CheckpointWeight]:
    """A tensor for each expert and projection: "experts.7.gate_proj.weight"."""
    for index in range(moe.config.num_experts):
        for matrix, piece in zip((moe.gate_up, moe.gate_up, moe.down), moe.pieces, strict=True):
            path = piece.path(f"{prefix}.experts.{index}")
            yield from matrix.checkpoint_weights(path, piece.shape, piece.cuts, expert=index)


def _stacked(
    gate_up_name: str, down_name: str, moe: MoE, prefix: str, may_be_turned: bool = False
) -> Iterator[CheckpointWeight]:
    """All experts in one tensor: gate and up [experts, 2 I, hidden], and down [experts, hidden, I]."""
    count, size, hidden = moe.config.num_experts, moe.config.intermediate_size, moe.hidden_size
    gate_up = moe.gate_and_up(moe.gate_up.weight)
    halves = tuple(Shard(gate_up[:, half], 1, half * size + moe.begin) for half in range(2))
    if moe.size == size:  # no padding and no other rank: one piece
        halves = (Shard(moe.gate_up.weight, 1, 0),)
    yield CheckpointWeight(f"{prefix}.{gate_up_name}", (count, 2 * size, hidden), halves, may_be_turned=may_be_turned)
    shards = (Shard(moe.down.weight[:, :, : moe.valid], 2, moe.begin),)
    yield CheckpointWeight(f"{prefix}.{down_name}", (count, hidden, size), shards, may_be_turned=may_be_turned)


def _transposed(moe: MoE, prefix: str) -> Iterator[CheckpointWeight]:
    """"experts.gate_up_proj" [experts, hidden, 2 I], whose columns are gate, up, gate, up, ..., "experts.down_proj"
    [experts, I, hidden], and their biases."""
    count, size, hidden = moe.config.num_experts, moe.config.intermediate_size, moe.hidden_size
    pairs = moe.gate_and_up(moe.gate_up.weight).permute(0, 3, 2, 1)
    shards = (Shard(pairs, 2, 2 * moe.begin),)
    yield CheckpointWeight(f"{prefix}.experts.gate_up_proj", (count, hidden, 2 * size), shards)
    shards = (Shard(moe.down.weight[:, :, : moe.valid].transpose(1, 2), 1, moe.begin),)
    yield CheckpointWeight(f"{prefix}.experts.down_proj", (count, size, hidden), shards)
    if moe.gate_up_bias is not None and moe.down_bias is not None:
        shards = (Shard(moe.gate_and_up(moe.gate_up_bias).transpose(1, 2), 1, 2 * moe.begin),)
        yield CheckpointWeight(f"{prefix}.experts.gate_up_proj_bias", (count, 2 * size), shards)
        yield whole(f"{prefix}.experts.down_proj_bias", moe.down_bias)


_LAYOUTS: dict[str, Callable[[MoE, str], Iterator[CheckpointWeight]]] = {
    "experts": _experts,
    "linears": partial(_stacked, "input_linear.weight", "output_linear.weight"),
    "parameters": partial(_stacked, "experts.gate_up_proj", "experts.down_proj"),  # as transformers' modules have them
    "turned": partial(_stacked, "experts.gate_up_proj", "experts.down_proj", may_be_turned=True),
    "transposed": _transposed,
}
