"""The kernel of weights of 4 and 8 bits for one row, with what is fused into it, against float64 on a GPU."""

from dataclasses import replace

import pytest
import torch
from gemm_checks import DEVICE, EPS, TOLERANCE, check_pdl, exact, relative_error
from test_int4_gemm import inputs, made, made_of

from nanovllm.kernels.gemm import packed_row
from nanovllm.kernels.gemm.e2m1 import E2M1
from nanovllm.kernels.gemm.packed import INT8, PackedWeight
from nanovllm.kernels.plan.config import INT4, Gemm, GemmConfig
from nanovllm.kernels.plan.rules import packed_row_config
from nanovllm.kernels.pointwise.norm import Norm, add_norms

CONFIG = replace(packed_row_config(Gemm("qkv", 4096, 4096, INT4, True)), block_n=32)
FEW_COLUMNS = replace(CONFIG, block_k=512, num_warps=4)
OPS = ("linear", "gated", "norm_linear", "norm_gated", "linear_residual")


def gain_of(x: torch.Tensor) -> torch.Tensor:
    return inputs(1, x.shape[1], x.dtype, seed=7)[0].abs() + 0.5


def run(
    op: str, x: torch.Tensor, weight: PackedWeight, residual: torch.Tensor, config: GemmConfig = CONFIG
) -> torch.Tensor:
    norm = Norm(gain_of(x), EPS) if op.startswith("norm_") else None
    kept = residual.clone() if op == "linear_residual" else None
    return packed_row.linear(x, weight, config, norm=norm, gated=op.endswith("gated"), residual=kept)


def wanted(op: str, x: torch.Tensor, values: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    if op.startswith("norm_"):
        x = add_norms(x, None, Norm(gain_of(x), EPS))[0]
    y = exact(x, values, gated=op.endswith("gated"))
    return residual.double() + y if op == "linear_residual" else y


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("shape", "dtype", "tile"), [
    ((512, 2048, 128, False), torch.bfloat16, 16),
    ((304, 1100, 32, True), torch.bfloat16, 32),
    ((608, 3000, 64, True), torch.float16, 64),
    ((96, 680, 0, True), torch.bfloat16, 32),
], ids=str)  # fmt: skip
def test_matches_float64(op: str, shape: tuple[int, int, int, bool], dtype: torch.dtype, tile: int) -> None:
    n, k, group, has_zeros = shape
    weight, values = made(n, k, group, has_zeros, dtype)
    x, residual = inputs(1, k, dtype), inputs(1, n, dtype, seed=2)
    config = CONFIG if k > 1024 else FEW_COLUMNS
    config = replace(config, block_n=max(tile, 32 if "gated" in op else 16), stages=2)
    got = run(op, x, weight, residual, config)
    assert relative_error(got, wanted(op, x, values, residual)) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("of", "n", "k", "dtype", "tile"), [
    ((E2M1, 16), 512, 2048, torch.bfloat16, 16), ((E2M1, 16), 304, 1104, torch.bfloat16, 64),
    ((E2M1, 16), 96, 688, torch.float16, 32), ((E2M1, 32), 304, 1120, torch.bfloat16, 32),
    ((E2M1, 32), 96, 672, torch.float16, 16), ((INT8, 0), 512, 2048, torch.bfloat16, 16),
    ((INT8, 0), 96, 680, torch.float16, 32), ((INT8, 128), 304, 1100, torch.bfloat16, 64),
], ids=str)  # fmt: skip
def test_other_codes_match_float64(
    op: str, of: tuple[str, int], n: int, k: int, dtype: torch.dtype, tile: int
) -> None:
    weight, values = made_of(*of, n, k, dtype)
    x, residual = inputs(1, k, dtype), inputs(1, n, dtype, seed=2)
    config = replace(FEW_COLUMNS, block_n=max(tile, 32 if "gated" in op else 16), stages=1)
    got = run(op, x, weight, residual, config)
    assert relative_error(got, wanted(op, x, values, residual)) < TOLERANCE[dtype]


@pytest.mark.gpu
def test_sums_are_float32_of_whole_numbers() -> None:
    """A weight of 1 and a sum whose terms cancel: what is left would be lost in bfloat16."""
    weight, values = made(512, 4096, 128, True, torch.bfloat16)
    x = inputs(1, 4096, torch.bfloat16)
    product = exact(x, values)
    left = packed_row.linear(x, weight, CONFIG, residual=(-product).to(torch.bfloat16)).double()
    want = product + (-product).to(torch.bfloat16).double()
    assert relative_error(left, want) < 1e-2


@pytest.mark.gpu
def test_dependent_launch_in_a_graph_gives_the_same_bits() -> None:
    start = inputs(1, 1152, torch.bfloat16)
    gate_up, _ = made(2048, 1152, 128, False, torch.bfloat16)
    down, _ = made(1152, 1024, 128, False, torch.bfloat16, 5)
    norm = Norm(gain_of(start), EPS)

    def layer(hidden: torch.Tensor, residual: torch.Tensor) -> None:
        x = packed_row.linear(hidden, gate_up, CONFIG, norm=norm, gated=True)
        packed_row.linear(x, down, FEW_COLUMNS, residual=hidden)

    check_pdl(layer, start)


def test_what_does_not_fit_is_refused() -> None:
    weight, _ = made(32, 2048, 128, False, torch.float32)
    with pytest.raises(ValueError, match="at most 1 rows, not 2"):
        packed_row.linear(torch.zeros(2, 2048, device=DEVICE), weight, CONFIG)
    with pytest.raises(ValueError, match=r"residual is \[1, 16\]"):
        x, residual = torch.zeros(1, 2048, device=DEVICE), torch.zeros(1, 16, device=DEVICE)
        packed_row.linear(x, weight, CONFIG, residual=residual)
