"""A worker process: `python -m nanovllm.worker.main RANK CONTROL_FD MEMORY_FD DOORBELL_FD`, started by processes.py."""

import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection


def _leave_with_parent(control: Connection) -> None:
    """Nothing is ever sent to us after the first message: reading ends when rank 0 closes the socket, or dies."""
    try:
        control.recv()
    except (EOFError, OSError):
        pass
    os._exit(0)


def main(rank: int, control_fd: int, memory_fd: int, doorbell_fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = Connection(control_fd)
    try:
        import nanovllm.worker.worker_loop  # noqa: F401  (torch and the engine, while rank 0 settles its options)

        init = control.recv()
    except (EOFError, OSError):
        return
    threading.Thread(target=_leave_with_parent, args=(control,), daemon=True).start()
    try:
        from nanovllm.worker.channel import CommandReader
        from nanovllm.worker.worker_loop import run_worker

        run_worker(CommandReader(memory_fd, rank - 1, doorbell_fd, init.spin_seconds), control, rank, init)
    except BaseException as error:
        user_error = error if isinstance(error, (ValueError, FileNotFoundError)) else None
        try:
            control.send(("error", (traceback.format_exc(), user_error)))
        finally:
            os._exit(1)  # not sys.exit: destructors of half-broken communicators may wait for ranks that are gone


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
