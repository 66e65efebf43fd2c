"""Mixture of experts of one rank (Shazeer et al., arXiv 1701.06538; Fedus et al., arXiv 2101.03961).

Every rank holds a range of the width of every expert, as of a dense MLP: the result is a partial sum for the next
all-reduce, no token goes to another rank, and no rank waits for the one with the popular experts.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from nanovllm.kernels.fp8.reference import BLOCK
from nanovllm.kernels.moe import few_streamed
from nanovllm.kernels.moe.experts import ExpertActivation
from nanovllm.kernels.moe.linear import Routed
from nanovllm.kernels.moe.router import router_logits
from nanovllm.kernels.moe.routing import TopK
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.plan.device import Device
from nanovllm.kernels.plan.plan import Launch
from nanovllm.kernels.plan.product import Around, Choice
from nanovllm.kernels.pointwise.norm import MOST_PARTS
from nanovllm.layers.adapted import AdaptedMatrix, base_of
from nanovllm.layers.context import LayerContext, ModelContext
from nanovllm.layers.linear import Operation, ParallelLinear, part_of, product_of
from nanovllm.layers.matrix import DenseMatrix, Weight
from nanovllm.layers.mlp import MLP
from nanovllm.layers.mxfp4 import stacked_weights
from nanovllm.layers.packed import PackedMatrix
from nanovllm.layers.quantized import FP8Matrix, column_multiple
from nanovllm.layers.step import Call
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, Shard, WeightedModule, parameter, whole
from nanovllm.model_config import LayerSpec, MoEConfig


class RouterMatrix(DenseMatrix):
    """The weight [experts, and one for the gate of a shared expert, hidden] of a router."""

    def multiply(self, x: torch.Tensor, launch: Launch, call: Call) -> torch.Tensor:
        """x [T, hidden] -> logits float32 [parts, T, experts], sums over parts of hidden; see Weight."""
        return router_logits(x, self.weight, launch.config, call.norm if launch.norm else None)


class Router(Operation):
    """x [T, hidden] -> logits float32 [parts, T, experts], and one more column where a shared expert has a gate."""

    def __init__(self, context: LayerContext, hidden_size: int, config: MoEConfig, choice: Choice, around: Around):
        rows, dtype, device = config.num_experts + config.shared_gate, context.dtype, context.device
        matrix = RouterMatrix(rows, hidden_size, (), dtype, device)
        made = product_of(context, "router", matrix, rows, hidden_size, around.first("routing"), choice=choice)
        super().__init__(context, made, matrix)
        self.config = config
        each = partial(parameter, config.num_experts, device=device)
        self.bias = each(dtype=dtype) if config.bias else None
        self.correction = each(dtype=torch.float32) if config.scoring != "softmax" else None
        self.factors = each(dtype=torch.float32) if config.expert_scales else None

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        count, weight = self.config.num_experts, self.matrix.weight
        yield whole(f"{prefix}.gate.weight", weight[:count])
        if self.bias is not None:
            yield whole(f"{prefix}.gate.bias", self.bias)
        if self.correction is not None:
            shape = (count,) if self.config.scoring == "sigmoid" else (1, count)
            yield whole(f"{prefix}.gate.e_score_correction_bias", self.correction.view(shape))
        if self.config.shared_gate:
            yield whole(f"{prefix}.{self.config.shared_name}_gate.weight", weight[count:])
        if self.factors is not None:
            yield whole(f"{prefix}.gate.per_expert_scale", self.factors)


class MoE(WeightedModule):
    """x [T, hidden] -> a partial sum: [T, hidden], or [top_k, T, hidden] whose sum it is, for a ReduceAddNorm.

    gate_up [experts, 2 I, H], gates first (without gates [experts, I, H]), and down [experts, H, I], where I is this
    rank's part of the width, padded with zeros to a multiple of 8, and H is hidden, or the width of latent rows
    (LatentMoE, Elango et al., 2026), which every rank makes for itself. It projects its part of the sum back.
    """

    def __init__(self, context: ModelContext, spec: LayerSpec, around: Around) -> None:
        super().__init__()
        group, config, hidden_size = context.group, context.config.moe, context.config.hidden_size
        assert config is not None
        self.config, self.kernels = config, context.kernels
        self.row_size = row_size = config.latent_size or hidden_size
        how, device = spec.precision("experts"), context.planner.rules.device
        if how is not None and how.method == "fp8" and device.is_cuda and not device.has_tma:
            raise ValueError("quantization: FP8 experts need a GPU of compute capability 9.x or 10.x")
        self.size, self.begin, self.valid = part_of(config.intermediate_size, group, column_multiple(how, group.size))
        count = config.num_experts
        *gate_up, down = self.pieces
        rows = len(gate_up) * self.size
        of_gate_up = context.matrix(how, rows, row_size, tuple(gate_up), (count,))
        of_down = context.matrix(how, row_size, self.size, (down,), (count,))
        self.gate_up_bias = self.down_bias = None
        if config.bias:
            make = partial(parameter, dtype=context.dtype, device=context.device)
            self.gate_up_bias, self.down_bias = make(count, rows), make(count, row_size)
            self.gate_up_bias.zero_()
        self.adds_bias = group.rank == 0
        for_few = takes_few_tokens(config, of_gate_up, of_down, device)
        if not (for_few and is_experts_alone(config)):
            around = around.apart
        choice = Choice(count, config.top_k, of_gate_up.type_name, for_few)
        self.shared = shared_expert(context, spec, choice, self.size) if config.shared_size else None
        self.to_latent = self.from_latent = None
        if config.latent_size:
            self.to_latent, self.from_latent = (
                ParallelLinear(
                    context, name, n, k, pieces=(Piece(f"{name}_latent_proj", (n, k), (Cut(0, 0, 0, n),)),),
                    precision=spec.precision("latent"),
                )
                for name, n, k in (("fc1", row_size, hidden_size), ("fc2", hidden_size, row_size))
            )  # fmt: skip
        self.top_k = TopK(
            count, config.top_k, config.scoring == "sigmoid", config.renormalise, config.num_groups,
            config.top_groups, config.scale, config.logits_scale,
        )  # fmt: skip
        alpha = config.activation_alpha if config.activation == "silu" else None
        self.activation = ExpertActivation(config.activation_limit, alpha, config.gated)
        is_alone = group.size == 1 and not config.shared_size and not config.latent_size and around.adds_parts
        around = around._replace(adds_parts=is_alone and 1 < config.top_k <= MOST_PARTS)
        self.router = Router(context, hidden_size, config, choice, around)
        made = partial(product_of, context, choice=choice)
        self.gate_up = Operation(
            context, made("experts.gate_up", of_gate_up, rows, row_size, around.first("gate")), of_gate_up
        )
        self.down = Operation(context, made("experts.down", of_down, row_size, self.size, around.last()), of_down)
        first, last = (() if one is None else (one.product,) for one in (self.to_latent, self.from_latent))
        self.operations = (
            self.router.product, *(() if self.shared is None else self.shared.operations), *first,
            self.gate_up.product, self.down.product, *last,
        )  # fmt: skip

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """An expert's gate (where it has one), up and down, of which this rank keeps a range of the width."""
        width, row_size = self.config.intermediate_size, self.row_size
        names = ("gate_proj", "up_proj") if self.config.gated else ("up_proj",)
        rows = (Cut(0, place * self.size, self.begin, self.valid) for place in range(2))
        down = Cut(1, 0, self.begin, self.valid)
        return (
            *(Piece(name, (width, row_size), (cut,)) for name, cut in zip(names, rows, strict=False)),
            Piece("down_proj", (row_size, width), (down,)),
        )

    def forward(
        self, x: torch.Tensor, call: Call, of_router: tuple[torch.Tensor, Call] | None = None
    ) -> torch.Tensor:  # fmt: skip
        """See ParallelLinear. of_router: rows [T, hidden], and their call, that the router takes in place of these."""
        logits = self.router(*(of_router or (x, call)))
        routed = self._routed(logits, self.down.launch(x.shape[0], call).config)
        is_few, shared = routed.routing is None, None
        if self.shared is not None and self.shared.gate_up_proj.launch(x.shape[0], call).with_experts:
            routed = routed._replace(beside=tuple(base_of(one.matrix).weight for one in self.shared.linears))
        elif self.shared is not None:
            shared = self.shared(x, call)
        if is_few and self.from_latent is None:
            routed = routed._replace(shared=shared)
        call = call._replace(routing=routed)
        y = self.down(self.gate_up(x if self.to_latent is None else self.to_latent(x, call), call), call)
        assert isinstance(y, torch.Tensor)
        if self.from_latent is not None:
            y = self.from_latent(y if is_few else self.kernels.combine(y, x.dtype), call)[None]
        elif is_few or self.down.product.around.adds_parts:
            return y
        gate = logits if self.config.shared_gate else None
        return self.kernels.combine(y, x.dtype, shared, gate, self.top_k.num_experts)

    def _routed(self, logits: torch.Tensor, config: GemmConfig) -> Routed:
        """Choice of experts, as kernels of `config` and its like take it."""
        routing, of_router = None, (self.router.bias, self.router.correction, self.router.factors)
        if not config.is_skinny:
            routing = self.kernels.route(logits, self.top_k, config.block_m, *of_router)
        biases = (self.gate_up_bias, self.down_bias if self.adds_bias else None)
        gate = self.config.shared_gate
        return Routed(self.kernels, logits, self.top_k, routing, self.activation, biases, of_router, shared_gate=gate)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.router.checkpoint_weights(prefix)
        for matrix in (self.gate_up.matrix, self.down.matrix):
            if isinstance(matrix, AdaptedMatrix):
                matrix.note_experts(f"{prefix}.experts")
        yield from _LAYOUTS[self.config.layout](self, prefix)
        for latent in (self.to_latent, self.from_latent):
            yield from () if latent is None else latent.checkpoint_weights(prefix)
        if self.shared is not None:
            yield from self.shared.checkpoint_weights(f"{prefix}.{self.config.shared_name}")

    @property
    def bases(self) -> tuple[Any, Any]:
        """The weights of gate_up and down, without adapters."""
        return base_of(self.gate_up.matrix), base_of(self.down.matrix)

    def gate_and_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """View of gate_up or its bias without padding: [experts, 2, I, ...]."""
        count, rows = tensor.shape[:2]
        return tensor.view(count, 2, rows // 2, *tensor.shape[2:])[:, :, : self.valid]


def shared_expert(context: ModelContext, spec: LayerSpec, choice: Choice, size: int) -> MLP:
    """The expert of all tokens. choice, size: of the others, and their width on this rank; where it is like a few of
    them, side by side, their kernels may compute it."""
    config = context.config.moe
    assert config is not None
    precisions = (spec.precision("shared_gate_up"), spec.precision("shared_down"))
    own, *_ = part_of(config.shared_size, context.group, max(map(column_multiple, precisions)))
    is_alike = (spec.precision("experts"), *precisions) == (None,) * 3 and not config.latent_size and own % size == 0
    return MLP(  # whose parts combine does not add up
        context, context.config.hidden_size, config.shared_size, gated=config.gated, precisions=precisions,
        activation=config.activation if config.gated else "relu2", around=Around(beside=choice if is_alike else None),
        path="shared.",
    )  # fmt: skip


def takes_few_tokens(config: MoEConfig, gate_up: Weight, down: Weight, device: Device) -> bool:
    """Whether kernels for a few tokens choose as this mixture does, and compute what its experts do."""
    gate_up, down = base_of(gate_up), base_of(down)
    if config.num_groups > 1:
        return False
    if isinstance(gate_up, PackedMatrix):
        return True
    if config.bias or config.activation_limit is not None:
        return False
    if not (isinstance(gate_up, FP8Matrix) and isinstance(down, FP8Matrix)):
        return isinstance(gate_up, DenseMatrix)
    return device.has_tma and few_streamed.takes(gate_up.for_kernel(), down.for_kernel())


def is_experts_alone(config: MoEConfig) -> bool:
    """Whether a mixture is the sum of experts and nothing else, without biases and clamps: kernels for a few tokens may
    compute what is around it."""
    has_more = config.shared_size or config.latent_size or config.bias or config.activation_limit is not None
    return not has_more and config.num_groups == 1


def _experts(moe: MoE, prefix: str) -> Iterator[CheckpointWeight]:
    """A tensor for each expert and projection: "experts.7.gate_proj.weight"."""
    gate_up, down = moe.bases
    for index in range(moe.config.num_experts):
        for piece in moe.pieces:
            path = piece.path(f"{prefix}.experts.{index}")
            matrix = down if piece.name == "down_proj" else gate_up
            yield from matrix.checkpoint_weights(path, piece.shape, piece.cuts, expert=index)


def _linears(moe: MoE, prefix: str) -> Iterator[CheckpointWeight]:
    """"input_linear" and "output_linear" of all experts; of quantised ones models/stacked_experts.py makes modules."""
    if isinstance(moe.bases[0], DenseMatrix):
        return _stacked("input_linear.weight", "output_linear.weight", moe, prefix)
    return _experts(moe, prefix)


def _stacked(
    gate_up_name: str, down_name: str, moe: MoE, prefix: str, may_be_turned: bool = False
) -> Iterator[CheckpointWeight]:
    """All experts in one tensor: gate and up [experts, 2 I, hidden], and down [experts, hidden, I]."""
    count, size, hidden = moe.config.num_experts, moe.config.intermediate_size, moe.row_size
    gate_up = moe.gate_and_up(moe.gate_up.matrix.weight)
    halves = tuple(Shard(gate_up[:, half], 1, half * size + moe.begin) for half in range(2))
    if moe.size == size:  # no padding and no other rank: one piece
        halves = (Shard(moe.gate_up.matrix.weight, 1, 0),)
    yield CheckpointWeight(f"{prefix}.{gate_up_name}", (count, 2 * size, hidden), halves, may_be_turned=may_be_turned)
    shards = (Shard(moe.down.matrix.weight[:, :, : moe.valid], 2, moe.begin),)
    yield CheckpointWeight(f"{prefix}.{down_name}", (count, hidden, size), shards, may_be_turned=may_be_turned)


def _pairs_of(moe: MoE) -> Callable[[torch.Tensor], torch.Tensor]:
    """Views [experts, I, 2, ...] of gates and ups, a gate beside its up, without padding."""
    return lambda held: moe.gate_and_up(held).transpose(1, 2)


def _transposed(moe: MoE, prefix: str) -> Iterator[CheckpointWeight]:
    """"experts.gate_up_proj" [experts, hidden, 2 I], whose columns are gate, up, gate, up, ..., "experts.down_proj"
    [experts, I, hidden], or what layers/mxfp4.py has of them, and their biases."""
    count, size, hidden = moe.config.num_experts, moe.config.intermediate_size, moe.row_size
    gate_up, down = moe.bases
    if isinstance(gate_up, PackedMatrix):
        path, held = f"{prefix}.experts.gate_up_proj", gate_up.rows_of_blocks()
        yield from stacked_weights(path, 2 * size, hidden, 1, 2 * moe.begin, [*map(_pairs_of(moe), held)])
        path, held, end = f"{prefix}.experts.down_proj", down.rows_of_blocks(), -(-moe.valid // BLOCK)
        yield from stacked_weights(path, hidden, size, 2, moe.begin // BLOCK, [part[:, :, :end] for part in held])
    else:
        shards = (Shard(_pairs_of(moe)(gate_up.weight).movedim(3, 1), 2, 2 * moe.begin),)
        yield CheckpointWeight(f"{prefix}.experts.gate_up_proj", (count, hidden, 2 * size), shards)
        shards = (Shard(down.weight[:, :, : moe.valid].transpose(1, 2), 1, moe.begin),)
        yield CheckpointWeight(f"{prefix}.experts.down_proj", (count, size, hidden), shards)
    if moe.gate_up_bias is not None and moe.down_bias is not None:
        shards = (Shard(_pairs_of(moe)(moe.gate_up_bias), 1, 2 * moe.begin),)
        yield CheckpointWeight(f"{prefix}.experts.gate_up_proj_bias", (count, 2 * size), shards)
        yield whole(f"{prefix}.experts.down_proj_bias", moe.down_bias)


_LAYOUTS: dict[str, Callable[[MoE, str], Iterator[CheckpointWeight]]] = {
    "experts": _experts,
    "linears": _linears,
    "parameters": partial(_stacked, "experts.gate_up_proj", "experts.down_proj"),  # as transformers' modules have them
    "turned": partial(_stacked, "experts.gate_up_proj", "experts.down_proj", may_be_turned=True),
    "transposed": _transposed,
}
