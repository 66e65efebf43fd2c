"""New interpreters of ours, and what they inherit."""

import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Environment variables that keep NCCL, torch and NVSHMEM from creating NVLink multicast objects; to be set before CUDA
starts."""

LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM)
"""Blocked in new interpreters of ours: they end none that is just starting, whoever sends them to all processes."""

_KILL_SECONDS = 10.0


def forbid_multicast() -> None:
    """Sets the switches of MULTICAST_OFF in this process (children inherit them). Call it before CUDA starts."""
    os.environ.update(MULTICAST_OFF)


def start_python(module: str, *args: str, pass_fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Runs a module of ours in a new interpreter that finds what this one finds."""
    # -P: the folder that the user happens to be in must not shadow modules that it does not shadow here.
    command = [sys.executable, "-P", "-m", module, *args]
    # Importing passes over what is no string in sys.path (a Path, say), and so do we.
    folders = [path or os.getcwd() for path in sys.path if isinstance(path, str)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)  # inherited
    try:
        # A session of its own: Ctrl-C in a terminal reaches the caller alone, who then stops us in order.
        return subprocess.Popen(
            command, pass_fds=pass_fds, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end(process: "subprocess.Popen[bytes]", patience: float) -> None:
    """Waits `patience` seconds for a child to end, then kills it. One that a driver holds even then is left behind."""
    try:
        process.wait(max(0.0, patience))
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)


def leave_signals_to_parent() -> None:
    """Ctrl-C, and what systemd sends to all processes of a service: the parent decides what becomes of us. Children of
    ours begin with the default for the latter again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_PARENT)


def end_this(code: int) -> NoReturn:
    """Ends this process, though other threads run: those of libraries may wait for what is gone."""
    with suppress(AttributeError, OSError):  # None, or a pipe that nobody reads any more
        sys.stdout.flush()
    os._exit(code)


def freeze_objects() -> None:
    """Exempts all objects that exist now from garbage collection; called at the end of a start. A full collection would
    hold up all requests for some 90 ms while it walks through what torch and others have imported."""
    gc.collect()
    gc.freeze()


def start_linked(module: str, *args: str) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Runs a module of ours with a socket to us, whose number is its first argument; returns it and our end."""
    ours, theirs = socket_pair()
    with theirs:
        try:
            return start_python(module, str(theirs.fileno()), *args, pass_fds=(theirs.fileno(),)), ours
        except BaseException:
            ours.close()
            raise


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Pair of sockets: our end, and one for a child. Both block, whatever socket.setdefaulttimeout says in the caller's
    program."""
    with no_standard_numbers():
        ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(True)
    return ours, theirs


@contextmanager
def no_standard_numbers() -> Iterator[None]:
    """Context in which no new file gets number 0, 1 or 2, though the caller may have closed these, as some daemons do:
    there a child has its input and output, not what we hand on."""
    held: list[int] = []
    try:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            held.append(fd)
        os.close(fd)
        yield
    finally:
        for fd in held:
            os.close(fd)
