"""The kernel of 4-bit weights compiled for compute capability 9.0, which takes no GPU: it fits, keeps to registers, and
takes its operand from memory as it lies there."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import re
import subprocess
import sys
import tempfile
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from nanovllm.kernels.gemm import int4
from nanovllm.kernels.gemm.choice import INT4, Gemm, int4_config
from nanovllm.startup.compile_server import _TargetOnly

driver.set_active(_TargetOnly(GPUTarget("cuda", 90, 32)))
int4.pdl_options = lambda device, wanted: {"PDL": True, "launch_pdl": True}
launch = JITFunction.run

def run(self, *args, grid, warmup, **options):
    options["PTX"] = True
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True).stderr
    [spilled] = re.findall(r"(\\d+) bytes spill stores", report)
    assert kernel.metadata.shared <= 227 * 1024, (self.__name__, kernel.metadata.shared)
    assert int(spilled) == 0, (self.__name__, report)
    assert "ldmatrix" in ptx and "wgmma" in ptx
    return kernel

JITFunction.run = run
rows, group, has_zeros = eval(sys.argv[1])
for kind in ("o", "gate_up"):
    weight = int4.Int4Weight.empty(4096, 4096, group, has_zeros, torch.bfloat16, torch.device("cpu"))
    config = int4_config(Gemm(kind, 4096, 4096, INT4, False), rows)
    call = int4.linear if kind == "o" else int4.linear_silu_mul
    call(torch.empty(rows, 4096, dtype=torch.bfloat16), weight, config)
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", [(1, 128, False), (8, 32, True), (16, 128, True), (64, 0, True), (256, 128, False)])
def test_kernels_fit_a_multiprocessor(case: tuple[int, int, bool]) -> None:
    """In an interpreter of its own, for here Triton's interpreter may be on."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, repr(case)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
