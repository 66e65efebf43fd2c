"""Programs of the project: as modules, whatever their files are called, or as processes: to their end, or such that end
with the test run."""

import ctypes
import importlib.machinery
import importlib.util
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import fork_server

ROOT = Path(__file__).resolve().parents[1]


def load(path: Path) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(f"program_{path.stem}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their module up there
    loader.exec_module(module)
    return module


def run(*arguments: str | Path, seconds: float = 250, cwd: Path = ROOT, **environment: str) -> str:
    """Runs Python with `arguments`, with torch on one thread unless told; returns what it prints. A failure shows all
    of its output."""
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=cwd, env=environment)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_forked(code: str, environment: dict[str, str], seconds: float = 300) -> None:
    """Runs code in a process that has imported torch already, where tests fork. A failure shows all of its output."""
    command = [sys.executable, "-c", code]
    with tempfile.TemporaryFile() as output:
        if fork_server.is_fit():
            most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            process = fork_server.ForkedCommand(command, output.fileno(), environment, most_files)
        else:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            ended_with = process.wait(seconds)
        finally:
            process.kill()
        output.seek(0)
        assert ended_with == 0, output.read().decode()


_INTERPRETED = """
import runpy, sys
import quick_interpreter
quick_interpreter.quicken()
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_interpreted(file: str, *arguments: str) -> str:
    """Runs a test's file as a script by Triton's interpreter, which has to be chosen before triton is imported."""
    folders = (ROOT, ROOT / "tests", Path(file).parent)
    path = os.pathsep.join(map(str, folders))
    return run("-c", _INTERPRETED, file, *arguments, TRITON_INTERPRET="1", PYTHONPATH=path)


_libc, _test_run = ctypes.CDLL(None), os.getpid()


def end_with_test_run() -> None:
    """Has a child that was just forked (a preexec_fn) killed when the test run ends, however that is killed itself."""
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != _test_run:
        os._exit(1)
