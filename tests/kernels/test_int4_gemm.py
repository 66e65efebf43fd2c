"""The kernels of weights of 4 and 8 bits against float64: interpreted in float32 and float16 on a CPU, on a GPU in
bfloat16 and float16."""

from dataclasses import replace

import pytest
import torch
from gemm_checks import DEVICE, EPS, TOLERANCE, check_pdl, check_rows_apart, exact, on_cpu, randn, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_experts import packed_experts

from nanovllm.kernels.gemm import packed, packed_tile
from nanovllm.kernels.gemm.e2m1 import E2M1
from nanovllm.kernels.gemm.packed import INT8, PackedWeight
from nanovllm.kernels.plan.config import INT4, Gemm, GemmConfig
from nanovllm.kernels.plan.rules import int4_config
from nanovllm.kernels.pointwise.norm import Norm, add_norms

SMALL = GemmConfig("int4", 16, 8, 128, 3, num_warps=1)
GPU_CONFIGS = [int4_config(Gemm("", 512, 2048, INT4, False), rows, 132) for rows in (1, 32, 64, 128)]
OPS = ("parts", "whole", "gated")


def made(
    n: int, k: int, group: int, has_zeros: bool, dtype: torch.dtype, seed: int = 0
) -> tuple[PackedWeight, torch.Tensor]:
    """A random weight, and its values float64 [n, k], from codes, scales and zeros alone."""
    make = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=make)
    weight = PackedWeight.empty(n, k, group, has_zeros, dtype, DEVICE)
    count = weight.scales.shape[0]
    scales = (torch.rand(count, n, generator=make) / k**0.5 + 0.01).to(dtype)
    zeros = torch.randint(0, 16, (count, n), generator=make) if has_zeros else torch.full((count, n), 8)
    weight.words.copy_(packed.pack(codes.to(torch.uint8)))
    weight.scales.copy_(torch.stack([scales, zeros.to(dtype)], dim=-1))
    of_column = torch.arange(k) // (group or k)
    values = (codes - zeros.T[:, of_column]).double() * scales.double().T[:, of_column]
    return weight, values.to(DEVICE)


CODES = [(E2M1, 16), (E2M1, 32), (INT8, 0), (INT8, 128)]


def made_of(code: str, group: int, n: int, k: int, dtype: torch.dtype) -> tuple[PackedWeight, torch.Tensor]:
    """A weight of another code, and its values."""
    experts, values = packed_experts(code, group, False, 1, n, k, dtype, DEVICE)
    ones = torch.ones(n, device=DEVICE) if code == E2M1 and group == 32 else experts.of_expert(0).factors
    return replace(experts.of_expert(0), factors=ones), values[0].double()


def inputs(rows: int, k: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return randn(rows, k, dtype=dtype, seed=seed)


def run(op: str, x: torch.Tensor, weight: PackedWeight, config: GemmConfig) -> torch.Tensor:
    config = replace(config, kernel="int4" if op == "parts" else "int4_whole")
    y = packed_tile.linear(x, weight, config, gated=op == "gated")
    return y.sum(0) if y.dim() == 3 else y


def test_a_word_has_columns_32_apart() -> None:
    codes = torch.arange(2 * 200, dtype=torch.int64).mul(7).bitwise_and(15).view(2, 200)
    words = packed.pack(codes.to(torch.uint8))
    assert words.shape == (2, 2, 32)
    bits = words.int() & 0xFFFF
    for row, column in ((0, 0), (1, 31), (0, 32), (1, 100), (0, 127), (1, 199)):
        block, inside = divmod(column, 128)
        assert bits[block, row, inside % 32] >> 4 * (inside // 32) & 15 == codes[row, column]
    assert torch.equal(packed.unpack(words, 200), codes.to(torch.uint8))


@given(
    st.sampled_from(OPS), st.sampled_from([torch.float32, torch.float16]), st.integers(1, 20), st.integers(1, 30),
    st.integers(1, 40), st.sampled_from([0, 32, 64, 128]), st.booleans(), st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
@on_cpu
def test_any_shape_matches_float64(
    op: str, dtype: torch.dtype, rows: int, half_n: int, k_over_8: int, group: int, has_zeros: bool, split_k: int
) -> None:
    k = 8 * k_over_8
    weight, values = made(2 * half_n, k, group, has_zeros, dtype)
    assert torch.equal(weight.widened().to(dtype), values.to(dtype))
    config = replace(SMALL, split_k=min(split_k, weight.words.shape[0]))
    x = inputs(rows, k, dtype)
    assert relative_error(run(op, x, weight, config), exact(x, values, op == "gated")) < 2 * TOLERANCE[dtype]


@given(
    st.sampled_from(CODES), st.sampled_from(OPS), st.sampled_from([torch.float32, torch.float16]), st.integers(1, 20),
    st.integers(1, 30), st.integers(1, 20), st.integers(1, 3), st.sampled_from([8, 64]),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
@on_cpu
def test_other_codes_match_float64_in_any_shape(
    of: tuple[str, int], op: str, dtype: torch.dtype, rows: int, half_n: int, units: int, split_k: int, block_m: int
) -> None:
    """Tiles of few rows scale sums of a block, those of many, where they may, all sums at the end."""
    k = units * (of[1] if of[0] == E2M1 else 8)
    weight, values = made_of(*of, 2 * half_n, k, dtype)
    config = replace(SMALL, block_m=block_m, split_k=min(split_k, weight.words.shape[0]))
    x = inputs(rows, k, dtype)
    assert relative_error(run(op, x, weight, config), exact(x, values, op == "gated")) < 2 * TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("of", CODES)
@pytest.mark.parametrize("config", GPU_CONFIGS, ids=str)
def test_other_codes_match_float64_on_gpu(config: GemmConfig, of: tuple[str, int], op: str) -> None:
    weight, values = made_of(*of, 304, 992, torch.bfloat16)
    x = inputs(config.block_m + 3, 992, torch.bfloat16)
    error = relative_error(run(op, x, weight, replace(config, split_k=2)), exact(x, values, op == "gated"))
    assert error < (1e-4 if op == "parts" else TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize(("config", "op", "shape", "dtype"), [
    (GPU_CONFIGS[0], "parts", (512, 2048, 128, False, 3), torch.bfloat16),
    (GPU_CONFIGS[0], "parts", (304, 1000, 32, True, 2), torch.bfloat16),
    (GPU_CONFIGS[0], "gated", (304, 1000, 32, True, 2), torch.bfloat16),
    (GPU_CONFIGS[0], "parts", (512, 2048, 64, True, 2), torch.float16),
    (GPU_CONFIGS[1], "parts", (304, 1000, 128, True, 2), torch.bfloat16),
    (GPU_CONFIGS[1], "gated", (512, 2048, 128, False, 1), torch.bfloat16),
    (GPU_CONFIGS[2], "parts", (512, 2048, 0, True, 2), torch.bfloat16),
    (GPU_CONFIGS[3], "whole", (304, 1000, 32, True, 2), torch.bfloat16),
], ids=str)  # fmt: skip
def test_matches_float64_on_gpu(
    config: GemmConfig, op: str, shape: tuple[int, int, int, bool, int], dtype: torch.dtype
) -> None:
    """Sums over parts of K are float32: they show that no weight is rounded."""
    n, k, group, has_zeros, split_k = shape
    weight, values = made(n, k, group, has_zeros, dtype)
    x = inputs(config.block_m + 3, k, dtype)
    error = relative_error(run(op, x, weight, replace(config, split_k=split_k)), exact(x, values, op == "gated"))
    assert error < (1e-4 if op == "parts" else TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [
    torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("group", "has_zeros"), [(0, True), (32, True), (64, False), (128, True)])
def test_widening_gives_the_twin_to_the_bit(dtype: torch.dtype, group: int, has_zeros: bool) -> None:
    if torch.cuda.is_available() == (dtype == torch.float32):
        pytest.skip("the other device's")
    weight, values = made(72, 520, group, has_zeros, dtype)
    out = torch.empty(50, 520, dtype=dtype, device=DEVICE)
    assert torch.equal(packed_tile.widen(weight, 10, 60, out), values[10:60].to(dtype))


@pytest.mark.parametrize("of", CODES)
def test_widening_other_codes_gives_the_twin_to_the_bit(of: tuple[str, int]) -> None:
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float16
    weight, values = made_of(*of, 72, 544, dtype)
    assert torch.allclose(weight.widened().double(), values, rtol=1e-6, atol=0)
    out = torch.empty(50, 544, dtype=dtype, device=DEVICE)
    assert torch.equal(packed_tile.widen(weight, 10, 60, out), weight.widened()[10:60].to(dtype))


@pytest.mark.gpu
def test_widened_ranges_make_the_whole_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, values = made(1000, 512, 128, True, torch.bfloat16)
    monkeypatch.setattr(packed_tile, "WIDENED_BYTES", 512 * 300 * 2)
    packed_tile._widened.cache_clear()
    x = inputs(77, 512, torch.bfloat16)
    assert relative_error(packed_tile.linear_widened(x, weight), exact(x, values)) < TOLERANCE[torch.bfloat16]
    packed_tile._widened.cache_clear()


@pytest.mark.parametrize("of", CODES)
def test_a_row_of_other_codes_does_not_depend_on_its_neighbours(of: tuple[str, int]) -> None:
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    weight, _ = made_of(*of, 72, 320, dtype)
    check_rows_apart(lambda x: run("parts", x, weight, replace(SMALL, split_k=2)), inputs(20, 320, dtype))


@pytest.mark.parametrize("split_k", [1, 2])
def test_row_does_not_depend_on_its_neighbours(split_k: int) -> None:
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    weight, _ = made(72, 300, 128, True, dtype)
    config = replace(SMALL, split_k=split_k)
    check_rows_apart(lambda x: run("parts", x, weight, config), inputs(20, 300, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("config", GPU_CONFIGS[:2], ids=str)
def test_dependent_launch_in_a_graph_gives_the_same_bits(config: GemmConfig) -> None:
    start = inputs(config.block_m, 1024, torch.bfloat16)
    gate_up, _ = made(2048, 1024, 128, False, torch.bfloat16)
    down, _ = made(1024, 1024, 128, False, torch.bfloat16, 5)
    gain = torch.ones_like(start[0])

    def layer(hidden: torch.Tensor, residual: torch.Tensor) -> None:
        x = packed_tile.linear(hidden, gate_up, replace(config, kernel="int4_whole", split_k=2), gated=True)
        x = packed_tile.linear(x, down, replace(config, kernel="int4", split_k=2))
        hidden.copy_(add_norms(x, residual, Norm(gain, EPS))[0])

    check_pdl(layer, start)


@pytest.mark.parametrize("group", [-1, 16, 96, 256])
def test_other_groups_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"groups of {group} columns of int4: must be one of \\(0, 32, 64, 128\\)"):
        PackedWeight.empty(8, 256, group, False, torch.float32, DEVICE)


def test_what_does_not_fit_is_refused() -> None:
    weight, _ = made(8, 256, 128, False, torch.float32)
    with pytest.raises(ValueError, match=r"int4 weight \[8, 256\] of torch.float32 does not fit x \[3, 128\]"):
        packed_tile.linear(torch.zeros(3, 128, device=DEVICE), weight, SMALL)
    with pytest.raises(ValueError, match="without columns"):
        packed_tile.linear(torch.zeros(3, 256, device=DEVICE), weight, replace(SMALL, split_k=3))
