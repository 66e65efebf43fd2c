"""Engines and ranks of tests as forks of a process that has imported torch and the engine already, which takes 2.5
seconds of a core each time.

Beside that they are what `start_python` starts: children of this process, in a session of their own, with the
environment, import path, folder and open files that a new interpreter would have. The process that forks has done
nothing but import, so it has one thread and no CUDA. Not for machines with a GPU, nor for tests that look for processes
by their environment, which a fork does not show.
"""

import atexit
import ctypes
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

MODULES = {"nanovllm.executor.worker", "nanovllm.host.program", "faulty_worker", "overlapping_worker"}
"""Programs that import torch."""
MARK = "NANOVLLM_TEST_MARK"
_READ_AT_IMPORT = ("OMP_", "MKL_", "KMP_", "GOMP_", "TRITON_", "LD_", "PYTHON")
_MOST_BYTES = 1 << 17
_FIRST_FREE = 100
"""The server's own files are numbered from here, so that none has a number that a child wants."""
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_prctl = ctypes.CDLL(None).prctl


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A child that a server has forked. Where none can, the command is executed."""

    _servers: dict[Any, socket.socket] = {}
    _lock = threading.Lock()

    def __init__(self, command: list[str], **options: Any) -> None:
        environment, files = options["env"], options["pass_fds"]
        if command[3] not in MODULES or MARK in environment or not _are_usual(files):
            super().__init__(command, **options)
            return
        key = tuple(sorted(item for item in environment.items() if item[0].startswith(_READ_AT_IMPORT)
                           and item[0] != "PYTHONPATH"))  # fmt: skip
        asked = {
            "module": command[3], "args": command[4:], "environment": environment, "files": files, "parent": os.getpid(),
            "folder": os.getcwd(), "cores": os.sched_getaffinity(0),
        }  # fmt: skip
        super().__init__([], executable="")  # does nothing, see _execute_child
        self.args = command
        with self._lock:
            if key not in self._servers:
                self._servers[key] = _start_server(environment)
            self.pid = _ask(self._servers[key], asked, [1, 2, *files])

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        if args:
            super()._execute_child(args, *rest)  # type: ignore[misc]
        else:
            self._child_created = True


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
    with theirs:
        folders = os.pathsep.join((environment["PYTHONPATH"], str(Path(__file__).parent)))
        command = [sys.executable, "-P", "-m", "fork_server", str(theirs.fileno())]
        options: dict[str, Any] = {"env": {**environment, "PYTHONPATH": folders}, "start_new_session": True}
        subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, **options)
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
    import torch  # noqa: F401

    import nanovllm.engine.llm_engine
    import nanovllm.executor.local
    import nanovllm.host.engine_host
    import nanovllm.models.registry
    import nanovllm.runner.model_runner  # noqa: F401
    from nanovllm.processes.child import freeze_objects

    freeze_objects()  # which would be copied where each fork counts their references
    link = socket.socket(fileno=_moved(number))
    path = sys.path[len(os.environ["PYTHONPATH"].split(os.pathsep)) :]
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
    code = 1
    try:
        while os.getppid() != asked["parent"]:
            time.sleep(0.0005)
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        os.setsid()
        os.chdir(asked["folder"])
        os.sched_setaffinity(0, asked["cores"])
        for file, number in zip(files, (1, 2, *asked["files"]), strict=True):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.path[:] = [*os.environ["PYTHONPATH"].split(os.pathsep), *path]
        sys.argv[1:] = asked["args"]
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # as at the end of an interpreter
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
