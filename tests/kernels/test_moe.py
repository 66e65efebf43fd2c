"""The kernels of mixtures of experts against their twins: any number of rows, experts without rows and with nearly
all."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreting import fewer, nightly, some_nightly
from token_by_token import mixed

from nanovllm.kernels.moe.combine import combine, combine_reference
from nanovllm.kernels.moe.experts import (
    ExpertActivation,
    expert_down,
    expert_down_reference,
    expert_gate_up,
    expert_gate_up_reference,
    experts_of,
)
from nanovllm.kernels.moe.router import router_logits
from nanovllm.kernels.moe.routing import Routing, TopK, choices, choices_reference, max_tiles, route, route_reference
from nanovllm.kernels.plan.config import FP8, INT4, MXFP4, GemmConfig
from nanovllm.kernels.plan.device import Device
from nanovllm.kernels.plan.rules import expert_tiles
from nanovllm.kernels.pointwise.norm import Norm, norm_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2} if torch.cuda.is_available() else {"rtol": 1e-5, "atol": 1e-5}
PLAIN, CLAMPED = ExpertActivation(), ExpertActivation(limit=0.7, alpha=1.7)
SQUARED = ExpertActivation(gated=False)
ROUTERS = {
    "softmax": TopK(6, 3),
    "softmax, not renormalised": TopK(6, 2, renormalise=False),
    "one expert": TopK(5, 1, scale=1.5),
    "sigmoid": TopK(12, 4, sigmoid=True, scale=2.5),
    "groups": TopK(12, 3, sigmoid=True, num_groups=4, top_groups=2),
    "groups of softmax": TopK(12, 3, num_groups=4, top_groups=2, renormalise=False, scale=1.5),
    "softmax, corrected": TopK(12, 4, scale=1.5),
    "many": TopK(128, 8),
}


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_same_routing(ours: Routing, theirs: Routing) -> None:
    assert torch.equal(ours.order, theirs.order)
    assert torch.equal(ours.tiles, theirs.tiles)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        *((rows, name) for rows in (1, 5) for name in ROUTERS),
        (136, "many"),  # so many blocks of rows that their counts are read in two rounds
        *(nightly(rows, name) for rows in (16, 200) for name in ROUTERS),
    ],
)
def test_routing_is_that_of_the_twin(rows: int, name: str) -> None:
    options = ROUTERS[name]
    logits = rand(2, rows, options.num_experts + 1, dtype=torch.float32)  # a column that is no expert's
    bias = rand(options.num_experts, seed=1)
    is_corrected = options.sigmoid or name.endswith("corrected")
    correction = rand(options.num_experts, seed=2, dtype=torch.float32) if is_corrected else None
    for block_m in (16, 64):
        args = (logits, options, block_m, bias, correction)
        assert_same_routing(route(*args), route_reference(*args))


@given(st.integers(1, fewer(50, 300)), st.integers(1, 40), st.integers(1, 8), st.integers(0, 99))
@settings(max_examples=fewer(6, 15), deadline=None)
def test_every_choice_is_placed_once_in_a_tile_of_its_expert(rows: int, experts: int, top_k: int, seed: int) -> None:
    options = TopK(experts, min(top_k, experts))
    logits = rand(1, rows, experts, seed=seed, dtype=torch.float32)
    routing = route(logits, options, 16)
    assert_same_routing(routing, route_reference(logits, options, 16))
    assert routing.order.sort().values.tolist() == list(range(rows * options.top_k))
    assert len(routing.tiles) == max_tiles(rows * options.top_k, experts, 16)
    covered = sum(min(16, end - first) for expert, first, end in routing.tiles.tolist() if expert >= 0)
    assert covered == rows * options.top_k


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf"), 0.0])
def test_logits_of_any_value_choose_different_experts(value: float) -> None:
    logits = torch.full((1, 9, 6), value, device=DEVICE)
    order = route(logits, TopK(6, 3), 16).order
    assert order.sort().values.tolist() == list(range(27))


def logits_of(kind: str, rows: int, experts: int) -> torch.Tensor:
    """"crowded": two experts get nearly all rows; "spread": all get some."""
    logits = rand(1, rows, experts, seed=3, dtype=torch.float32)
    if kind == "crowded":
        logits[:, : rows - 1, 1:3] += 100
    return logits


SMALL, X_LEFT, TALL = (GemmConfig("tile", n, rows, 32, 2) for n, rows in ((64, 16), (32, 16), (32, 64)))


GROUPED = product([(SMALL, True), (X_LEFT, False), (TALL, False), (TALL, True)], [1, 36], ["spread", "crowded"])


@pytest.mark.parametrize(
    ("how", "rows", "kind"),
    some_nightly(
        GROUPED,
        always=[
            ((SMALL, True), 36, "spread"),
            ((X_LEFT, False), 36, "crowded"),
            ((TALL, False), 1, "spread"),
            ((TALL, True), 36, "crowded"),
        ],
    ),
)
def test_grouped_gemms_are_those_of_their_twins(
    how: tuple[GemmConfig, bool], rows: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths that no tile divides, with biases, sums of adapters and all activations; weights by descriptors or not."""
    config, tma = how
    monkeypatch.setattr(Device, "has_tma", tma)
    experts, hidden, width, top_k = 7, 72, 40, 3
    routing = route_reference(logits_of(kind, rows, experts), TopK(experts, top_k), config.block_m)
    x = rand(rows, hidden)
    down = rand(experts, hidden, width, seed=2) / width**0.5
    for activation, biased in ((PLAIN, False), (CLAMPED, True), (SQUARED, True)):
        ups = (1 + activation.gated) * width
        gate_up = rand(experts, ups, hidden, seed=1) / hidden**0.5
        bias = (rand(experts, ups, seed=4), rand(experts, hidden, seed=5)) if biased else (None, None)
        delta = [rand(rows * top_k, n, seed=6).float() if biased else None for n in (ups, hidden)]
        h = expert_gate_up(x, gate_up, routing, config, activation, bias[0], delta[0])
        expected = expert_gate_up_reference(x, gate_up, routing, config, activation, bias[0], delta[0])
        torch.testing.assert_close(h, expected, **TOLERANCE)
        parts = expert_down(expected, down, routing, config, torch.float32, bias[1], delta[1])
        expected = expert_down_reference(expected, down, routing, config, torch.float32, bias[1], delta[1])
        torch.testing.assert_close(parts, expected, **TOLERANCE)


def test_choices_are_those_of_the_tiles() -> None:
    options = TopK(7, 3)
    routing = route_reference(logits_of("crowded", 36, 7), options, 16)
    slots = (torch.arange(36, dtype=torch.int32, device=DEVICE) * 5) % 7 - 1
    for kernel in (choices, choices_reference):
        token, slot = kernel(routing, slots, 7)
        assert torch.equal(token, routing.order // 3)
        for number, first, end in experts_of(routing):
            assert torch.equal(slot[first:end], slots[token[first:end]].mul(7).add(number).clamp(min=-1))
    each = [route_reference(logits, options, 16) for logits in logits_of("spread", 5, 7).split(1, 1)]
    token, slot = choices_reference(each, slots[:5], 7)
    assert token.tolist() == [number for number in range(5) for _ in range(3)]
    alone = [choices_reference(one, slots[number, None], 7)[1] for number, one in enumerate(each)]
    assert torch.equal(slot, torch.cat(alone))


@pytest.mark.parametrize(("rows", "experts", "block_m"), [(1, 5, 16), (300, 3, 16), (150, 40, 64), (700, 2, 16)])
def test_choices_by_the_kernel(rows: int, experts: int, block_m: int) -> None:
    options = TopK(experts, 2)
    routing = route_reference(logits_of("spread", rows, experts), options, block_m)
    slots = (torch.arange(rows, dtype=torch.int32, device=DEVICE) * 5) % 3 - 1
    for found, expected in zip(*(made(routing, slots, experts) for made in (choices, choices_reference)), strict=True):
        assert torch.equal(found, expected)


def mixture(
    x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, block_m: int
) -> torch.Tensor:
    """The whole block by the kernels, in tiles of one size."""
    config = replace(SMALL, block_m=block_m)
    routing = route(router_logits(x, router, GemmConfig()), TopK(router.shape[0], 3), block_m)
    h = expert_gate_up(x, gate_up, routing, config, PLAIN)
    return combine(expert_down(h, down, routing, config, torch.float32), x.dtype)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    weights = rand(6, 64, seed=1), rand(6, 2 * 32, 64, seed=2), rand(6, 64, 32, seed=3)
    x = rand(40, 64)
    whole = mixture(x, *weights, 16)
    for others in (x.flip(0), torch.full_like(x, float("nan"))):
        crowd = others.clone()
        crowd[7], crowd[30] = x[7], x[30]
        mixed = mixture(crowd, *weights, 16)
        assert torch.equal(mixed[7], whole[7]) and torch.equal(mixed[30], whole[30])


FEW = {
    "plain": (TopK(40, 3), PLAIN, ""),
    "not renormalised": (TopK(6, 2, renormalise=False), PLAIN, ""),
    "one expert": (TopK(5, 1, scale=1.5), PLAIN, ""),
    "sigmoid": (TopK(12, 4, sigmoid=True, scale=2.5), SQUARED, "correction"),
    "sigmoid alone": (TopK(12, 2, sigmoid=True, renormalise=False), PLAIN, ""),
    "corrected softmax": (TopK(12, 4), PLAIN, "correction bias"),
    "factors": (TopK(12, 4, logits_scale=0.5), ExpertActivation(alpha=None), "factors"),
}  # fmt: skip
"""Choices and activations, and what the router has besides."""


def everyone(rows: int) -> Routing:
    """All rows choose the only expert there is."""
    return route_reference(torch.zeros(1, rows, 1, device=DEVICE), TopK(1, 1), 16)


@pytest.mark.parametrize("name", FEW)
def test_few_tokens_without_sorting_are_the_twins_of_many(name: str) -> None:
    """Logits with ties, zeros of both signs and what is no number; widths that no tile divides. And each token by
    itself."""
    (options, activation, has), rows, hidden, width = FEW[name], 2, 72, 40
    count, of_router = options.num_experts, [None, None, None]
    for at, one in enumerate(("bias", "correction", "factors")):
        if one in has:
            of_router[at] = rand(count, seed=5 + at, dtype=DTYPE if one == "bias" else torch.float32)
    residual, norm = rand(rows, hidden), Norm(rand(hidden, seed=1).abs(), 1e-6)
    first = (1 + activation.gated) * width
    gate_up, down = rand(count, first, hidden, seed=2) / hidden**0.5, rand(count, hidden, width, seed=3) / 6
    logits = rand(1, rows, count + 1, seed=4, dtype=torch.float32)
    logits[0, 0, 1:4], logits[0, 1, :3] = 2.0, torch.tensor([-0.0, 0.0, -0.0])
    if options.renormalise and not options.sigmoid and not has:  # else the twin's sum over all is no number either
        logits[0, 1, 3] = float("nan")
    routing = route_reference(logits, options, 16, *of_router)
    x = norm_reference(residual, norm)
    h = expert_gate_up_reference(x, gate_up, routing, SMALL, activation)
    parts = expert_down_reference(h, down, routing, SMALL, torch.float32)
    around: dict[str, Any] = {"activation": activation, "of_router": tuple(of_router)}
    total = mixed(x, logits, options, gate_up, down, **around)
    torch.testing.assert_close(total, combine_reference(parts, DTYPE), **TOLERANCE)
    for gate in (None, logits):
        shared = rand(rows, hidden, seed=9)
        want = combine_reference(parts, DTYPE, shared, gate, count)
        total = mixed(x, logits, options, gate_up, down, shared=shared, shared_gate=gate is not None, **around)
        torch.testing.assert_close(total, want, **TOLERANCE)
        for number in (1, 2):  # a shared expert that the same kernels compute, as wide as so many
            beside = rand(number * first, hidden, seed=10) / hidden**0.5, rand(hidden, number * width, seed=11) / 6
            h = expert_gate_up_reference(x, beside[0][None], everyone(rows), SMALL, activation)
            want = combine_reference(parts, DTYPE, h @ beside[1].T, gate, count)
            total = mixed(x, logits, options, gate_up, down, beside=beside, shared_gate=gate is not None, **around)
            torch.testing.assert_close(total, want, **TOLERANCE)
    expected = combine_reference(parts, DTYPE, residual)
    alone = [
        mixed(residual[row : row + 1].clone(), logits[:, row : row + 1], options, gate_up, down, norm, **around)
        for row in range(rows)
    ]
    got = mixed(residual, logits, options, gate_up, down, norm, **around)
    assert got is residual
    torch.testing.assert_close(got, expected, **TOLERANCE)
    assert torch.equal(torch.cat(alone), got)


@pytest.mark.parametrize("gated", [True, False])
def test_combining_is_that_of_the_twin(gated: bool) -> None:
    parts, shared = rand(3, 5, 40, dtype=torch.float32), rand(5, 40, seed=1)
    logits = rand(2, 5, 7, seed=2, dtype=torch.float32) if gated else None
    args = (parts, DTYPE, shared, logits, 6)
    torch.testing.assert_close(combine(*args), combine_reference(*args), **TOLERANCE)
    torch.testing.assert_close(combine(parts, DTYPE), combine_reference(parts, DTYPE), **TOLERANCE)


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (32, 4), (8, 2), (60, 4)])
def test_both_gemms_of_a_layer_have_tiles_of_equal_rows(num_experts: int, top_k: int) -> None:
    for tokens in (1, 2, 16, 64, 256, 1024, 4096):
        for dtype in ("bfloat16", "float32", FP8, INT4, MXFP4):
            gate_up, down = expert_tiles(tokens * top_k, num_experts, dtype)
            assert gate_up.block_m == down.block_m
