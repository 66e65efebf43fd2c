"""Mixture of experts of one rank (Shazeer et al., arXiv 1701.06538; Fedus et al., arXiv 2101.03961).

Every rank holds a range of the width of every expert, as of a dense MLP: the result is a partial sum for the next
all-reduce, no token goes to another rank, and no rank waits for the one with the popular experts.
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import torch

from nanovllm.kernels import Kernels
from nanovllm.kernels.gemm.choice import DECODE_ROWS
from nanovllm.kernels.moe.choice import expert_configs
from nanovllm.kernels.moe.experts import ExpertActivation
from nanovllm.kernels.moe.router import router_logits
from nanovllm.kernels.moe.routing import TopK
from nanovllm.layers.linear import part_of
from nanovllm.layers.mlp import MLP
from nanovllm.layers.quantized import column_multiple
from nanovllm.layers.weights import CheckpointWeight, Shard, WeightedModule, parameter, whole
from nanovllm.model_config import MoEConfig
from nanovllm.parallel.group import TensorParallelGroup


class Router(WeightedModule):
    """x [T, hidden] -> logits float32 [parts, T, experts], and one more column where a shared expert has a gate."""

    def __init__(self, hidden_size: int, config: MoEConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.weight = parameter(config.num_experts + config.shared_gate, hidden_size, dtype=dtype, device=device)
        self.bias = self.correction = None
        if config.bias:
            self.bias = parameter(config.num_experts, dtype=dtype, device=device)
        if config.scoring == "sigmoid":
            self.correction = parameter(config.num_experts, dtype=torch.float32, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return router_logits(x, self.weight)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        count = self.config.num_experts
        yield whole(f"{prefix}.gate.weight", self.weight[:count])
        if self.bias is not None:
            yield whole(f"{prefix}.gate.bias", self.bias)
        if self.correction is not None:
            yield whole(f"{prefix}.gate.e_score_correction_bias", self.correction)
        if self.config.shared_gate:
            yield whole(f"{prefix}.{self.config.shared_name}_gate.weight", self.weight[count:])


class MoE(WeightedModule):
    """x [T, hidden] -> a partial sum: [T, hidden], or float32 [top_k, T, hidden] whose sum it is, for a ReduceAddNorm.

    gate_up [experts, 2 I, hidden], gates first, and down [experts, hidden, I], where I is this rank's part of the
    width, padded with zeros to a multiple of 8.
    """

    can_fuse = False
    """Norm and residual are kernels of their own."""
    pdl_rows: AbstractSet[int] = frozenset()

    def __init__(
        self, hidden_size: int, config: MoEConfig, group: TensorParallelGroup, kernels: Kernels, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.kernels, self.group_size = config, kernels, group.size
        self.router = Router(hidden_size, config, dtype, device)
        size, self.begin, self.valid = part_of(config.intermediate_size, group, column_multiple(None))
        count, kinds = config.num_experts, {"dtype": dtype, "device": device}
        self.gate_up = parameter(count, 2 * size, hidden_size, **kinds)  # type: ignore[arg-type]
        self.down = parameter(count, hidden_size, size, **kinds)  # type: ignore[arg-type]
        self.gate_up_bias = self.down_bias = None
        if config.bias:
            self.gate_up_bias = parameter(count, 2 * size, **kinds)  # type: ignore[arg-type]
            self.down_bias = parameter(count, hidden_size, **kinds)  # type: ignore[arg-type]
        for tensor in (self.gate_up, self.gate_up_bias):
            if tensor is not None:
                tensor.view(count, 2, size, -1)[:, :, self.valid :].zero_()
        self.down[:, :, self.valid :].zero_()
        self.adds_bias = group.rank == 0
        self.shared: MLP | None = None
        if config.shared_size:
            self.shared = MLP(hidden_size, config.shared_size, group, kernels, dtype, device)
            self.shared.down_proj.takes_parts = False  # combine adds it
        self.top_k = TopK(
            count, config.top_k, config.scoring == "sigmoid", config.renormalise, config.num_groups,
            config.top_groups, config.scale,
        )  # fmt: skip
        self.activation = ExpertActivation(config.activation_limit, config.activation_alpha)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernels, rows = self.kernels, x.shape[0]
        configs = expert_configs(rows * self.top_k.top_k, self.top_k.num_experts, x.element_size())
        logits = self.router(x)
        routing = kernels.route(logits, self.top_k, configs.block_m, self.router.bias, self.router.correction)
        shared = self.shared(x) if self.shared is not None else None
        h = kernels.expert_gate_up(x, self.gate_up, routing, configs.gate_up, self.activation, self.gate_up_bias)
        # Parts of many rows are large: they are rounded, as a dense MLP's results are.
        few = rows <= DECODE_ROWS
        part_dtype = torch.float32 if few else x.dtype
        down_bias = self.down_bias if self.adds_bias else None
        parts = kernels.expert_down(h, self.down, routing, configs.down, part_dtype, down_bias)
        if few and shared is None and self.group_size == 1 and self.top_k.top_k > 1:
            return parts
        gate = logits if self.config.shared_gate else None
        return kernels.combine(parts, x.dtype, shared, gate, self.top_k.num_experts)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.router.checkpoint_weights(prefix)
        yield from _LAYOUTS[self.config.layout](self, prefix)
        if self.shared is not None:
            yield from self.shared.checkpoint_weights(f"{prefix}.{self.config.shared_name}")

    def gate_and_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of gate_up or its bias what is no padding: [experts, 2, I, ...]."""
        count, rows = tensor.shape[:2]
        return tensor.view(count, 2, rows // 2, *tensor.shape[2:])[:, :, : self.valid]


def _experts(moe: MoE, prefix: str) -> Iterator[CheckpointWeight]:
    """A tensor for each expert and projection: "experts.7.gate_proj.weight"."""
    size, hidden = moe.config.intermediate_size, moe.down.shape[1]
    gate_up, down = moe.gate_and_up(moe.gate_up), moe.down[:, :, : moe.valid]
    for index in range(moe.config.num_experts):
        name = f"{prefix}.experts.{index}"
        for half, projection in enumerate(("gate_proj", "up_proj")):
            shards = (Shard(gate_up[index, half], 0, moe.begin),)
            yield CheckpointWeight(f"{name}.{projection}.weight", (size, hidden), shards)
        yield CheckpointWeight(f"{name}.down_proj.weight", (hidden, size), (Shard(down[index], 1, moe.begin),))


def _stacked(moe: MoE, gate_up_name: str, down_name: str) -> Iterator[CheckpointWeight]:
    """All experts in one tensor: gate and up [experts, 2 I, hidden], and down [experts, hidden, I]."""
    count, size, hidden = moe.config.num_experts, moe.config.intermediate_size, moe.down.shape[1]
    gate_up = moe.gate_and_up(moe.gate_up)
    halves = tuple(Shard(gate_up[:, half], 1, half * size + moe.begin) for half in range(2))
    if moe.down.shape[2] == size:  # no padding and no other rank: one piece
        halves = (Shard(moe.gate_up, 1, 0),)
    yield CheckpointWeight(gate_up_name, (count, 2 * size, hidden), halves)
    shards = (Shard(moe.down[:, :, : moe.valid], 2, moe.begin),)
    yield CheckpointWeight(down_name, (count, hidden, size), shards)


def _linears(moe: MoE, prefix: str) -> Iterator[CheckpointWeight]:
    """"input_linear.weight" and "output_linear.weight", stacked."""
    yield from _stacked(moe, f"{prefix}.input_linear.weight", f"{prefix}.output_linear.weight")


def _parameters(moe: MoE, prefix: str) -> Iterator[CheckpointWeight]:
    """"experts.gate_up_proj" and "experts.down_proj", stacked: as transformers' modules hold them in memory."""
    yield from _stacked(moe, f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj")


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


_LAYOUTS = {"experts": _experts, "linears": _linears, "parameters": _parameters, "transposed": _transposed}
