"""The kernel that streams weights through registers, compiled for compute capability 9.0, which takes no GPU: for every
number of rows it keeps to registers, and nothing moves between lanes before the last sum."""

import pytest
from compiling import run_alone

pytest.importorskip("triton")

COMPILE = """
import sys
import torch
from compiling import compile_only
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.quantize import empty_quantized
from nanovllm.kernels.gemm import stream
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.pointwise.norm import Norm

stream.pdl_options = lambda device, wanted: {"PDL": True, "launch_pdl": True}
seen = []

def check(ptx, options):
    if "AHEAD" in options:
        assert "mma.sync" in ptx and ptx.count("shfl") <= 64, ptx.count("shfl")
        seen.append(options["ROWS"])

compile_only(check)
rows, n, k = int(sys.argv[1]), 256, eval(sys.argv[2])

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)

x, norm, residual = empty(rows, k), Norm(empty(k), 1e-6), empty(rows, n)
wide = GemmConfig("stream", 16, block_k=256, stages=3)
stream.linear(x, empty(n, k), wide, residual=residual)
stream.linear(x, empty(n, k), wide, norm=norm)
stream.linear(x, empty(n, k), wide, norm=norm, gated=True)
narrow = GemmConfig("stream", 16, block_k=512, stages=3)
rounded = FP8Rows(*empty_quantized(rows, k, x.device), x.dtype)
for scale, shared in ((empty(n // 128, -(-k // 128), dtype=torch.float32), 128), (empty(n, 1, dtype=torch.float32), 1)):
    weight = FP8Weight(empty(n, k, dtype=torch.float8_e4m3fn), scale, shared)
    stream.linear(rounded, weight, narrow, residual=residual)
    stream.linear(rounded, weight, narrow, gated=True)
stream.linear(x, weight, narrow, norm=norm)
assert len(seen) == 8, seen
"""


@pytest.mark.parametrize("rows", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_every_form_compiles(rows: int) -> None:
    run_alone(COMPILE, str(rows), "1296")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_long_rows_compile(rows: int) -> None:
    """Of which registers hold a part at a time."""
    run_alone(COMPILE, str(rows), "4096")
