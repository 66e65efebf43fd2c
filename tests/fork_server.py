"""Engines, ranks and servers of tests as forks of a process that has imported torch and the engine already, which
takes 2.5 seconds of a core each time.

Beside that they are what `start_python` starts: children of this process, in a session of their own, with the
environment, import path, folder and open files that a new interpreter would have. The process that forks has done
nothing but import, so it has one thread and no CUDA; each fork that starts others has one of its own, a fork as well.
Not for machines with a GPU.

A fork does not show its environment, by which tests look for processes: it has a file open that is called as the entry
MARK of it.
"""

import atexit
import ctypes
import os
import pickle
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

MODULES = {
    "nanovllm.executor.worker", "nanovllm.host.program", "nanovllm.cli.local_server", "faulty_worker",
    "overlapping_worker",
}  # fmt: skip
"""Programs that import torch, or start one that does."""
NAME = "fork-server"
"""Name of a process that forks, in /proc."""
MARK = "NANOVLLM_TEST_MARK"
"""An environment variable that workers inherit: finds them whoever their parent is by now."""
_READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "GOMP_", "TRITON_", "LD_", "PYTHON")
_READ_LATER = ("PYTHONPATH", "OMP_WAIT_POLICY", "TRITON_CACHE_DIR")
_MOST_BYTES = 1 << 17
_FIRST_FREE = 200
"""The server's own files are numbered from here, so that none has a number that a child wants."""
_DEATH_SIGNAL, _SET_NAME, _SUBREAPER = 1, 15, 36  # PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER
_prctl = ctypes.CDLL(None).prctl
_servers: dict[Any, socket.socket] = {}
_lock = threading.Lock()


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A child that a server has forked. Where none can, the command is executed."""

    def __init__(self, command: list[str], **options: Any) -> None:
        if command[3] not in MODULES or not _are_usual(options["pass_fds"]):
            super().__init__(command, **options)
            return
        super().__init__([], executable="")  # does nothing, see _execute_child
        self.args = command
        self.pid = fork(command[2:], options["env"], {number: number for number in (1, 2, *options["pass_fds"])})

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        if args:
            super()._execute_child(args, *rest)  # type: ignore[misc]
        else:
            self._child_created = True


class ForkedCommand(Forked):
    """A command of Python, `-m module` or `-c code`, that writes to files and ends with this process."""

    def __init__(
        self, command: list[str], output: int, environment: dict[str, str], most_files: int,
        errors: int | None = None, folder: str | None = None,
    ) -> None:  # fmt: skip
        subprocess.Popen.__init__(self, [], executable="")
        self.args = command
        files = {1: output, 2: output if errors is None else errors}
        self.pid = fork(command[1:], environment, files, most_files, folder)


def fork(
    command: list[str], environment: dict[str, str], files: dict[int, int], most_files: int = 0,
    folder: str | None = None,
) -> int:  # fmt: skip
    """Returns the process id of a child that runs a command. files: what its files are here. most_files: number of
    files that it may open, and a child with such a bound is killed when this process ends. folder: None: that of this
    process."""
    key = _key(environment)
    asked = {
        "command": command, "environment": environment, "files": list(files), "parent": os.getpid(),
        "folder": folder or os.getcwd(), "cores": os.sched_getaffinity(0), "most_files": most_files,
    }  # fmt: skip
    with _lock:
        if key not in _servers:
            _servers[key] = _start_server(environment)
        return _ask(_servers[key], asked, list(files.values()))


def _key(environment: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Variables that libraries look at when they are imported."""
    names = sorted(name for name in environment if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER)
    return tuple((name, environment[name]) for name in names)


def is_fit() -> bool:
    """Whether engines can be forks here."""
    return sys.platform == "linux" and not any(Path("/dev").glob("nvidia[0-9]*"))


def is_server(process: int) -> bool:
    """Whether a process forks others; none that has gone does."""
    try:
        return Path(f"/proc/{process}/comm").read_text() == f"{NAME}\n"
    except OSError:
        return False


def install() -> None:
    """Lets the engines and ranks that this process starts be forks."""
    from nanovllm.processes import child

    names = ("DEVNULL", "TimeoutExpired")
    child.subprocess = SimpleNamespace(Popen=Forked, **{name: getattr(subprocess, name) for name in names})


def _are_usual(files: tuple[int, ...]) -> bool:
    if max(files) >= _FIRST_FREE:
        return False
    try:
        return all(os.fstat(number) for number in (1, 2))
    except OSError:
        return False


def _start_server(environment: dict[str, str]) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:  # as engines set it
        folders = os.pathsep.join((environment["PYTHONPATH"], str(Path(__file__).parent)))
        command = [sys.executable, "-P", "-m", "fork_server", str(theirs.fileno())]
        # numpy's import starts threads of OpenBLAS
        more = {"PYTHONPATH": folders, "OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}
        options: dict[str, Any] = {"env": environment | more}
        options["env"].pop(MARK, None)
        options |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
        subprocess.Popen(command, pass_fds=[theirs.fileno()], **options)
    return ours


def _ask(server: socket.socket, asked: dict[str, Any], files: list[int]) -> int:
    """Returns the process id of the fork, which is a child of this process by then: the one between them has ended."""
    _prctl(_SUBREAPER, 1)
    try:
        socket.send_fds(server, [pickle.dumps(asked)], files)
        return int(server.recv(100))
    finally:
        _prctl(_SUBREAPER, 0)


# -- in the server --------------------------------------------------------------------------------------------------


def serve(number: int) -> None:
    """Forks whenever it is asked to, until the other end is closed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # in forks, from their first moment on
    import torch  # noqa: F401

    import nanovllm.engine.llm_engine
    import nanovllm.executor.local
    import nanovllm.host.engine_host
    import nanovllm.models.registry
    import nanovllm.runner.model_runner  # noqa: F401
    from nanovllm.processes.garbage import freeze_objects

    freeze_objects()  # which would be copied where each fork counts their references
    path = [folder for folder in sys.path if folder.startswith((sys.prefix, sys.base_prefix))]  # any interpreter's
    _serve(socket.socket(fileno=_moved(number)), path)


def _serve(link: socket.socket, path: list[str]) -> None:
    _prctl(_SET_NAME, NAME.encode(), 0, 0, 0)
    while True:
        message, files, _, _ = socket.recv_fds(link, _MOST_BYTES, 100)
        if not message:
            return
        files = [_moved(each) for each in files]
        asked = pickle.loads(message)
        assert len(os.listdir("/proc/self/task")) == 1
        told, tell = os.pipe()
        if (between := os.fork()) == 0:
            if (child := os.fork()) == 0:
                link.close()
                os.close(told)
                os.close(tell)
                _run(asked, files, path)
            os.write(tell, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        link.send(os.read(told, 100))
        for each in (told, tell, *files):
            os.close(each)


def _moved(file: int) -> int:
    """The same file by a number that no child wants."""
    import fcntl

    found = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    os.close(file)
    return found


def _run(asked: dict[str, Any], files: list[int], path: list[str]) -> NoReturn:
    """Does what a new interpreter would."""
    code, (kind, program, *args) = 1, asked["command"]
    try:
        while os.getppid() != asked["parent"]:
            time.sleep(0.0005)
        os.setsid()
        os.chdir(asked["folder"])
        os.sched_setaffinity(0, asked["cores"])
        for file, number in zip(files, asked["files"], strict=True):
            os.dup2(file, number)
        for file in files:
            os.close(file)
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.path[:] = [*os.environ["PYTHONPATH"].split(os.pathsep), *path]
        sys.argv[:] = [kind, *args]
        if program != "nanovllm.executor.worker":
            _start_own_server(path)
        if MARK in os.environ:
            _moved(os.memfd_create(f"{MARK}={os.environ[MARK]}"))
        if most := asked["most_files"]:
            _prctl(_DEATH_SIGNAL, signal.SIGKILL)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        signal.pthread_sigmask(signal.SIG_SETMASK, () if most else (signal.SIGINT, signal.SIGTERM))
        _prctl(_SET_NAME, b"python", 0, 0, 0)
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # as at the end of an interpreter
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _start_own_server(path: list[str]) -> None:
    """Forks a process that will fork this one's children, while this one has one thread."""
    ours, theirs = (socket.socket(fileno=_moved(end.detach())) for end in
                    socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))  # fmt: skip
    if os.fork() == 0:
        for file in map(int, os.listdir("/proc/self/fd")):
            if file > 2 and file != theirs.fileno():
                with suppress(OSError):
                    os.close(file)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (1, 2):
            os.dup2(nothing, number)
        _serve(theirs, path)
        os._exit(0)
    theirs.close()
    _servers.clear()
    _servers[_key(dict(os.environ))] = ours
    install()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
