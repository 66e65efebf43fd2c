"""Kernels that multiply by a base's weight add what adapters do before anything else; rows without keep their bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import compile_only, empty, empty_fp8, launch_dependently, run_alone
from gemm_checks import DEVICE
from interpreting import some_nightly

pytest.importorskip("triton")

from nanovllm.kernels.fp8 import gemm
from nanovllm.kernels.fp8.operands import FP8Weight
from nanovllm.kernels.fp8.reference import quantize_blocks
from nanovllm.kernels.gemm import adapters, dense, e2m1, fma, packed, packed_row, packed_tile, stream, tile
from nanovllm.kernels.gemm.adapters import adapter_delta_reference, shrink
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.kernels.moe import experts
from nanovllm.kernels.moe import packed as packed_experts
from nanovllm.kernels.moe.routing import Routing
from nanovllm.kernels.plan.config import LIBRARY, GemmConfig, streaming
from nanovllm.kernels.pointwise import activation as pointwise
from nanovllm.kernels.pointwise.activation import activation, activation_reference
from nanovllm.kernels.pointwise.norm import Norm, norm_reference

FMA = GemmConfig("fma", 8, block_k=256, stages=1)
TILE = GemmConfig("tile", 32, 16, 64, 2)
WIDE_TILE = GemmConfig("tile", 64, 16, 64, 2)
LARGE_TILE = GemmConfig("tile", 128, 128, 64, 2, num_warps=8)
HALVES = GemmConfig("tile", 32, 16, 64, 2, split_k=2)
FP8_TILE = GemmConfig("tile", 64, 16, 128, 2)
INT4, INT4_HALVES = GemmConfig("int4", 32, 16, stages=2), GemmConfig("int4", 32, 16, stages=2, split_k=2)
SPLIT = GemmConfig("split", split_k=2)
INT4_WHOLE = GemmConfig("int4_whole", 32, 16, stages=2, split_k=2)
STREAM, WIDE_STREAM = streaming(2, 2), streaming(2, 2, columns=64)
K, N = 256, 64
SLOTS = [2, -1, 0, 0, 2, -1, 1, 2]


def weight_of(kind: str, dtype: torch.dtype) -> Any:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype) / K**0.5
    if kind == "fp8":
        values, scales = quantize_blocks(weight)
        return FP8Weight(values, scales, 128)
    if kind == "int4":
        codes, scales = packed.quantize(weight, 128, dtype)
        found = PackedWeight.empty(N, K, 128, False, dtype, torch.device(DEVICE))
        found.words.copy_(packed.pack(codes))
        found.scales[..., 0] = scales.T
        return found
    if kind == "mxfp4":
        numbers, exponents = e2m1.quantize(weight)
        found = PackedWeight.empty(N, K, 32, False, dtype, torch.device(DEVICE), code=e2m1.E2M1)
        found.words.copy_(e2m1.words_of(numbers, 32).transpose(0, 1))
        found.scales.copy_(e2m1.scales_of(exponents, 32).T)
        return found
    return weight


LINEAR: dict[str, Callable[..., Any]] = {
    "dense": dense.linear, "fp8": gemm.linear, "int4": packed_tile.linear, "mxfp4": packed_tile.linear,
}  # fmt: skip


def linear_of(kind: str, config: GemmConfig) -> Callable[..., Any]:
    return stream.linear if config.kernel == "stream" else LINEAR[kind]


def random(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def operands(rows: int, starts: tuple[int, ...], rank: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """x, slots, A, B and the parts' first columns, for rows of three adapters and of none."""
    a = random(3, len(starts) * rank, K, seed=4, dtype=dtype) / K**0.5
    slots = torch.tensor((SLOTS * 3)[:rows], dtype=torch.int32, device=DEVICE)
    return random(rows, K, seed=2, dtype=dtype), slots, a, random(3, N, rank, seed=3, dtype=dtype), starts


def activated(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


OURS = [
    ("dense", FMA, 1, 16), ("dense", FMA, 3, 64), ("dense", WIDE_STREAM, 1, 64), ("dense", WIDE_STREAM, 7, 16),
    ("dense", TILE, 7, 64), ("dense", WIDE_TILE, 20, 16), ("dense", LARGE_TILE, 7, 16), ("dense", HALVES, 20, 16),
    ("fp8", STREAM, 1, 16), ("fp8", STREAM, 7, 16), ("fp8", FP8_TILE, 7, 16), ("int4", INT4, 20, 16),
    ("int4", INT4_HALVES, 7, 16), ("int4", INT4_WHOLE, 7, 16), ("mxfp4", INT4, 7, 16),
]  # fmt: skip


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("kind", "config", "rows", "rank"),
    some_nightly(OURS, [case for case in OURS if case[:2] != ("int4", INT4_HALVES)]),
)
def test_our_kernels_multiply_by_b_themselves(
    kind: str, config: GemmConfig, rows: int, rank: int, gated: bool
) -> None:
    """In float32, before the product is rounded or activated; a tile has columns of several parts."""
    if gated and config.parts > 1:
        pytest.skip("the activation is another kernel")
    linear, dtype = linear_of(kind, config), torch.float32
    if config.kernel in ("stream", "int4", "int4_whole"):
        dtype = torch.float16
    weight, given = weight_of(kind, dtype), operands(rows, (0, 32) if gated else (0, 20, 40), rank, dtype)
    x, slots, *_ = given
    shrunk = shrink(*given, few=config.is_skinny)
    plain, found = linear(x, weight, config, gated=gated), linear(x, weight, config, gated=gated, delta=shrunk)
    base = linear(x, weight, config)
    wide = (base.sum(0) if base.dim() == 3 else base).double() + adapter_delta_reference(*given)
    total = (found.sum(0) if found.dim() == 3 else found).double()
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(total, activated(wide) if gated else wide, rtol=tolerance, atol=tolerance)
    assert torch.equal(found[..., slots < 0, :], plain[..., slots < 0, :])


@pytest.mark.parametrize(("config", "rows"), [(FMA, 1), (FMA, 3), (WIDE_STREAM, 1), (WIDE_STREAM, 4)])
def test_they_norm_what_adapters_get(config: GemmConfig, rows: int) -> None:
    dtype = torch.float32 if config == FMA else torch.float16
    weight, (x, *given) = weight_of("dense", dtype), operands(rows, (0, 20, 40), 16, dtype)
    norm = Norm(random(K, seed=5, dtype=dtype), 1e-6)
    found = dense.linear(x, weight, config, norm=norm, delta=shrink(x, *given, few=True, norm=norm))
    normed = norm_reference(x, norm)
    expected = normed.float() @ weight.float().T + adapter_delta_reference(normed, *given)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("config", "few"), [(FMA, 3), (TILE, 20)])
def test_a_rows_bits_are_its_own(config: GemmConfig, few: int) -> None:
    """Neither neighbours nor their adapters nor slots change them."""
    weight, (x, slots, a, b, starts) = weight_of("dense", torch.float32), operands(few, (0, 20), 16, torch.float32)

    def product(x: torch.Tensor, slots: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return dense.linear(x, weight, config, delta=shrink(x, slots, a, b, starts, few=config.is_skinny))

    together, alone = product(x, slots, a, b), product(x[2:3], slots[2:3], a[:1], b[:1])
    moved = product(x[2:3], slots[2:3] + 2, a.flip(0), b.flip(0))
    assert torch.equal(together[2], alone[0]) and torch.equal(together[2], moved[0])


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("dense", LIBRARY), ("dense", GemmConfig("blocks")), ("dense", SPLIT),
        ("fp8", GemmConfig("twin")), ("fp8", GemmConfig("widened")), ("int4", GemmConfig("widened")),
    ],
)  # fmt: skip
def test_others_get_the_whole_delta(kind: str, config: GemmConfig) -> None:
    """And add it before the rounding, where what is rounded is not lost."""
    linear, weight, dtype, rows = LINEAR[kind], weight_of(kind, torch.float32), torch.float32, 5
    x, delta = random(rows, K, seed=2, dtype=dtype), random(rows, N, seed=3, dtype=dtype)
    delta[0] = -0.0
    plain, found = linear(x, weight, config), linear(x, weight, config, delta=delta.clone())
    base, total = (y.sum(0) if y.dim() == 3 else y for y in (plain, found))
    torch.testing.assert_close(total.double(), base.double() + delta.double(), rtol=1e-4, atol=1e-4)
    assert torch.equal(total[0], base[0])


@pytest.mark.parametrize(("kind", "gated", "rank"), [("silu", True, 16), ("gelu_tanh", True, 64), ("relu2", False, 16)])
def test_an_activation_adds_what_adapters_do(kind: str, gated: bool, rank: int) -> None:
    """To a result of the library, behind the bias; it does not round the sum before the activation."""
    rows, dtype = 20, torch.float16
    given = operands(rows, (0, N // 2) if gated else (0,), rank, dtype)
    slots, shrunk = given[1], shrink(*given)
    x, bias = random(rows, N, seed=6, dtype=dtype), random(N, seed=7, dtype=dtype)
    found, plain = activation(x, kind, gated, bias, delta=shrunk), activation(x, kind, gated, bias)
    torch.testing.assert_close(found, activation_reference(x, kind, gated, bias, delta=shrunk), rtol=1e-2, atol=1e-2)
    assert torch.equal(found[slots < 0], plain[slots < 0])
    sums = (x + bias).float() + adapter_delta_reference(*given)
    torch.testing.assert_close(found.float(), activation_reference(sums, kind, gated), rtol=2e-2, atol=2e-2)


def test_a_norm_gets_what_adapters_add_as_one_part_more() -> None:
    given = operands(20, (0, 20), 16, torch.float32)
    parts = dense.split_linear(given[0], weight_of("dense", torch.float32), SPLIT, shrink(*given))
    torch.testing.assert_close(parts[2], adapter_delta_reference(*given), rtol=1e-4, atol=1e-4)
    assert torch.equal(parts[:2], dense.split_linear(given[0], weight_of("dense", torch.float32), SPLIT))


def check_order(ptx: str, options: dict[str, Any]) -> None:
    """Asserts that a kernel that reads x at once starts when x is there, and waits for x A^T behind its products."""
    wait, start = (ptx.find(f"griddepcontrol.{name}") for name in ("wait", "launch_dependents"))
    if "LATE" in options:
        assert (wait < start) == options["LATE"]
    elif options.get("TMA") and options["TOP_K"] == 0:
        assert start < ptx.index("wgmma.mma_async") < wait


def compile_all() -> None:
    launch_dependently(adapters, fma, stream, tile, packed_tile, packed_row, experts, packed_experts, pointwise)
    compile_only(check_order, most_spilled=None)

    def shrunk(rows: int, few: bool, rank: int = 16, late: bool = False, k: int = 4096) -> Any:
        a, b = empty(8, 2 * rank, k), empty(8, 4096, rank)
        return shrink(empty(rows, k), empty(rows, dtype=torch.int32), a, b, (0, 2048), few=few, late=late)

    # Kernels that unroll their steps take seconds to compile where these are many.
    for gated in (False, True):
        for rows, k, config in ((1, 4096, GemmConfig("fma", 8, block_k=1024, stages=2)),
                                (4, 1024, streaming(4, 2, columns=64)),
                                (16, 4096, GemmConfig("tile", 64, 32, 128, 5))):  # fmt: skip
            delta = shrunk(rows, config.is_skinny, 64 if gated else 16, config.kernel == "tile", k)
            dense.linear(empty(rows, k), empty(4096, k), config, gated=gated, delta=delta)
        weight = PackedWeight.empty(4096, 4096, 128, False, torch.bfloat16, torch.device("cpu"))
        packed_row.linear(empty(1, 4096), weight, streaming(4, 3, 32), gated=gated, delta=shrunk(1, True))
        packed_tile.linear(empty(16, 4096), weight, INT4, gated=gated, delta=shrunk(16, False))
        config = streaming(4, 2, columns=128)
        gemm.linear(empty(1, 2048), empty_fp8(4096, 2048), config, gated=gated, delta=shrunk(1, True, k=2048))
    for rows in (16, 128, 512):
        activation(empty(rows, 4096), "silu", True, delta=shrunk(rows, False))
    routing = Routing(empty(8, 2, dtype=torch.float32), *(empty(*n, dtype=torch.int32) for n in ((16,), (8, 3))), 2)
    in_mxfp4 = PackedWeight.empty(2048, 1024, 32, False, torch.bfloat16, torch.device("meta"), (4,), e2m1.E2M1)
    config, delta = GemmConfig("tile", 64, 16, 128, 3), empty(16, 2048, dtype=torch.float32)
    for weight in (empty(4, 2048, 1024), empty_fp8(4, 2048, 1024), in_mxfp4):
        experts.expert_gate_up(empty(8, 1024), weight, routing, config, experts.ExpertActivation(), None, delta)
        experts.expert_down(empty(16, 1024), weight, routing, config, torch.float32, None, delta)


def test_compiled() -> None:
    """Every kernel that multiplies by B itself, and those of experts, as GPUs launch it."""
    run_alone(compile_all)
