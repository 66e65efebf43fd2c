"""Every launch says whether products and sums may be fused, so that bits and speed are the same with any Triton."""

import pytest
from programs import run

pytest.importorskip("triton")

PROGRAM = """
import importlib, pkgutil
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
import nanovllm.kernels, nanovllm.parallel
from nanovllm.kernels.pointwise.activation import activation
from nanovllm.startup.compile_server import _TargetOnly

kernels = {}
for package in (nanovllm.kernels, nanovllm.parallel):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        for name, value in vars(importlib.import_module(found.name)).items():
            if isinstance(value, JITFunction) and value.fn.__module__ == found.name:
                kernels[found.name, name] = value
assert len(kernels) > 150, len(kernels)
launches = {}
JITFunction.run = lambda self, *args, **options: launches.update({self: options})
for kernel in kernels.values():
    kernel[(1,)]()
silent = [name for name, kernel in kernels.items() if launches[kernel].get("enable_fp_fusion") is not True]
assert silent == [], silent
kernel[(1,)](enable_fp_fusion=False)
assert launches[kernel] == {"grid": (1,), "warmup": False, "enable_fp_fusion": False}
"""


def test_kernels_may_fuse_unless_a_launch_says_otherwise() -> None:
    run("-c", PROGRAM, TRITON_INTERPRET="0")
