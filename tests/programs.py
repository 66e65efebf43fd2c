"""Programs of the project: as modules, whatever their files are called, or as processes that end with the test run."""

import ctypes
import importlib.machinery
import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import ModuleType


def load(path: Path) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(f"program_{path.stem}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their module up there
    loader.exec_module(module)
    return module


_libc, _test_run = ctypes.CDLL(None), os.getpid()


def end_with_test_run() -> None:
    """Has a child that was just forked (a preexec_fn) killed when the test run ends, however that is killed itself."""
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != _test_run:
        os._exit(1)
