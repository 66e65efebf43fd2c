"""The kernel of 4-bit weights compiled for compute capability 9.0, which takes no GPU: it fits, keeps to registers, and
takes its operand from memory as it lies there."""

import pytest
from compiling import run_alone

pytest.importorskip("triton")

COMPILE = """
import sys
import torch
from compiling import compile_only
from nanovllm.kernels.gemm import int4
from nanovllm.kernels.plan.config import INT4, Gemm
from nanovllm.kernels.plan.rules import int4_config

int4.pdl_options = lambda device, wanted: {"PDL": True, "launch_pdl": True}

def check(ptx, options):
    assert "ldmatrix" in ptx and "wgmma" in ptx

compile_only(check, PTX=True)
rows, group, has_zeros = eval(sys.argv[1])
for kind in ("o", "gate_up"):
    weight = int4.Int4Weight.empty(4096, 4096, group, has_zeros, torch.bfloat16, torch.device("cpu"))
    config = int4_config(Gemm(kind, 4096, 4096, INT4, False), rows, 132)
    int4.linear(torch.empty(rows, 4096, dtype=torch.bfloat16), weight, config, gated=kind == "gate_up")
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", [(1, 128, False), (8, 32, True), (16, 128, True), (64, 0, True), (256, 128, False)])
def test_kernels_fit_a_multiprocessor(case: tuple[int, int, bool]) -> None:
    run_alone(COMPILE, repr(case))
