"""GEMM kernels of quantised weights and of few rows, compiled for compute capability 9.0, which takes no GPU: what is
chosen fits a multiprocessor, keeps to registers, and multiplies by the instructions that it is made for."""

from typing import Any

import pytest
import torch
from compiling import compile_only, empty, empty_fp8, launch_dependently, run_alone

pytest.importorskip("triton")

from nanovllm.kernels.fp8 import gemm
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.fp8.quantize import empty_rows_for
from nanovllm.kernels.gemm import packed_row, packed_tile, roles, stream
from nanovllm.kernels.gemm.e2m1 import E2M1
from nanovllm.kernels.gemm.packed import INT8 as BYTES
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.kernels.moe import choice, few_rows, few_streamed, packed
from nanovllm.kernels.moe.choice import Chosen
from nanovllm.kernels.moe.experts import ExpertActivation
from nanovllm.kernels.moe.routing import Routing, TopK
from nanovllm.kernels.plan.config import INT4, INT8, MXFP4, NVFP4, Gemm, GemmConfig, streaming
from nanovllm.kernels.plan.rules import FEW_EXPERTS, PACKED_FEW_EXPERTS, expert_tiles, int4_config, packed_row_config
from nanovllm.kernels.pointwise.norm import Norm

CPU = torch.device("cpu")


def empty_rounded(rows: int, k: int) -> FP8Rows:
    return empty_rows_for(rows, k, torch.bfloat16, CPU)


def compile_fp8(rows: int, block_n: int, stages: int, parts: int, gated: bool, in_blocks: bool) -> None:
    def check(ptx: str, options: dict[str, Any]) -> None:
        assert "wgmma" in ptx and "cp.async.bulk.tensor" in ptx and "setmaxnreg" in ptx

    launch_dependently(roles)
    compile_only(check)
    config = GemmConfig("roles", block_n, rows, 128, stages, parts, 4 if rows == 64 else 8)
    weight = empty_fp8(4096, 4096, rows_each=128 if in_blocks else 1)
    gemm.linear(empty_rounded(rows, 4096), weight, config, gated=gated)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        (64, 64, 6, 1, False, True), (64, 128, 4, 4, False, True), (64, 128, 4, 1, True, True),
        (128, 64, 8, 1, False, True), (128, 128, 6, 2, False, False), (128, 128, 4, 1, True, True),
        (256, 64, 5, 2, False, True), (256, 128, 4, 4, False, True),
    ],
)  # fmt: skip
def test_tiles_of_fp8(case: tuple[int, int, int, int, bool, bool]) -> None:
    """Sums and products stay in registers."""
    run_alone(compile_fp8, *case)


def compile_int4(rows: int, group: int, has_zeros: bool, code: str = INT4) -> None:
    def check(ptx: str, options: dict[str, Any]) -> None:
        assert "ldmatrix" in ptx and "wgmma" in ptx

    launch_dependently(packed_tile)
    compile_only(check, PTX=True)
    for kind in ("o", "gate_up"):
        weight = PackedWeight.empty(4096, 4096, group, has_zeros, torch.bfloat16, CPU, code=code)
        config = int4_config(Gemm(kind, 4096, 4096, INT4, False), rows, 132)
        packed_tile.linear(empty(rows, 4096), weight, config, gated=kind == "gate_up")


@pytest.mark.slow
@pytest.mark.parametrize("case", [(1, 128, False), (8, 32, True), (16, 128, True), (64, 0, True), (256, 128, False)])
def test_tiles_of_4_bits(case: tuple[int, int, bool]) -> None:
    """The operand comes from memory as it lies there."""
    run_alone(compile_int4, *case)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 32, 64, 256])
@pytest.mark.parametrize("code", [("e2m1", 16), ("e2m1", 32), ("bytes", 128)])
def test_tiles_of_other_codes(code: tuple[str, int], rows: int) -> None:
    run_alone(compile_int4, rows, code[1], False, code[0])


def compile_packed(code: str, group: int, has_zeros: bool, choices: int) -> None:
    def check(ptx: str, options: dict[str, Any]) -> None:
        assert "ldmatrix" in ptx and "wgmma" in ptx

    launch_dependently(packed)
    # Scales and zeros of groups of 32 do not all stay in registers; in tiles of half the rows more is to do a weight.
    compile_only(check, most_spilled=84 if has_zeros else 0, PTX=True)
    routing = Routing(empty(choices, 1, dtype=torch.float32), *(torch.zeros(choices, 3, dtype=torch.int32),) * 2, 1)
    for config, gated in zip(expert_tiles(choices, 32, MXFP4), (True, False), strict=True):
        weight = PackedWeight.empty(5760, 2880, group, has_zeros, torch.bfloat16, torch.device("meta"), (32,), code)
        out, bias = empty(1, choices, 2880 if gated else 5760), empty(32, 5760)
        packed.multiply(empty(choices, 2880), weight, routing, config, bias, None, out, gated, (1.702, 7.0))


@pytest.mark.slow
@pytest.mark.parametrize("code", [
    ("e2m1", 32, False), ("e2m1", 16, False), ("int4", 128, False), ("int4", 32, True), ("bytes", 0, False)])
@pytest.mark.parametrize("choices", [4, 100, 700, 1 << 14])
def test_tiles_of_experts_of_4_bits(code: tuple[str, int, bool], choices: int) -> None:
    """The operand comes from memory as it lies there, and sums stay in registers."""
    run_alone(compile_packed, *code, choices)


def compile_row(k: int, group: int, has_zeros: bool, code: str, dtype: str) -> None:
    def check(ptx: str, options: dict[str, Any]) -> None:
        assert "cp.async" in ptx and "mma.sync" in ptx and "st.local" not in ptx

    launch_dependently(packed_row)
    compile_only(check)
    weight = PackedWeight.empty(6144, k, group, has_zeros, torch.bfloat16, CPU, code=code)
    o, gate_up = (packed_row_config(Gemm(kind, 6144, k, dtype, True)) for kind in ("o", "gate_up"))
    packed_row.linear(empty(1, k), weight, o, residual=empty(1, 6144))
    packed_row.linear(empty(1, k), weight, gate_up, norm=Norm(empty(k), 1e-6), gated=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", [
    (4096, 128, False, INT4, INT4), (1100, 32, True, INT4, INT4), (1536, 0, True, INT4, INT4),
    (4096, 16, False, E2M1, NVFP4), (1104, 16, False, E2M1, NVFP4), (4096, 32, False, E2M1, MXFP4),
    (4096, 0, False, BYTES, INT8), (1100, 128, False, BYTES, INT8),
])  # fmt: skip
def test_a_row_by_4_and_8_bits(case: tuple[int, int, bool, str, str]) -> None:
    """No weight moves between threads, which the kernel asserts where it changes layouts."""
    run_alone(compile_row, *case)


def compile_few_packed(name: str, dtype_name: str) -> None:
    def check(ptx: str, options: dict[str, Any]) -> None:
        assert "mma.sync" in ptx and ptx.count("bar.sync") <= 12, ptx.count("bar.sync")

    launch_dependently(choice)
    compile_only(check, most_spilled=28 if dtype_name == "bfloat16" and "int8" not in name else None, PTX=True)
    (code, group, has_zeros), dtype = PACKED_CODES[name], getattr(torch, dtype_name)
    norm, router_bias = Norm(empty(1024, dtype=dtype), 1e-6), empty(16, dtype=dtype)
    chosen = Chosen(empty(1, 3, 16, dtype=torch.float32), TopK(16, 6), router_bias)
    weight = PackedWeight.empty(96, 1024, group, has_zeros, dtype, CPU, (16,), code)
    bias = empty(16, 96, dtype=dtype)
    for activation in (ExpertActivation(), ExpertActivation(7.0, 1.702), ExpertActivation(alpha=None)):
        first = PACKED_FEW_EXPERTS[0]
        few_streamed.gate_up(empty(3, 1024, dtype=dtype), weight, chosen, first, activation, norm, bias)
    weight = PackedWeight.empty(96, 400, group, has_zeros, dtype, CPU, (16,), code)
    h, residual = empty(3, 6, 400, dtype=dtype), empty(3, 96, dtype=dtype)
    few_streamed.down(h, weight, chosen, PACKED_FEW_EXPERTS[1], residual, bias=bias)


PACKED_CODES = {
    "mxfp4": ("e2m1", 32, False), "nvfp4": ("e2m1", 16, False), "int4 of 128": ("int4", 128, False),
    "int4 of 64 with zeros": ("int4", 64, True), "int4 of rows with zeros": ("int4", 0, True),
    "int8 of 128": (BYTES, 128, False), "int8 of rows": (BYTES, 0, False),
}  # fmt: skip


@pytest.mark.parametrize("name", [
    "mxfp4", *(pytest.param(name, marks=pytest.mark.slow) for name in PACKED_CODES if name != "mxfp4")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_few_rows_by_packed_weights(name: str, dtype: torch.dtype) -> None:
    """No weight moves between threads: warps meet to choose experts, and for the last sums."""
    run_alone(compile_few_packed, name, str(dtype).removeprefix("torch."))


def compile_shared(experts: int, top_k: int, hidden: int, width: int, parts: int, gated: bool) -> None:
    launch_dependently(choice)
    compile_only()
    options = TopK(experts, top_k, sigmoid=not gated)
    chosen, rows = Chosen(empty(1, 1, experts + 1, dtype=torch.float32), options), width * (1 + gated)
    h = few_rows.gate_up(
        empty(1, hidden), empty(experts, rows, hidden), chosen, FEW_EXPERTS[0], ExpertActivation(gated=gated),
        beside=empty(parts * rows, hidden),
    )  # fmt: skip
    down = empty(experts, hidden, width), chosen, FEW_EXPERTS[1], None, None, gated
    few_rows.down(h, *down, empty(hidden, parts * width))


@pytest.mark.slow
@pytest.mark.parametrize("case", [(256, 8, 2048, 512, 1, True), (64, 4, 2048, 1536, 1, True),
                                  (128, 6, 2688, 1856, 2, False), (128, 8, 4096, 1408, 1, True)])
def test_a_shared_expert_beside_the_others(case: tuple[int, int, int, int, int, bool]) -> None:
    """Of Qwen3.6-35B-A3B, GLM-4.7-Flash, Nemotron 3 Nano and GLM-4.5-Air: registers hold what is on its way."""
    run_alone(compile_shared, *case)


def compile_stream(rows: int, k: int, normed: int) -> None:
    """normed: columns of the rows that four warps norm; eight norm twice as many."""
    seen = []

    def check(ptx: str, options: dict[str, Any]) -> None:
        if "AHEAD" in options:
            assert "mma.sync" in ptx and ptx.count("shfl") <= 64, ptx.count("shfl")
            seen.append(options["ROWS"])

    launch_dependently(stream)
    compile_only(check, most_spilled=8)  # 8,192 columns, their norm, gates and ups
    n = 256
    x, norm, residual = empty(rows, k), Norm(empty(k), 1e-6), empty(rows, n)
    wide, narrow = streaming(4, 3, columns=64), streaming(4, 3)
    stream.linear(x, empty(n, k), wide, residual=residual)
    for config, columns in ((wide, normed), (streaming(8, 4, columns=64), 2 * normed)):
        for gated in (False, True):
            of_rows = Norm(empty(columns), 1e-6)
            stream.linear(empty(rows, columns), empty(n, columns), config, norm=of_rows, gated=gated)
        most = 2048 * config.num_warps >> (rows - 1).bit_length()
        with pytest.raises(ValueError, match=f"registers do not hold .* with the norm of {rows} rows"):
            stream.linear(empty(rows, most + 8), empty(n, most + 8), config, norm=Norm(empty(most + 8), 1e-6))
    for weight in (empty_fp8(n, k), empty_fp8(n, k, rows_each=1)):
        stream.linear(empty_rounded(rows, k), weight, narrow, residual=residual)
        stream.linear(empty_rounded(rows, k), weight, narrow, gated=True)
    stream.linear(x, weight, narrow, norm=norm if rows == 1 else None)  # that of more rows is a kernel before it
    assert len(seen) == 10, seen


@pytest.mark.parametrize(
    "case",
    [(2, 1296, 1000), *(pytest.param(case, marks=pytest.mark.slow) for case in (
        (1, 1296, 1000), (8, 1296, 1000), (1, 4096, 4096), (2, 4096, 4096), (3, 4096, 2048), (8, 4096, 1024)
    ))],
)  # fmt: skip
def test_every_form_of_few_rows(case: tuple[int, int, int]) -> None:
    """Nothing moves between lanes before the last sum. Of long rows registers hold a part at a time, or as many columns
    as they can norm; more are refused."""
    run_alone(compile_stream, *case)
