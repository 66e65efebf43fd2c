"""FP8 products against the definition in float64: interpreted on a CPU, compiled on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from token_by_token import mixed
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.kernels.fp8 import gemm
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.quantize import quantize_rows
from nanovllm.kernels.fp8.reference import FP8, quantize_rows_reference
from nanovllm.kernels.gemm import stream
from nanovllm.kernels.moe import experts as grouped
from nanovllm.kernels.moe import few_streamed
from nanovllm.kernels.moe.routing import TopK, route_reference
from nanovllm.kernels.plan.config import GemmConfig, streaming
from nanovllm.kernels.plan.device import Device
from nanovllm.kernels.plan.fits import rounds_inside
from nanovllm.kernels.pointwise import norm
from nanovllm.kernels.pointwise.activation import activation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-3 if DEVICE == "cuda" else 1e-6
"""Error as a share of the largest result: tensor cores keep some 14 bits within a group of 128."""
WEIGHTS_LEFT = GemmConfig("tile", 64, 16, 128, 3)
X_LEFT = GemmConfig("tile", 32, 64, 256, 2)


def inputs(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    """Rows and groups of magnitudes far apart, a group of zeros among them."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=draw) * torch.exp(2 * torch.randn(rows, 1, generator=draw))
    x[:, : k // 2] *= 30
    x[rows // 2, :128] = 0
    return x.to(DEVICE)


def weights(n: int, k: int, rows_each: int, in_blocks: bool, input_scale: list[float] | None = None) -> FP8Weight:
    draw = torch.Generator().manual_seed(n + k)
    values = (torch.randn(n, k, generator=draw) * 60).to(FP8)
    scale = torch.rand(-(-n // rows_each), -(-k // 128) if in_blocks else 1, generator=draw) / 100 + 1e-3
    static = None if input_scale is None else torch.tensor(input_scale, device=DEVICE)
    return FP8Weight(values.to(DEVICE), scale.to(DEVICE), rows_each, static)


def expert_weights(experts: int, n: int, k: int, rows_each: int, in_blocks: bool) -> FP8Weight:
    """Weights whose scales differ by expert."""
    one = weights(n, k, rows_each, in_blocks)
    scales = [one.scale * (index + 1) for index in range(experts)]
    return FP8Weight(torch.stack([one.values] * experts), torch.stack(scales), rows_each)


def exact(rows: FP8Rows, weight: FP8Weight) -> torch.Tensor:
    """Widened by their scales, multiplied in float64."""
    n, k = weight.values.shape
    x = rows.values.double() * rows.scales.double().repeat_interleave(128, 1)[:, :k]
    scale = weight.scale.double().repeat_interleave(weight.rows_each, 0)[:n]
    scale = scale.repeat_interleave(128, 1)[:, :k] if scale.shape[1] > 1 else scale
    return x @ (weight.values.double() * scale).T


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    bound = TOLERANCE * want.abs().amax(1, keepdim=True)
    assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize(("k", "input_scale"), [(320, None), (1280, None), (320, [0.01, 0.3])])
def test_activations_are_quantised_by_token_and_group(k: int, input_scale: list[float] | None) -> None:
    static = None if input_scale is None else torch.tensor(input_scale, device=DEVICE)
    x = inputs(5, k)
    if DEVICE == "cpu":
        values, scale, _ = quantize_rows_reference(x, static)
        x = values.float() * scale.repeat_interleave(128, 1)[:, :k]
    got, scale, _ = quantize_rows(x, static)
    want, want_scale, _ = quantize_rows_reference(x, static)
    torch.testing.assert_close(scale, want_scale, rtol=1e-7, atol=0)
    assert torch.equal(got.float(), want.float())
    if DEVICE == "cuda" and static is None:
        error = (got.float() * scale.repeat_interleave(128, 1)[:, :k] - x).abs()
        assert (error <= 2**-4 * x.abs() + scale.repeat_interleave(128, 1)[:, :k] * 2**-10).all()


def already_rounded(x: torch.Tensor) -> torch.Tensor:
    """Numbers that e4m3 holds, times their scales: the interpreter does not round to e4m3 as a GPU does."""
    values, scale, _ = quantize_rows_reference(x)
    return values.float() * scale.repeat_interleave(128, 1)[:, : x.shape[1]]


@pytest.mark.parametrize(
    ("config", "n", "k", "rows_each", "in_blocks"),
    [
        (WEIGHTS_LEFT, 192, 320, 128, True), (X_LEFT, 192, 320, 128, True), (WEIGHTS_LEFT, 96, 400, 32, True),
        (X_LEFT, 80, 400, 1, False),
    ],
)  # fmt: skip
def test_products_times_both_scales(config: GemmConfig, n: int, k: int, rows_each: int, in_blocks: bool) -> None:
    """By the kernel, in parts of K, and by the twin; of activations that it rounds itself, and that come rounded."""
    weight, x = weights(n, k, rows_each, in_blocks), already_rounded(inputs(19, k))
    want = exact(quantize_rows_reference(x), weight)
    assert_close(gemm.linear(x, weight, GemmConfig("twin")), want)
    assert_close(gemm.linear(x, weight, GemmConfig("widened")), want)
    out = gemm.linear(x, weight, config)
    assert_close(out, want)
    assert_close(gemm.linear(x, weight, replace(config, split_k=2)).sum(0), want)
    assert torch.equal(gemm.linear(x[:1].clone(), weight, config)[0], out[0]), "alone as among others"
    static = weight._replace(input_scale=torch.tensor([0.5, 0.25], device=DEVICE))
    if DEVICE == "cuda":
        assert_close(gemm.linear(x, static, config), exact(quantize_rows_reference(x, static.input_scale), static))
    if DEVICE == "cuda" and Device.of(x.device).scaled_library and n % 16 == k % 16 == 0 and rows_each != 128:
        assert_close(gemm.linear(x, weight, GemmConfig("scaled")), want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "block_m", "block_n", "parts", "rows_each", "in_blocks"),
    [
        (37, 64, 64, 2, 1, False), (50, 64, 128, 1, 128, True), (100, 128, 64, 1, 128, True),
        (300, 128, 128, 3, 128, True), (150, 128, 128, 1, 1, False), (200, 256, 64, 1, 128, True),
        (520, 256, 128, 4, 128, True),
    ],
)  # fmt: skip
def test_products_of_many_rows(
    rows: int, block_m: int, block_n: int, parts: int, rows_each: int, in_blocks: bool
) -> None:
    """By the kernel whose warps have roles: the definition, a row alone as among others, and with the activation what
    that gives by itself, rounded."""
    warps = 4 if block_m == 64 else 8
    config = GemmConfig("roles", block_n, block_m, 128, 4, parts, warps)
    for n, k in ((576, 1600), (4096, 640)):
        weight, x = weights(n, k, rows_each, in_blocks), inputs(rows, k)
        rounded = quantize_rows(x)
        out = gemm.linear(rounded, weight, config)
        assert_close(out.sum(0) if parts > 1 else out, exact(rounded, weight))
        alone = gemm.linear(quantize_rows(x[-1:].clone()), weight, config)
        assert torch.equal(alone[..., 0, :], out[..., -1, :])
        if block_n == 128 and block_m < 256 and parts == 1 and not (in_blocks and n % 256):
            small = FP8Rows(rounded.values, rounded.scales / 500, torch.bfloat16)
            got = gemm.linear(small, weight, config, gated=True)
            want = activation(gemm.linear(small, weight, config), "silu", True, rounds=True)
            assert torch.equal(got.scales, want.scales) and torch.equal(got.values.float(), want.values.float())


@pytest.mark.parametrize("config", [streaming(2, 2), streaming(1, 2, columns=256)], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize("gated", [False, True])
def test_products_of_few_rows(gated: bool, rows: int, config: GemmConfig) -> None:
    """With norm, activation and residual the same results, whether x comes rounded or not."""
    for n, k, rows_each, in_blocks in ((64, 528, 16, True), (80, 2320, 1, False)):
        weight, x = weights(n, k, rows_each, in_blocks), already_rounded(inputs(rows, k) / 1000)
        rounded = quantize_rows_reference(x)
        want = exact(rounded, weight)
        if gated:
            gate, up = want.chunk(2, 1)
            assert_close(gemm.linear(rounded, weight, config, gated=True), silu(gate) * up)
            ones = torch.ones(k, device=DEVICE)
            normed = already_rounded(x) / x.square().mean(1, keepdim=True).sqrt()
            gate, up = exact(quantize_rows_reference(normed), weight).chunk(2, 1)
            if DEVICE == "cuda" and rows == 1:  # rows that the kernel rounds itself
                got = stream.linear(x, weight, config, norm=norm.Norm(ones, 0.0), gated=True)
                assert_close(got, silu(gate) * up)
            continue
        assert_close(gemm.linear(rounded, weight, config), want)
        residual = torch.randn(rows, n, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        got = stream.linear(x, weight, config, residual=residual.clone())
        assert_close(got, want + residual.double())


@pytest.mark.parametrize("block_m", [16, 64])
def test_products_of_experts(block_m: int) -> None:
    """Tokens that chose experts, by the kernels that round x themselves and those after the kernel that does, and by
    the twins."""
    rows, hidden, width, experts = 5, 192, 128, 3
    up, down = expert_weights(experts, 2 * width, hidden, 64, True), expert_weights(experts, hidden, width, 1, False)
    logits = torch.randn(1, rows, experts, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    routing = route_reference(logits, TopK(experts, 2), block_m)
    config = GemmConfig("tile", 64, block_m, 128, 2)
    x = already_rounded(inputs(rows, hidden) / 500)
    want = grouped.expert_gate_up_reference(x, up, routing, config, grouped.ExpertActivation())
    got = grouped.expert_gate_up(x, up, routing, config, grouped.ExpertActivation())
    assert_close(got, want.double())
    h = already_rounded(want)
    want = grouped.expert_down_reference(h, down, routing, config, torch.float32)
    got = grouped.expert_down(h, down, routing, config, torch.float32)
    assert_close(got.flatten(0, 1), want.flatten(0, 1).double())
    whole = replace(config, block_n=128)
    alike = grouped.expert_gate_up(x, up, routing, whole, grouped.ExpertActivation(limit=7.0, alpha=1.7))
    rounded = grouped.expert_gate_up(x, up, routing, whole, grouped.ExpertActivation(limit=7.0, alpha=1.7), rounds=True)
    values, scales, _ = quantize_rows(alike)
    assert torch.equal(rounded.scales, scales) and torch.equal(rounded.values.float(), values.float())
    again = grouped.expert_down(rounded, down, routing, config, torch.float32)
    assert torch.equal(again, grouped.expert_down(alike, down, routing, config, torch.float32))
    for expert, first, end in grouped.experts_of(routing):
        choices = routing.order[first:end].long()
        one = FP8Weight(down.values[expert], down.scale[expert])
        exactly = exact(quantize_rows_reference(h[first:end]), one) * routing.weights.flatten()[choices, None]
        assert_close(want[choices % 2, choices // 2], exactly)


@pytest.mark.parametrize("inside", [True, False])
def test_experts_of_a_few_tokens(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernels for many tokens: tokens that choose alike and not, by the definition in float64. Where rows are
    long a kernel of its own rounds them."""
    rows, hidden, width, experts = 2, 144, 128, 3
    up, down = expert_weights(experts, 2 * width, hidden, 32, True), expert_weights(experts, hidden, width, 16, True)
    residual, gain = inputs(rows, hidden) / 50, torch.rand(hidden, device=DEVICE) + 0.5
    logits = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    alone = []

    def rounded(x: torch.Tensor) -> FP8Rows:
        alone.append(x.shape[1])
        if DEVICE == "cuda":
            return quantize_rows(x)
        values, scales, _ = quantize_rows_reference(x)  # the interpreter does not round to e4m3 as a GPU does
        return FP8Rows(values, scales.t().contiguous().t(), x.dtype)

    monkeypatch.setattr(few_streamed, "quantize_rows", rounded)
    monkeypatch.setattr(few_streamed, "rounds_inside", lambda *args: inside and rounds_inside(*args))
    routing = route_reference(logits[None, :, :experts], TopK(experts, 2), 16)
    config = GemmConfig("tile", 64, 16, 128, 2)
    x = norm.norm_reference(residual, norm.Norm(gain, 1e-6))
    h = grouped.expert_gate_up_reference(x, up, routing, config, grouped.ExpertActivation())
    want = residual + grouped.expert_down_reference(h, down, routing, config, torch.float32).sum(0)
    got = mixed(residual.clone(), logits[None], TopK(experts, 2), up, down, norm.Norm(gain, 1e-6))
    if DEVICE == "cpu":
        assert (got - want).norm() < 0.1 * (want - residual).norm()
    else:
        assert_close(got, want.double())
    assert alone == ([] if inside else [2 * width])


def test_norm_and_activation_round_what_they_make() -> None:
    """To what follows from the results that they have without rounding; groups that end early too."""
    x, residual, gain = inputs(5, 200), inputs(5, 200, seed=1), torch.rand(200, device=DEVICE) + 0.5
    wide, kept = norm.add_norms(x, residual.clone(), norm.Norm(gain, 1e-6))
    got, after = norm.add_norms(x, residual.clone(), norm.Norm(gain, 1e-6), rounds=True)
    assert torch.equal(after, kept)
    both = torch.cat([x, residual], 1) / 100
    for rounded, unrounded in (
        (got, wide), (activation(both, "silu", True, rounds=True), activation(both, "silu", True))
    ):  # fmt: skip
        values, scale, _ = quantize_rows_reference(unrounded)
        torch.testing.assert_close(rounded.scales, scale, rtol=1e-5, atol=0)
        if DEVICE == "cuda":  # the interpreter does not round to e4m3 as a GPU does
            assert (rounded.values.float() == values.float()).float().mean() > 0.99


def test_gate_and_up() -> None:
    weight, x = weights(256, 320, 128, True), already_rounded(inputs(3, 320) / 1000)
    gate, up = exact(quantize_rows_reference(x), weight).chunk(2, 1)
    assert_close(gemm.linear(x, weight, WEIGHTS_LEFT, gated=True), silu(gate) * up)


@pytest.mark.parametrize(("rows_each", "in_blocks"), [(1, False), (64, True)])
def test_the_librarys_scales_of_rows_take_one_kernel(rows_each: int, in_blocks: bool) -> None:
    weight, made = weights(192, 320, rows_each, in_blocks), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = op(*args, **kwargs or {})
            made.append(result.untyped_storage().data_ptr())
            return result

    with Watch():
        got = gemm._scales_of_rows(weight, 3)
    assert len(set(made) - {weight.scale.untyped_storage().data_ptr()}) == 1
    expected = weight.scale.repeat_interleave(rows_each, 0)[:192].t().expand(3, -1)
    assert torch.equal(got, expected) and got.is_contiguous()
