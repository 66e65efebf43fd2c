"""Compiles Triton kernels into Triton's cache: `python -m nanovllm.startup.compile_server CONTROL_FD PROCESSES PARENT`.

Started by compile_pool.py, which sends one CompileJob after another and hears of each when it is done. A kernel is
compiled in a fork of this process: compiling holds the interpreter's lock, so threads would not help. No process here
touches the device: a CUDA context of its own would cost each of them a second, and the engine its turn with the driver.
"""

import importlib
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class CompileJob:
    """One variant of one kernel, in Triton's own terms."""

    module: str
    name: str
    """The kernel's qualified name in its module."""
    specialization: str
    """Argument of JITFunction.preload: signature, constants, attributes and options as JSON."""
    target: tuple[str, Any, int]
    """backend, architecture, threads of a warp."""


class _TargetOnly:
    """Stand-in for a device's driver that tells Triton enough to compile for that device."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_kernel(job: CompileJob) -> None:
    """Leaves the kernel in the cache, and the C function that launches it, under the keys that a launch looks up."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(_TargetOnly(GPUTarget(*job.target)))
    kernel = getattr(importlib.import_module(job.module), job.name).preload(job.specialization)
    if job.target[0] == "cuda":
        from triton.backends.nvidia.driver import CudaLauncher, library_dirs

        try:
            library_dirs()
        except (OSError, AssertionError, FileNotFoundError):
            return  # no driver on this machine (a test): there will be no launch either
        CudaLauncher(kernel.src, kernel.metadata)


def _build_driver_module() -> None:
    from triton.backends.nvidia.driver import CudaUtils

    with suppress(Exception):  # no driver or no C compiler: the engine meets the same, and says so
        CudaUtils()


def _import_everything(parent: int) -> None:
    """Imports the kernels' modules, and computes what Triton computes once a process, so that forks need not."""
    from nanovllm.kernels.base.compile_keys import hash_triton, resolve_keys  # not for compile_pool.py: it brings torch

    hashing = threading.Thread(target=hash_triton)
    hashing.start()
    import torch  # noqa: F401

    if os.getppid() != parent:
        os._exit(0)
    resolve_keys()
    hashing.join()  # no thread may be about when this process forks
    try:
        from triton.backends.nvidia.driver import library_dirs

        library_dirs()
    except Exception:
        pass


def _run(job: CompileJob | None) -> None:
    """Compiles one job, in a fork. None: the module through which Triton speaks to CUDA."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with its parent
    if job is None:
        _build_driver_module()
    else:
        compile_kernel(job)


def serve(control: Connection, num_processes: int, parent: int) -> None:
    """Answers each job with (name, exit code); returns when the other end is closed or its process is gone."""
    context = get_context("fork")
    running: dict[int, tuple[BaseProcess, CompileJob]] = {}
    while True:
        for handle in wait([control, *running] if len(running) < num_processes else list(running), _LOOK_SECONDS):
            if isinstance(handle, int):
                process, job = running.pop(handle)
                process.join()
                control.send((job.name, process.exitcode))
                continue
            job = control.recv()
            process = context.Process(target=_run, args=(job,), daemon=True)
            process.start()
            running[process.sentinel] = (process, job)
        if os.getppid() != parent:  # another process may hold the other end open: a fork of the one that is gone
            return


def main(control_fd: int, num_processes: int, parent: int) -> None:
    control = Connection(control_fd)
    driver_module = get_context("fork").Process(target=_run, args=(None,), daemon=True)
    try:
        import triton  # noqa: F401

        driver_module.start()
        _import_everything(parent)
        serve(control, num_processes, parent)
    except (EOFError, OSError):
        pass
    finally:
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # the forks too, and the assemblers that they run


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
