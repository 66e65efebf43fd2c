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
import time
from pathlib import Path
from types import ModuleType
from typing import IO, Any

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


def run(
    *arguments: str | Path, seconds: float = 250, cwd: Path = ROOT, forks: bool = False, **environment: str
) -> str:
    """Runs Python with `arguments`, with torch on one thread unless told; returns what it prints. A failure shows all
    of its output. forks: in a process that has imported torch already, where tests fork."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = _start(list(map(str, arguments)), environment, output, errors, str(cwd), forks)
        return _printed([process], seconds, output, errors)


def run_forked(environment: dict[str, str], *codes: str, seconds: float = 300) -> str:
    """Runs code in a process that has imported torch already, where tests fork, or several at once; returns what they
    print, errors too. A failure shows all of their output."""
    with tempfile.TemporaryFile() as output:
        processes = [_start(["-c", code], environment, output, output) for code in codes]
        return _printed(processes, seconds, output)


def start_forked(code: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """Starts code in a process that has imported torch already; what it prints is read as of any Popen."""
    (output, written), (errors, complained) = os.pipe(), os.pipe()
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    process: Any = fork_server.ForkedCommand(command, written, environment, most_files, complained)
    for end in (written, complained):
        os.close(end)
    process.stdout, process.stderr, process.text_mode = open(output), open(errors), True  # noqa: SIM115
    return process


_FILE = """
import runpy, sys
sys.argv[:] = {command!r}
sys.path.insert(0, {folder!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _start(
    command: list[str], environment: dict[str, str], output: IO[bytes], errors: IO[bytes], folder: str | None = None,
    forks: bool = True,
) -> "subprocess.Popen[bytes]":  # fmt: skip
    if not (forks and fork_server.is_fit()):
        return subprocess.Popen([sys.executable, *command], stdout=output, stderr=errors, env=environment, cwd=folder)
    if not command[0].startswith("-"):
        command = ["-c", _FILE.format(command=command, folder=str(Path(command[0]).parent))]
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = [sys.executable, *command]
    return fork_server.ForkedCommand(command, output.fileno(), environment, most_files, errors.fileno(), folder)


def _printed(processes: list["subprocess.Popen[bytes]"], seconds: float, *files: IO[bytes]) -> str:
    """Text that processes have written to the first of `files` at their ends, which are good ones."""
    deadline = time.monotonic() + seconds
    try:
        ended_with = {process.wait(max(0.1, deadline - time.monotonic())) for process in processes}
    finally:
        for process in processes:
            process.kill()
    texts = [(file.seek(0), file.read().decode())[1] for file in files]
    assert ended_with == {0}, (ended_with, *texts)
    return texts[0]


_INTERPRETED = """
import runpy, sys
import quick_interpreter
quick_interpreter.quicken()
sys.argv[:] = {arguments!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_interpreted(file: str, *of_each: tuple[str, ...]) -> str:
    """Runs a test's file as a script by Triton's interpreter, which has to be chosen before triton is imported: once
    for each tuple of arguments, all at once."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(file).parent)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    return run_forked(environment, *(_INTERPRETED.format(arguments=[file, *each]) for each in of_each))


_libc, _test_run = ctypes.CDLL(None), os.getpid()


def end_with_test_run() -> None:
    """Has a child that was just forked (a preexec_fn) killed when the test run ends, however that is killed itself."""
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != _test_run:
        os._exit(1)
