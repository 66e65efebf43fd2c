"""A dense MLP and a mixture of experts side by side, each between norms of its own (Gemma 4)."""

from collections.abc import Iterator

import torch

from nanovllm.kernels.plan.product import ANYTHING, Around
from nanovllm.layers.context import ModelContext
from nanovllm.layers.mlp import dense_mlp
from nanovllm.layers.moe import MoE
from nanovllm.layers.norm import RowNorm
from nanovllm.layers.step import Call
from nanovllm.layers.weights import CheckpointWeight, WeightedModule
from nanovllm.model_config import LayerSpec


class MLPBesideExperts(WeightedModule):
    """The residual stream [T, hidden] -> [2, T, hidden], partial sums of the MLP and of the experts, for a
    ReduceAddNorm with `out_norms`. The router takes rows that a norm of its own gives."""

    takes_residual = True

    def __init__(self, context: ModelContext, spec: LayerSpec, around: Around) -> None:
        super().__init__()
        config = context.config
        self.kernels, norm = context.kernels, (context, config.hidden_size, config.norm_eps)
        self.dense = dense_mlp(context, spec, ANYTHING)
        self.experts = MoE(context, spec, ANYTHING)
        self.operations = (*self.dense.operations, *self.experts.operations)
        self.norms = {name: RowNorm(*norm, kind=config.norm_kind) for name in ("norm", "experts_norm")}
        self.norms["router_norm"] = RowNorm(*norm)
        self.out_norms = tuple(RowNorm(*norm, kind=config.norm_kind) for _ in range(2))
        for name, each in self.norms.items():
            self.add_module(name, each)

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        of_dense, of_experts, of_router = (
            self.kernels.add_norms(x, None, norm.for_kernel())[0] for norm in self.norms.values()
        )
        return torch.stack((self.dense(of_dense, call), self.experts(of_experts, call, of_router)))

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.dense.checkpoint_weights(prefix)
        yield from self.experts.checkpoint_weights(prefix)
        for name, norm in self.norms.items():
            yield from norm.checkpoint_weights(f"{prefix}.{name}")
        for name, norm in zip(("out_norm", "experts_out_norm"), self.out_norms, strict=True):
            yield from norm.checkpoint_weights(f"{prefix}.{name}")
