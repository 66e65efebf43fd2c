"""Few rows by weights of 4 and 8 bits that pass through registers, dense and of experts, against the definition in
float64 and the twins: interpreted in float32 and float16 on a CPU, on a GPU in bfloat16."""

from typing import Any

import pytest
import torch
from gemm_checks import DEVICE, EPS, TOLERANCE, check_pdl, check_rows_apart, exact, randn, relative_error
from interpreting import some_nightly
from packed_experts import packed_experts
from test_int4_gemm import made_of
from test_packed_experts import CLAMPED, CODES

from nanovllm.kernels.gemm import fma, stream
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
from nanovllm.kernels.pointwise.norm import Norm, add_norms, norm_reference

DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
NARROW, WIDE = streaming(2, 2), streaming(1, 3, columns=256)
PLAIN = ExpertActivation()


def weights(name: str, n: int, k: int, dtype: torch.dtype, seed: int = 0) -> tuple[PackedWeight, torch.Tensor]:
    """A random weight, and its values float64 [n, k]."""
    code, group, has_zeros = CODES[name]
    if has_zeros:
        experts, values = packed_experts(code, group, has_zeros, 1, n, k, dtype, DEVICE, seed)
        return experts.of_expert(0), values[0].double()
    return made_of(code, group, n, k, dtype)


@pytest.mark.parametrize(("name", "rows", "n", "k", "config"), some_nightly(
    [(name, rows, *sizes) for name in CODES for rows in (1, 3, 8)
     for sizes in ((40, 320, NARROW), (34, 416, WIDE), (48, 96, WIDE))],
    always=[(name, 1 + 2 * (at % 2), 34, 416, WIDE) for at, name in enumerate(CODES)],
))  # fmt: skip
def test_products_match_float64(name: str, rows: int, n: int, k: int, config: GemmConfig) -> None:
    """With norm, activation and residual, at widths that no tile, block or group divides."""
    dtype = DTYPE if rows != 3 or DEVICE.type == "cuda" else torch.float16
    (weight, values), x, residual = weights(name, n, k, dtype), randn(rows, k, dtype=dtype), randn(rows, n, dtype=dtype)
    got = stream.linear(x, weight, config, residual=residual.clone())
    assert relative_error(got, exact(x, values) + residual.double()) < TOLERANCE[dtype]
    norm = Norm(randn(k, dtype=dtype, seed=7).abs() + 0.5, EPS) if rows < 8 else None
    normed = x if norm is None else add_norms(x, None, norm)[0]
    got = stream.linear(x, weight, config, norm=norm, gated=True)
    assert relative_error(got, exact(normed, values, gated=True)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["nvfp4", "int4 of 32 with zeros"])
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    """Among as many rows."""
    weight, _ = weights(name, 34, 300 if "int4" in name else 320, DTYPE)
    check_rows_apart(lambda x: stream.linear(x, weight, NARROW), randn(3, weight.k, dtype=DTYPE), counts=(3,))


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


@pytest.mark.gpu
@pytest.mark.parametrize("name", CODES)
def test_dependent_launch_in_a_graph_gives_the_same_bits(name: str) -> None:
    (gate_up, _), (down, _) = weights(name, 2048, 1152, DTYPE), weights(name, 1152, 1024, DTYPE, 5)
    start = randn(2, 1152, dtype=DTYPE)
    norm, config = Norm(start[0].abs() + 0.5, EPS), streaming(4, 2)

    def layer(hidden: torch.Tensor, residual: torch.Tensor) -> None:
        x = stream.linear(hidden, gate_up, config, norm=norm, gated=True)
        stream.linear(x / x.abs().amax(), down, config, residual=residual)
        hidden.copy_(residual)

    check_pdl(layer, start)


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
