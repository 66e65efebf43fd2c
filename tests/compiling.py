"""Kernels compiled for compute capability 9.0, which takes no GPU."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_alone(script: str, *arguments: str) -> None:
    """Runs `script` in an interpreter of its own, for here Triton's interpreter may be on; it can import this file."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def compile_only(
    check: Callable[[str, dict[str, Any]], None] = lambda ptx, options: None, most_spilled: int = 0, **constants: Any
) -> None:
    """From now on launches only compile, with `constants` besides their own. Of each kernel this asserts that it fits a
    multiprocessor's shared memory and spills no more than so many bytes; `check` gets its PTX and its options."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from nanovllm.startup.compile_server import _TargetOnly

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options | constants)
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(kernel.asm["ptx"])
            file.flush()
            command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
            report = subprocess.run(command, capture_output=True, text=True).stderr
        [spilled] = re.findall(r"(\d+) bytes spill stores", report)
        assert kernel.metadata.shared <= 227 * 1024, (self.__name__, kernel.metadata.shared)
        assert int(spilled) <= most_spilled, (self.__name__, report)
        check(kernel.asm["ptx"], options)
        return kernel

    launch = JITFunction.run
    driver.set_active(_TargetOnly(GPUTarget("cuda", 90, 32)))
    JITFunction.run = run
