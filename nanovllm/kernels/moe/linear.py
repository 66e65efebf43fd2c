"""x times the experts that its rows chose, by what a GemmConfig names."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels import Kernels
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.moe import few_rows, few_streamed
from nanovllm.kernels.moe.choice import Chosen
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
    of_router: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    """Bias, correction and factors [experts], see routing.route; tiles have them in `routing`."""
    shared: Tensor | None = None
    """[T, H] of a shared expert, which kernels for a few rows add to the sum of the others."""
    beside: tuple[Tensor | None, Tensor | None] = (None, None)
    """Weights [2 I', H] and [H, I'] of a shared expert that those kernels compute, I' a multiple of I."""
    shared_gate: bool = False
    """The sigmoid of the logit behind the experts' multiplies it."""

    @property
    def num_tokens(self) -> int:
        return self.logits.shape[1]


def linear(
    x: Tensor | FP8Rows, weight: ExpertWeight, config: GemmConfig, routed: Routed | None, *, gated: bool,
    norm: Norm | None = None, residual: Tensor | None = None, delta: Tensor | None = None, rounds: bool = False,
) -> Tensor | FP8Rows:  # fmt: skip
    """gated: x [T, H] by weight [E, 2 I, H], gates first, -> the activation of each choice, as the other product takes
    it. Else that by weight [E, H, I], times each choice's score: [top_k, T, H] in float32, or in x's dtype with
    config.round_sums; by kernels for few rows their sum [T, H], and what a shared expert computed, which are added to
    `residual`, where there is one. norm: of x, for kernels for few rows. delta float32 [T * top_k, rows of an expert],
    in routing's order: added to the products before these are rounded; not by kernels for few rows. rounds: see
    expert_gate_up."""
    assert routed is not None
    assert delta is None or not config.is_skinny, config
    activation, (of_gate_up, of_down) = routed.activation, routed.biases
    if config.is_skinny:
        assert isinstance(x, Tensor)
        chosen = Chosen(routed.logits, routed.options, *routed.of_router)
        if gated:
            around = (chosen, config, activation, norm)
            if isinstance(weight, Tensor):
                return few_rows.gate_up(x, weight, *around, routed.beside[0])
            return few_streamed.gate_up(x, weight, *around, of_gate_up)
        adds = (chosen, config, residual, routed.shared, routed.shared_gate)
        if isinstance(weight, Tensor):
            return few_rows.down(x, weight, *adds, routed.beside[1])
        return few_streamed.down(x, weight, *adds, of_down)
    if gated:
        more = {"rounds": True} if rounds else {}
        return routed.kernels.expert_gate_up(x, weight, routed.routing, config, activation, of_gate_up, delta, **more)
    dtype = x.dtype if config.round_sums else torch.float32
    return routed.kernels.expert_down(x, weight, routed.routing, config, dtype, of_down, delta)
