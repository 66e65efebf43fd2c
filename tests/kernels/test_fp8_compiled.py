"""The FP8 kernel for many rows compiled for compute capability 9.0, which takes no GPU: what its tables choose fits a
multiprocessor, and keeps sums and products in registers."""

import pytest
from compiling import run_alone

pytest.importorskip("triton")

COMPILE = """
import sys
import torch
from compiling import compile_only
from nanovllm.kernels.fp8 import gemm
from nanovllm.kernels.gemm import roles
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.quantize import empty_quantized
from nanovllm.kernels.plan.config import GemmConfig

roles.pdl_options = lambda device, wanted: {"PDL": True, "launch_pdl": True}

def check(ptx, options):
    assert "wgmma" in ptx and "cp.async.bulk.tensor" in ptx and "setmaxnreg" in ptx

compile_only(check)
rows, block_n, stages, parts, gated, in_blocks = eval(sys.argv[1])
config = GemmConfig("roles", block_n, rows, 128, stages, parts, 4 if rows == 64 else 8)
n, k = 4096, 4096
weight = FP8Weight(
    torch.empty(n, k, dtype=torch.float8_e4m3fn),
    torch.empty(n // 128, k // 128) if in_blocks else torch.empty(n, 1), 128 if in_blocks else 1,
)
gemm.linear(FP8Rows(*empty_quantized(rows, k, torch.device("cpu")), torch.bfloat16), weight, config, gated=gated)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        (64, 64, 6, 1, False, True), (64, 128, 4, 4, False, True), (64, 128, 4, 1, True, True),
        (128, 64, 8, 1, False, True), (128, 128, 6, 2, False, False), (128, 128, 4, 1, True, True),
        (256, 64, 5, 2, False, True), (256, 128, 4, 4, False, True),
    ],
)  # fmt: skip
def test_tiles_fit_a_multiprocessor(case: tuple[int, int, int, int, bool, bool]) -> None:
    run_alone(COMPILE, repr(case))
