"""Experts of few tokens in 4 and 8 bits, whose weights pass through registers, against the twins: interpreted in
float32 on a CPU, on a GPU in bfloat16."""

from typing import Any

import pytest
import torch
from gemm_checks import DEVICE, EPS, TOLERANCE, check_pdl, randn, relative_error
from interpreting import some_nightly
from packed_experts import packed_experts
from test_packed_experts import CLAMPED, CODES

from nanovllm.kernels.gemm import fma
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.kernels.moe import few_streamed
from nanovllm.kernels.moe.choice import Chosen
from nanovllm.kernels.moe.experts import (
    ExpertActivation,
    expert_down_reference,
    expert_gate_up_reference,
)
from nanovllm.kernels.moe.routing import TopK, route_reference
from nanovllm.kernels.plan.config import GemmConfig, streaming
from nanovllm.kernels.plan.rules import FEW_ROUTER
from nanovllm.kernels.pointwise.norm import Norm, norm_reference

DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
NARROW, WIDE = streaming(2, 2), streaming(1, 3, columns=256)
PLAIN = ExpertActivation()


def mixed(
    x: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, chosen: Chosen, config: GemmConfig, norm: Norm | None,
    biases: tuple[Any, Any], activation: ExpertActivation, residual: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    h = few_streamed.gate_up(x, gate_up, chosen, config, activation, norm, biases[0])
    return few_streamed.down(h, down, chosen, config, residual, bias=biases[1])


@pytest.mark.parametrize(("name", "config", "biased"), some_nightly(
    [(name, config, biased) for name in CODES for config in (NARROW, WIDE) for biased in (True, False)],
    always=[(name, NARROW if at % 2 else WIDE, at % 3 == 0) for at, name in enumerate(CODES)],
))  # fmt: skip
def test_a_mixture_is_that_of_the_twins(name: str, config: GemmConfig, biased: bool) -> None:
    """With norm and residual inside and without; with biases of router and experts and a clamped activation."""
    experts, hidden, width, rows = 5, 160, 96, 2
    options = TopK(experts, 3) if biased else TopK(experts, 2, renormalise=False, scale=1.5)
    gate_up, _ = packed_experts(*CODES[name], experts, 2 * width, hidden, DTYPE, DEVICE)
    down, _ = packed_experts(*CODES[name], experts, hidden, width, DTYPE, DEVICE, seed=1)
    logits = randn(1, rows, experts + 1, dtype=torch.float32, seed=3)
    of_router, biases, activation = None, (None, None), PLAIN
    if biased:
        of_router, activation = randn(experts, dtype=DTYPE, seed=4), CLAMPED
        biases = randn(experts, 2 * width, dtype=DTYPE, seed=5), randn(experts, hidden, dtype=DTYPE, seed=6)
    routing = route_reference(logits, options, 16, of_router)
    residual, norm = randn(rows, hidden, dtype=DTYPE), Norm(randn(hidden, dtype=DTYPE, seed=1).abs() + 0.5, EPS)
    x = norm_reference(residual, norm)
    h = expert_gate_up_reference(x, gate_up, routing, config, activation, biases[0])
    want = expert_down_reference(h, down, routing, config, torch.float32, biases[1]).sum(0)
    chosen = Chosen(logits, options, of_router)
    got = mixed(x, gate_up, down, chosen, config, None, biases, activation, None)
    assert relative_error(got, want) < TOLERANCE[DTYPE]
    alone = Chosen(logits[:, :1].contiguous(), options, of_router)
    kept = residual[:1].clone()
    got = mixed(kept, gate_up, down, alone, config, norm, biases, activation, kept)
    assert got is kept
    assert relative_error(got, want[:1] + residual[:1].double()) < TOLERANCE[DTYPE]


@pytest.mark.parametrize("name", ["int4 of 64", "nvfp4"])
def test_experts_without_gates_are_those_of_the_twin(name: str) -> None:
    """relu(up) ** 2, with a norm inside."""
    experts, hidden, width, options, squared = 5, 160, 112, TopK(5, 2), ExpertActivation(gated=False)
    up, _ = packed_experts(*CODES[name], experts, width, hidden, DTYPE, DEVICE)
    down, _ = packed_experts(*CODES[name], experts, hidden, width, DTYPE, DEVICE, seed=1)
    logits, residual = randn(1, 2, experts, dtype=torch.float32, seed=3), randn(2, hidden, dtype=DTYPE)
    norm = Norm(randn(hidden, dtype=DTYPE, seed=1).abs() + 0.5, EPS)
    routing = route_reference(logits, options, 16)
    h = expert_gate_up_reference(norm_reference(residual, norm), up, routing, NARROW, squared)
    want = expert_down_reference(h, down, routing, NARROW, torch.float32).sum(0) + residual.double()
    got = mixed(residual, up, down, Chosen(logits, options), NARROW, norm, (None, None), squared, residual)
    assert relative_error(got, want) < TOLERANCE[DTYPE]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CODES)
def test_experts_launched_dependently_in_a_graph_give_the_same_bits(name: str) -> None:
    """Behind the router, in one chain over layers."""
    experts, hidden, width, options = 16, 1024, 384, TopK(16, 4)
    router, norm = randn(experts, hidden, dtype=DTYPE, seed=3), Norm(randn(hidden, dtype=DTYPE).abs() + 0.5, EPS)
    gate_up, _ = packed_experts(*CODES[name], experts, 2 * width, hidden, DTYPE, DEVICE)
    down, _ = packed_experts(*CODES[name], experts, hidden, width, DTYPE, DEVICE, seed=1)

    def layer(hidden: torch.Tensor, residual: torch.Tensor) -> None:
        logits = fma.linear(residual, router, FEW_ROUTER, norm=norm, out_dtype=torch.float32)[None]
        chosen, biases = Chosen(logits, options), (None, None)
        mixed(residual, gate_up, down, chosen, streaming(4, 2), norm, biases, PLAIN, residual)
        hidden.copy_(residual)

    check_pdl(layer, randn(2, hidden, dtype=DTYPE))
