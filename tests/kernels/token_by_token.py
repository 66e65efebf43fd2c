"""A mixture of experts by the kernels that read each token's experts by themselves."""

from typing import Any

import torch

from nanovllm.kernels import select_kernels
from nanovllm.kernels.fp8.operands import FP8Weight
from nanovllm.kernels.moe.linear import Routed, linear
from nanovllm.kernels.moe.routing import TopK
from nanovllm.kernels.plan.rules import FEW_EXPERTS, FP8_FEW_EXPERTS
from nanovllm.kernels.pointwise.norm import Norm


def mixed(
    x: torch.Tensor, logits: torch.Tensor, options: TopK, gate_up: Any, down: Any, norm: Norm | None = None,
    **routing: Any,
) -> torch.Tensor:  # fmt: skip
    """The sum of what the experts of each row of x [T, H] make of it. norm: of x, which is the residual stream then, to
    which the sum is added in place. routing: more of Routed."""
    first, second = FP8_FEW_EXPERTS if isinstance(gate_up, FP8Weight) else FEW_EXPERTS
    routed = Routed(select_kernels("cpu"), logits, options, **routing)
    h = linear(x, gate_up, first, routed, gated=True, norm=norm)
    return linear(h, down, second, routed, gated=False, residual=None if norm is None else x)
