"""Kernels compiled for a compute capability, 9.0 unless told, which takes no GPU."""

import io
import os
import re
from collections.abc import Callable, Collection
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from programs import ROOT, run_forked

from nanovllm.kernels.fp8.operands import FP8Weight


def run_alone(function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function of a test's file in a process of its own, for here Triton's interpreter may be on."""
    file = Path(function.__code__.co_filename)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, Path(__file__).parent, file.parent)))
    run_forked(environment, f"import {file.stem} as file; file.{function.__name__}(*{arguments!r})")


def launch_dependently(*modules: Any) -> None:
    """Has kernels of these modules compiled as GPUs from compute capability 9.0 on launch them."""
    for module in modules:
        module.pdl_options = lambda *_: {"PDL": True, "launch_pdl": True}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def empty_fp8(*shape: int, rows_each: int = 128) -> FP8Weight:
    """A weight [..., n, k]. Its scales are for so many rows and for 128 columns, or for one row and all columns."""
    *stack, n, k = shape
    scale = empty(*stack, -(-n // rows_each), -(-k // 128) if rows_each > 1 else 1, dtype=torch.float32)
    return FP8Weight(empty(*shape, dtype=torch.float8_e4m3fn), scale, rows_each)


SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Maximum shared memory of one program, by compute capability."""


def compile_only(
    check: Callable[[str, dict[str, Any]], None] = lambda ptx, options: None, most_spilled: int | None = 0,
    capability: int = 90, overlapping: Collection[str] = (), **constants: Any,
) -> None:  # fmt: skip
    """Makes launches compile alone, from now on, with `constants` besides their own. Asserts that each kernel fits a
    multiprocessor's shared memory and spills no more than so many bytes (None: any number, which is not looked up);
    `check` gets its PTX and its options. overlapping: names of kernels whose products, on the tensor cores of 9.0, must
    not wait for each other."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from nanovllm.startup.compile_server import _TargetOnly

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options | constants)
        assert kernel.metadata.shared <= SHARED_BYTES[capability], (self.__name__, kernel.metadata.shared)
        if most_spilled is not None:
            [spilled] = re.findall(rb"(\d+) bytes spill stores", kernel.asm["cubin"])
            assert int(spilled) <= most_spilled, (self.__name__, spilled)
        assert self.__name__ not in overlapping or b"serialized" not in kernel.asm["cubin"], self.__name__
        check(kernel.asm["ptx"], options)
        return kernel

    launch = JITFunction.run
    _keep_reports()
    driver.set_active(_TargetOnly(GPUTarget("cuda", capability, 32)))
    JITFunction.run = run


def _keep_reports() -> None:
    """Has Triton keep, under keys of their own, what ptxas reports of kernels in place of their code, so that it runs
    once for each."""
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    assemble, key = CUDABackend.make_cubin, CUDABackend.hash
    knobs.nvidia.dump_ptxas_log = True

    def report(self: Any, *args: Any) -> bytes:
        with redirect_stdout(io.StringIO()) as said:
            assemble(self, *args)
        return said.getvalue().encode()

    CUDABackend.make_cubin, CUDABackend.hash = report, lambda self: f"{key(self)}-report"
