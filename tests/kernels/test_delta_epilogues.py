"""Kernels that multiply by a base's weight add the sums of adapters before anything else; rows without keep their
bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import compile_only, empty, empty_fp8, launch_dependently, run_alone
from gemm_checks import DEVICE

pytest.importorskip("triton")

from nanovllm.kernels.fp8 import gemm
from nanovllm.kernels.fp8.operands import FP8Weight
from nanovllm.kernels.fp8.reference import quantize_blocks
from nanovllm.kernels.gemm import dense, e2m1, fma, packed, packed_row, packed_tile, stream, tile
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.kernels.moe import experts
from nanovllm.kernels.moe import packed as packed_experts
from nanovllm.kernels.moe.routing import Routing
from nanovllm.kernels.plan.config import LIBRARY, GemmConfig, streaming

FMA = GemmConfig("fma", 8, block_k=256, stages=1)
TILE = GemmConfig("tile", 32, 16, 64, 2)
WIDE_TILE = GemmConfig("tile", 64, 16, 64, 2)
HALVES = GemmConfig("tile", 32, 16, 64, 2, split_k=2)
INT4, INT4_HALVES = GemmConfig("int4", 32, 16, stages=2), GemmConfig("int4", 32, 16, stages=2, split_k=2)
STREAM = streaming(2, 2)
K, N = 256, 64


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


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("kind", "config", "rows"),
    [
        ("dense", FMA, 1), ("dense", FMA, 3), ("dense", TILE, 5), ("dense", WIDE_TILE, 5), ("dense", HALVES, 5),
        ("dense", LIBRARY, 5), ("dense", GemmConfig("blocks"), 5), ("dense", GemmConfig("split", split_k=2), 5),
        ("fp8", GemmConfig("twin"), 5), ("fp8", GemmConfig("widened"), 5), ("int4", INT4, 5),
        ("int4", INT4_HALVES, 5), ("int4", GemmConfig("widened"), 5), ("mxfp4", INT4, 5),
    ],
)  # fmt: skip
def test_sums_are_added_before_the_rounding(kind: str, config: GemmConfig, rows: int, gated: bool) -> None:
    """In float32, where what is rounded is not lost."""
    if gated and (config.kernel not in ("fma", "tile", "int4") or config.parts > 1):
        pytest.skip("the activation is another kernel")
    linear, dtype = LINEAR[kind], torch.float32
    if config.kernel == "int4":
        dtype = torch.float16
    weight = weight_of(kind, dtype)
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    delta = torch.randn(rows, N, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    delta[0] = -0.0
    plain = linear(x, weight, config, gated=gated)
    found = linear(x, weight, config, gated=gated, delta=delta.clone())
    base = linear(x, weight, config)
    wide = (base.sum(0) if base.dim() == 3 else base).double() + delta.double()
    if gated:
        gate, up = wide.chunk(2, 1)
        wide = torch.nn.functional.silu(gate) * up
    total = (found.sum(0) if found.dim() == 3 else found).double()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(total, wide, rtol=tolerance, atol=tolerance)
    assert torch.equal(found[..., 0, :], plain[..., 0, :])


def compile_all() -> None:
    launch_dependently(fma, stream, tile, packed_tile, packed_row, experts, packed_experts)
    compile_only(most_spilled=None)
    for gated in (False, True):
        for rows, config in ((1, GemmConfig("fma", 8, block_k=1024, stages=2)), (4, streaming(4, 2, columns=64)),
                             (16, GemmConfig("tile", 64, 32, 128, 5))):  # fmt: skip
            delta = empty(rows, 4096, dtype=torch.float32)
            dense.linear(empty(rows, 4096), empty(4096, 4096), config, gated=gated, delta=delta)
        delta = empty(1, 4096, dtype=torch.float32)
        weight = PackedWeight.empty(4096, 4096, 128, False, torch.bfloat16, torch.device("cpu"))
        packed_row.linear(empty(1, 4096), weight, streaming(4, 3, 32), gated=gated, delta=delta)
        gemm.linear(empty(1, 4096), empty_fp8(4096, 4096), streaming(4, 2, columns=128), gated=gated, delta=delta)
    routing = Routing(empty(8, 2, dtype=torch.float32), *(empty(*n, dtype=torch.int32) for n in ((16,), (8, 3))), 2)
    in_mxfp4 = PackedWeight.empty(2048, 1024, 32, False, torch.bfloat16, torch.device("meta"), (4,), e2m1.E2M1)
    config, delta = GemmConfig("tile", 64, 16, 128, 3), empty(16, 2048, dtype=torch.float32)
    for weight in (empty(4, 2048, 1024), empty_fp8(4, 2048, 1024), in_mxfp4):
        experts.expert_gate_up(empty(8, 1024), weight, routing, config, experts.ExpertActivation(), None, delta)
        experts.expert_down(empty(16, 1024), weight, routing, config, torch.float32, None, delta)


def test_compiled() -> None:
    """Every kernel of few rows, and those of experts, as GPUs launch it."""
    run_alone(compile_all)
