"""The GEMM kernel of tiles, and cuBLAS over parts of K, against float64: interpreted in float32 and float16, and on a
GPU in bfloat16."""

from dataclasses import replace

import pytest
import torch
from gemm_checks import EPS, TOLERANCE, check_pdl, check_rows_apart, exact, on_cpu, randn, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kernels.base.padded_rows import empty_rows, padded_rows, rows_in_memory
from nanovllm.kernels.gemm import dense, tile
from nanovllm.kernels.plan.config import FP8, GemmConfig
from nanovllm.kernels.plan.table import shipped_table
from nanovllm.kernels.pointwise.norm import Norm, add_norms, add_norms_reference

SMALL = GemmConfig("tile", 64, 32, 32, 3)
X_LEFT = GemmConfig("tile", 32, 64, 32, 3)


DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
ENTRIES = shipped_table("NVIDIA H200").entries.items()
USED = sorted({
    ("gated" if gemm.kind == "gate_up" else "linear", config)
    for gemm, ranges in ENTRIES for _, config in ranges if config.kernel == "tile" and gemm.dtype != FP8
}, key=repr)  # fmt: skip
"""Every configuration of our kernel that the table of an H200 has, and what runs it."""


def split(parts: int) -> GemmConfig:
    return GemmConfig("split", split_k=parts)


def inputs(rows: int, n: int, k: int, dtype: torch.dtype = DTYPE, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(rows, k, dtype=dtype, seed=seed), randn(n, k, dtype=dtype, seed=seed + 1) / k**0.5


def run(op: str, x: torch.Tensor, weight: torch.Tensor, config: GemmConfig) -> torch.Tensor:
    """The product, parts added up."""
    if op == "gated":
        return tile.linear(x, weight, config, gated=True)
    y = tile.linear(x, weight, config)
    assert y.dtype == (torch.float32 if config.split_k > 1 else x.dtype)
    return y.sum(0) if config.split_k > 1 else y


@given(
    st.sampled_from(["linear", "gated"]), st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from([SMALL, X_LEFT]), st.integers(1, 80), st.integers(1, 60), st.integers(1, 20), st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=45, deadline=None)
@on_cpu
def test_any_shape_matches_float64_and_the_twin(
    op: str, dtype: torch.dtype, config: GemmConfig, rows: int, half_n: int, k_over_8: int, split_k: int
) -> None:
    """Any number of rows and outputs, and any K that is a multiple of 8."""
    steps = -(-8 * k_over_8 // config.block_k)
    config = replace(config, split_k=min(split_k, steps) if op == "linear" else 1)
    x, weight = inputs(rows, 2 * half_n, 8 * k_over_8, dtype)
    assert relative_error(run(op, x, weight, config), exact(x, weight, op == "gated")) < 2 * TOLERANCE[dtype]
    got, twin = (form(x, weight, config, gated=op == "gated") for form in (tile.linear, tile.linear_reference))
    assert got.shape == twin.shape and relative_error(got, twin) < 2 * TOLERANCE[dtype], "K is cut alike"


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("config", [SMALL, X_LEFT])
def test_a_bias_is_added_once(config: GemmConfig, parts: int) -> None:
    x, weight = inputs(5, 70, 264)
    bias = randn(70, dtype=DTYPE, seed=3)
    y = tile.linear(x, weight, replace(config, split_k=parts), bias=bias)
    y = y if parts == 1 else y.sum(0)
    assert relative_error(y, exact(x, weight) + bias.double()) < 2 * TOLERANCE[DTYPE]


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "config"), USED)
def test_matches_float64_in_bfloat16(op: str, config: GemmConfig) -> None:
    for rows, n, k in ((config.block_m, 512, 2048), (config.block_m * 2 - 5, 304, 2056)):
        x, weight = inputs(rows, n, k)
        assert relative_error(run(op, x, weight, config), exact(x, weight, op == "gated")) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_library_split_matches_its_twin(splits: int) -> None:
    x, weight = inputs(40, 72, 256)
    got, want = dense.split_linear(x, weight, split(splits)), dense.split_linear_reference(x, weight, splits)
    assert got.shape == (splits, 40, 72) and got.dtype == torch.float32
    assert relative_error(got, want) < 1e-5
    assert relative_error(got.sum(0), exact(x, weight)) < 1e-5


def test_norm_adds_up_the_parts() -> None:
    x, weight = inputs(20, 96, 256)
    residual, gain = torch.randn_like(x[:, :96]), torch.rand_like(weight[:, 0])
    for sums in (dense.split_linear(x, weight, split(2)), dense.split_linear(x, weight, split(4))):
        ours, twin = residual.clone(), residual.clone()
        want, _ = add_norms_reference(sums, twin, Norm(gain, EPS))
        got, _ = add_norms(sums, ours, Norm(gain, EPS))
        assert torch.equal(ours, twin)
        torch.testing.assert_close(got, want, rtol=2**-7 if torch.cuda.is_available() else 1e-5, atol=1e-6)
        total = sums.unflatten(0, (-1, 2)).sum(1).sum(0).to(DTYPE)
        whole, _ = add_norms_reference(total, residual.clone(), Norm(gain, EPS))
        assert torch.equal(want, whole)


@pytest.mark.parametrize(("op", "config"), [
    pytest.param("linear", SMALL, marks=on_cpu),
    pytest.param("linear", replace(X_LEFT, split_k=2), marks=on_cpu),
    *(pytest.param(*used, marks=pytest.mark.gpu) for used in USED),
])  # fmt: skip
def test_row_does_not_depend_on_its_neighbours(op: str, config: GemmConfig) -> None:
    on_gpu = torch.cuda.is_available()
    x, weight = inputs(config.block_m * 2, *((512, 2048) if on_gpu else (72, 136)))
    counts = (1, 17, config.block_m, config.block_m + 3) if on_gpu else (1,)
    check_rows_apart(lambda x: run(op, x, weight, config), x, counts)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "config"), USED)
def test_dependent_launch_in_a_graph_gives_the_same_bits(op: str, config: GemmConfig) -> None:
    start, weight = inputs(config.block_m, 1024, 1024)
    gate_up, gain = inputs(1, 2048, 1024, seed=1)[1], torch.ones_like(weight[0])
    second = GemmConfig("tile", 64, 32, 128, 4, split_k=2)

    def layer(hidden: torch.Tensor, residual: torch.Tensor) -> None:
        if op == "gated":
            x = tile.linear(hidden, gate_up, config, gated=True)
            x = tile.linear(x, weight, second)
        else:
            x = tile.linear(hidden, weight, config)
        hidden.copy_(add_norms(x, residual, Norm(gain, EPS))[0])

    check_pdl(layer, start)


def test_the_table_names_few_kernels() -> None:
    """Compiled variants cost start-up time."""
    assert 1 < len({(op, replace(config, split_k=1)) for op, config in USED}) <= 12


def test_there_is_room_for_whole_tiles() -> None:
    """Behind the rows that add + RMSNorm and our own kernel return."""
    for gemm, ranges in ENTRIES:
        for first, (most, config) in zip([1, *(most + 1 for most, _ in ranges)], ranges, strict=False):
            if config.kernel == "tile" and gemm.dtype != FP8 and gemm.kind in ("qkv", "gate_up", "down"):
                assert all(padded_rows(rows) % config.block_m == 0 for rows in range(first, most + 1))


def test_rows_behind_the_last_are_read_and_not_written() -> None:
    x, weight = inputs(50, 64, 64)
    room = empty_rows(50, 64, x.dtype, x.device)
    assert rows_in_memory(room) == 64 and rows_in_memory(x) == 50 and rows_in_memory(room[20:]) == 44
    room._base.fill_(float("nan"))
    room.copy_(x)
    for config in (SMALL, X_LEFT):
        assert torch.equal(tile.linear(room, weight, config), tile.linear(x, weight, config))


@pytest.mark.parametrize(("k", "k_of_weight", "message"), [(64, 72, "does not fit"), (66, 66, "16 bytes")])
def test_bad_shapes_are_refused(k: int, k_of_weight: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tile.linear(torch.zeros(20, k), torch.zeros(8, k_of_weight), SMALL)
