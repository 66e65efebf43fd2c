"""Child processes that run a module of this package: how they start, what they inherit, and how they end."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, Protocol

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Environment variables that keep NCCL, torch and NVSHMEM from creating NVLink multicast objects; to be set before CUDA
starts."""

LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM)
"""Signals that are blocked in new children: sent to all processes of a service, they end none that is just starting."""

_KILL_SECONDS = 10.0


def forbid_multicast() -> None:
    """Sets the switches of MULTICAST_OFF in this process (children inherit them). Call it before CUDA starts."""
    os.environ.update(MULTICAST_OFF)


def import_path() -> str:
    """PYTHONPATH of a new interpreter with this one's import path. Raises OSError in a folder that has been deleted,
    where neither Python nor torch work."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise OSError("the working folder has been deleted: start in another one") from None
    # Like the import system, this ignores entries of sys.path that are no strings.
    return os.pathsep.join(path or here for path in sys.path if isinstance(path, str))


def start_python(module: str, *args: str, pass_fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Runs a module in a new interpreter with this one's import path."""
    # -P: the current folder must not shadow modules that it does not shadow here.
    command = [sys.executable, "-P", "-m", module, *args]
    environment = {**os.environ, "PYTHONPATH": import_path()}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)  # inherited
    try:
        # A session of its own: Ctrl-C in a terminal reaches only the caller, who then ends its children.
        return subprocess.Popen(
            command, pass_fds=pass_fds, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Process(Protocol):
    """A child process, or what stands for one."""

    def poll(self) -> int | str | None:
        """Returns its exit code, or how it has ended in words; None while it runs."""

    def wait(self, timeout: float | None = None) -> object:
        """Waits for its end. Raises subprocess.TimeoutExpired."""

    def kill(self) -> None:
        """Ends it, without waiting for that."""


def end(process: Process, patience: float) -> None:
    """Waits `patience` seconds for a child to exit, then kills it. One that a device driver holds even then is left
    behind."""
    try:
        process.wait(max(0.0, patience))
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)


def leave_signals_to_parent() -> None:
    """Ignores Ctrl-C and SIGTERM, which systemd sends to all processes of a service: the parent decides when this one
    ends. The handler of SIGTERM is not inherited by this process's own children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_PARENT)


def end_this(code: int) -> NoReturn:
    """Ends this process without waiting for other threads: those of libraries may never end."""
    with suppress(AttributeError, OSError):  # None, or a pipe that nobody reads any more
        sys.stdout.flush()
    os._exit(code)


def start_linked(module: str, *args: str) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Runs a module of this package, with the file descriptor of a socket to this process as first argument; returns
    the process and this end of the socket."""
    ours, theirs = socket_pair()
    with theirs:
        try:
            return start_python(module, str(theirs.fileno()), *args, pass_fds=(theirs.fileno(),)), ours
        except BaseException:
            ours.close()
            raise


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Pair of connected sockets: this process's end and a child's. Both block, whatever socket.setdefaulttimeout the
    caller's program has set."""
    with no_standard_numbers():
        ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(True)
    return ours, theirs


@contextmanager
def no_standard_numbers() -> Iterator[None]:
    """Context in which no new file gets descriptor 0, 1 or 2, even if the caller has closed these, as some daemons do:
    a child uses them for its input and output."""
    held: list[int] = []
    try:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            held.append(fd)
        os.close(fd)
        yield
    finally:
        for fd in held:
            os.close(fd)
