"""Mixture of experts of one rank (Shazeer et al., arXiv 1701.06538; Fedus et al., arXiv 2101.03961).

Every rank holds a range of the width of every expert, as of a dense MLP: the result is a partial sum for the next
all-reduce, no token goes to another rank, and no rank waits for the one with the popular experts.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from nanovllm.kernels.fp8 import few_experts
from nanovllm.kernels.fp8.operands import FP8Weight
from nanovllm.kernels.gemm import skinny
from nanovllm.kernels.moe import few_rows
from nanovllm.kernels.moe.experts import ExpertActivation
from nanovllm.kernels.moe.router import router_logits
from nanovllm.kernels.moe.routing import TopK
from nanovllm.kernels.plan.config import FP8, GemmConfig
from nanovllm.kernels.plan.plan import Experts, ExpertsLaunch
from nanovllm.kernels.plan.rules import FEW_ROUTER
from nanovllm.kernels.pointwise.norm import MOST_PARTS, Norm
from nanovllm.layers.context import LayerContext
from nanovllm.layers.linear import part_of
from nanovllm.layers.mlp import MLP
from nanovllm.layers.quantized import FP8Matrix, column_multiple
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, Shard, WeightedModule, parameter, whole
from nanovllm.model_config import MoEConfig, Quantization


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
        """norm: of x, which a kernel for few rows computes."""
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

    def __init__(
        self, context: LayerContext, hidden_size: int, config: MoEConfig,
        precision: Callable[[str], Quantization | None], fuses: bool = False,
    ) -> None:  # fmt: skip
        """precision: of "experts", "shared_gate_up" and "shared_down". fuses: as in MLP."""
        super().__init__()
        group = context.group
        self.config, self.kernels, self.group_size = config, context.kernels, group.size
        self.hidden_size = hidden_size
        self.router = Router(context, hidden_size, config)
        how, device = precision("experts"), context.planner.rules.device
        if how is not None and device.is_cuda and not device.has_tma:
            raise ValueError("quantization: FP8 experts need a GPU of compute capability 9.x or 10.x")
        self.size, self.begin, self.valid = part_of(config.intermediate_size, group, column_multiple(how))
        count = config.num_experts
        self.quantized: tuple[FP8Matrix, FP8Matrix] | None = None
        self.gate_up_bias: torch.Tensor | None = None
        self.down_bias: torch.Tensor | None = None
        if how is not None:
            self._quantize(how, context.device)
        else:
            self._allocate(context.dtype, context.device)
        self.adds_bias = group.rank == 0
        self.shared: MLP | None = None
        if config.shared_size:
            precisions = (precision("shared_gate_up"), precision("shared_down"))
            self.shared = MLP(
                context, hidden_size, config.shared_size, precisions=precisions, adds_parts=False  # combine adds it
            )
        self.top_k = TopK(
            count, config.top_k, config.scoring == "sigmoid", config.renormalise, config.num_groups,
            config.top_groups, config.scale,
        )  # fmt: skip
        self.activation = ExpertActivation(config.activation_limit, config.activation_alpha)
        self.experts = self._experts(context, fuses)
        self.launches = context.planner.launches(self.experts)
        self.operations = (self.experts, *(() if self.shared is None else self.shared.operations))

    def _experts(self, context: LayerContext, fuses: bool) -> Experts:
        top_k, x_dtype = self.top_k, str(context.dtype).removeprefix("torch.")
        is_plain, can_add = is_plain_mixture(self.config), True
        if self.quantized is not None:
            gate_up, down = (matrix.for_kernel() for matrix in self.quantized)
            can_add = context.planner.rules.device.has_tma and few_experts.takes(gate_up, down)
        after = "residual" if fuses and is_plain and can_add else ""
        dtype = x_dtype if self.quantized is None else FP8
        later = self.shared is None and self.group_size == 1 and 1 < top_k.top_k <= MOST_PARTS
        sizes = (top_k.num_experts, top_k.top_k, self.hidden_size, self.size)
        return Experts(*sizes, dtype, x_dtype, is_plain, after, later)

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        count, size, make = self.config.num_experts, self.size, partial(parameter, dtype=dtype, device=device)
        self.gate_up, self.down = make(count, 2 * size, self.hidden_size), make(count, self.hidden_size, size)
        if self.config.bias:
            self.gate_up_bias, self.down_bias = make(count, 2 * size), make(count, self.hidden_size)
        for tensor in (self.gate_up, self.gate_up_bias):
            if tensor is not None:
                tensor.view(count, 2, size, -1)[:, :, self.valid :].zero_()
        self.down[:, :, self.valid :].zero_()

    def _quantize(self, how: Quantization, device: torch.device) -> None:
        experts = (self.config.num_experts,)
        gate_up = FP8Matrix(how, 2 * self.size, self.hidden_size, self.gate_up_cuts, 2, device, experts)
        down = FP8Matrix(how, self.hidden_size, self.size, (self.down_cut,), 1, device, experts)
        self.gate_up_matrix, self.down_matrix = self.quantized = (gate_up, down)

    @property
    def gate_up_cuts(self) -> tuple[Cut, Cut]:
        """This rank's ranges of an expert's gate and up in the matrix that holds both."""
        return Cut(0, 0, self.begin, self.valid), Cut(0, self.size, self.begin, self.valid)

    @property
    def down_cut(self) -> Cut:
        return Cut(1, 0, self.begin, self.valid)

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[FP8Weight, FP8Weight]:
        """Weights of gate and up, and of down, in the form that kernels take."""
        if self.quantized is None:
            return self.gate_up, self.down
        gate_up, down = self.quantized
        return gate_up.for_kernel(), down.for_kernel()

    def forward(
        self, x: torch.Tensor, *, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """norm, of x, and residual [T, hidden], which the sum is added to in place: both or neither, for the plan of
        a layer that is complete (LayerPlan)."""
        if residual is not None:
            assert norm is not None
            logits = self.router(x, FEW_ROUTER, norm)
            add_experts: Any = (few_rows if self.quantized is None else few_experts).add_experts
            return add_experts(residual, norm, logits, self.top_k, *self._weights())
        launch: ExpertsLaunch = self.launches[x.shape[0]]
        logits = self.router(x, launch.router)
        if launch.tiles is None:
            return few_rows.sum_experts(x, logits, self.top_k, self.gate_up, self.down)
        kernels, tiles = self.kernels, launch.tiles
        routing = kernels.route(logits, self.top_k, tiles.block_m, self.router.bias, self.router.correction)
        shared = self.shared(x) if self.shared is not None else None
        # Parts of many rows are large: they are rounded, as a dense MLP's results are.
        part_dtype = x.dtype if launch.rounds_parts else torch.float32
        gate_up, down = self._weights()
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
    is_plain = not config.bias and config.activation_limit is None and not config.shared_size
    return is_plain and config.scoring == "softmax" and config.num_groups == 1


def _experts(moe: MoE, prefix: str) -> Iterator[CheckpointWeight]:
    """A tensor for each expert and projection: "experts.7.gate_proj.weight"."""
    size, hidden = moe.config.intermediate_size, moe.hidden_size
    gate, up = moe.gate_up_cuts
    pieces = (
        Piece("gate_proj", (size, hidden), (gate,)),
        Piece("up_proj", (size, hidden), (up,)),
        Piece("down_proj", (hidden, size), (moe.down_cut,)),
    )
    for index in range(moe.config.num_experts):
        for number, piece in enumerate(pieces):
            path = piece.path(f"{prefix}.experts.{index}")
            if moe.quantized is not None:
                yield from moe.quantized[number // 2].checkpoint_weights(path, piece.shape, piece.cuts, expert=index)
            else:
                shards = tuple(cut.shard((moe.gate_up, moe.down)[number // 2][index]) for cut in piece.cuts)
                yield CheckpointWeight(f"{path}.weight", piece.shape, shards)


def _stacked(
    gate_up_name: str, down_name: str, moe: MoE, prefix: str, may_be_turned: bool = False
) -> Iterator[CheckpointWeight]:
    """All experts in one tensor: gate and up [experts, 2 I, hidden], and down [experts, hidden, I]."""
    count, size, hidden = moe.config.num_experts, moe.config.intermediate_size, moe.down.shape[1]
    gate_up = moe.gate_and_up(moe.gate_up)
    halves = tuple(Shard(gate_up[:, half], 1, half * size + moe.begin) for half in range(2))
    if moe.down.shape[2] == size:  # no padding and no other rank: one piece
        halves = (Shard(moe.gate_up, 1, 0),)
    yield CheckpointWeight(f"{prefix}.{gate_up_name}", (count, 2 * size, hidden), halves, may_be_turned=may_be_turned)
    shards = (Shard(moe.down[:, :, : moe.valid], 2, moe.begin),)
    yield CheckpointWeight(f"{prefix}.{down_name}", (count, hidden, size), shards, may_be_turned=may_be_turned)


def _transposed(moe: MoE, prefix: str) -> Iterator[CheckpointWeight]:
    """"experts.gate_up_proj" [experts, hidden, 2 I], whose columns are gate, up, gate, up, ..., "experts.down_proj"
    [experts, I, hidden], and their biases."""
    count, size, hidden = moe.config.num_experts, moe.config.intermediate_size, moe.down.shape[1]
    pairs = moe.gate_and_up(moe.gate_up).permute(0, 3, 2, 1)
    shards = (Shard(pairs, 2, 2 * moe.begin),)
    yield CheckpointWeight(f"{prefix}.experts.gate_up_proj", (count, hidden, 2 * size), shards)
    shards = (Shard(moe.down[:, :, : moe.valid].transpose(1, 2), 1, moe.begin),)
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
