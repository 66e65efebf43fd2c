"""x times the experts that its rows chose, by what a GemmConfig names."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels import Kernels
from nanovllm.kernels.fp8 import few_experts
from nanovllm.kernels.fp8.operands import FP8Weight
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.kernels.moe import few_packed, few_rows
from nanovllm.kernels.moe.experts import ExpertActivation, ExpertWeight
from nanovllm.kernels.moe.routing import TopK
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.pointwise.norm import Norm


class Routed(NamedTuple):
    """Experts of each row."""

    kernels: Kernels
    logits: Tensor
    """float32 [parts, T, experts or more], a sum over parts."""
    options: TopK
    routing: Any = None
    """Result of Kernels.route, for tiles; None: kernels for a few rows choose by the logits themselves."""
    activation: ExpertActivation = ExpertActivation()
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    """[E, 2 I] of gate and up, and [E, H] of down."""
    router_bias: Tensor | None = None
    """[experts], on the logits; tiles have it in `routing`."""

    @property
    def num_tokens(self) -> int:
        return self.logits.shape[1]


def linear(
    x: Tensor, weight: ExpertWeight, config: GemmConfig, routed: Routed | None, *, gated: bool,
    norm: Norm | None = None, residual: Tensor | None = None, delta: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """gated: x [T, H] by weight [E, 2 I, H], gates first, -> the activation of each choice, as the other product takes
    it. Else that by weight [E, H, I], times each choice's score: [top_k, T, H] in float32, or in x's dtype with
    config.round_sums; by kernels for few rows their sum [T, H], which is added to `residual`, where there is one. norm:
    of x, for kernels for few rows. delta float32 [T * top_k, rows of an expert], in routing's order: added to the
    products before these are rounded; not by kernels for few rows."""
    assert routed is not None
    if config.is_skinny and isinstance(weight, PackedWeight):
        chosen = few_packed.Chosen(routed.logits, routed.options, routed.router_bias)
        if gated:
            limits = (routed.activation.alpha, routed.activation.limit)
            return few_packed.gate_up(x, weight, chosen, config, norm, routed.biases[0], limits)
        return few_packed.down(x, weight, chosen, config, residual, routed.biases[1])
    if config.is_skinny:
        assert delta is None, config
        few: Any = few_experts if isinstance(weight, FP8Weight) else few_rows
        multiply, beside = (few.gate_up, norm) if gated else (few.down, residual)
        return multiply(x, weight, routed.logits, routed.options, config, beside)
    if gated:
        bias, activation = routed.biases[0], routed.activation
        return routed.kernels.expert_gate_up(x, weight, routed.routing, config, activation, bias, delta)
    dtype = x.dtype if config.round_sums else torch.float32
    return routed.kernels.expert_down(x, weight, routed.routing, config, dtype, routed.biases[1], delta)
