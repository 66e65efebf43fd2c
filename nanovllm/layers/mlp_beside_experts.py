"""A dense MLP and a mixture of experts side by side, each between norms of its own (Gemma 4)."""

from collections.abc import Iterator

import torch

from nanovllm.kernels.plan.product import Around
from nanovllm.layers.context import ModelContext
from nanovllm.layers.linear import Operation
from nanovllm.layers.mlp import dense_mlp
from nanovllm.layers.moe import MoE
from nanovllm.layers.norm import RowNorm
from nanovllm.layers.step import Call
from nanovllm.layers.weights import CheckpointWeight, WeightedModule
from nanovllm.model_config import LayerSpec


class MLPBesideExperts(WeightedModule):
    """The residual stream [T, hidden] -> [2, T, hidden], partial sums of the MLP and of the experts, for a
    ReduceAddNorm with `out_norms`; on one rank [T, hidden], the sum of both after these norms. The router takes rows
    that a norm of its own gives."""

    takes_residual = True

    def __init__(self, context: ModelContext, spec: LayerSpec, around: Around) -> None:
        super().__init__()
        config = context.config
        self.kernels, norm = context.kernels, (context, config.hidden_size, config.norm_eps)
        around = Around("own rms" if spec.quantization is None else "")
        self.dense, self.experts = dense_mlp(context, spec, around), MoE(context, spec, around)
        self.operations = (*self.dense.operations, *self.experts.operations)
        self.norms = {name: RowNorm(*norm, kind=config.norm_kind) for name in ("norm", "experts_norm")}
        self.norms["router_norm"] = RowNorm(*norm)
        both = tuple(RowNorm(*norm, kind=config.norm_kind) for _ in range(2))
        self.out_norms = both if context.group.size > 1 else ()
        self._out_norms = dict(zip(("out_norm", "experts_out_norm"), both, strict=True))
        for name, each in (*self.norms.items(), *self._out_norms.items()):
            self.add_module(name, each)

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        firsts = (self.dense.gate_up_proj, self.experts.gate_up, self.experts.router)
        of_dense, of_experts, of_router = (
            self._normed(x, norm, first, call) for norm, first in zip(self.norms.values(), firsts, strict=True)
        )
        dense, experts = self.dense(*of_dense), self.experts(*of_experts, of_router)
        if self.out_norms:
            return torch.stack((dense, experts))
        first, second = self._out_norms.values()
        return self.kernels.add_norms(experts, first(dense), None, second.for_kernel())[1]

    def _normed(self, x: torch.Tensor, norm: RowNorm, first: Operation, call: Call) -> tuple[torch.Tensor, Call]:
        """Rows for an operation, and its call: normalised already, unless what is launched for it does so."""
        if first.launch(x.shape[0], call).norm:
            return x, call._replace(norm=norm.for_kernel())
        return norm(x), call

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.dense.checkpoint_weights(prefix)
        yield from self.experts.checkpoint_weights(prefix)
        for name, norm in (*self.norms.items(), *self._out_norms.items()):
            yield from norm.checkpoint_weights(f"{prefix}.{name}")
