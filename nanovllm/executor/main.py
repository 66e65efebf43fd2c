"""A worker: `python -m nanovllm.executor.main RANK CONTROL_FD MEMORY_FD DOORBELL_FD STORE_FD`, started by
processes.py."""

import os
import pickle
import queue
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from nanovllm.executor.channel import CommandReader, WorkerState
from nanovllm.startup.child import leave_signals_to_parent

_LOOK_SECONDS = 0.5


def _follow_parent(control: Connection, ring: CommandReader, inbox: "queue.SimpleQueue[bytes]") -> None:
    """Passes messages on, and ends this process when rank 0 says so (an empty message), closes its end, or is no more.

    Whatever the main thread is doing meanwhile: importing, loading, waiting in a collective for ranks that are gone.
    """
    parent = os.getppid()
    try:
        while True:
            while not control.poll(_LOOK_SECONDS):
                ring.report_work()
                if os.getppid() != parent:  # a process that rank 0 forked may hold its end of the socket open
                    os._exit(0)
            message = control.recv_bytes()
            if not message:
                os._exit(0)
            inbox.put(message)
    except (EOFError, OSError):
        os._exit(0)


def main(rank: int, control_fd: int, memory_fd: int, doorbell_fd: int, store_fd: int) -> None:
    leave_signals_to_parent()
    control = Connection(control_fd)
    ring = CommandReader(memory_fd, rank - 1, doorbell_fd)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_follow_parent, args=(control, ring, inbox), daemon=True).start()
    try:
        from nanovllm.executor.loop import run_worker  # torch and the engine, while rank 0 resolves its options

        run_worker(ring, control, rank, pickle.loads(inbox.get()), store_fd)
    except BaseException as error:
        # What is wrong with the user's files or options is raised to them as such; in mid-step it is a bug of ours.
        kinds = (FileNotFoundError, ValueError) if ring.state is WorkerState.CALLING else ()
        kind = next((kind for kind in kinds if isinstance(error, kind)), None)
        try:
            control.send(("error", (kind, str(error), traceback.format_exc())))
        finally:
            os._exit(1)  # not sys.exit: destructors of half-broken communicators may wait for ranks that are gone


if __name__ == "__main__":
    main(*map(int, sys.argv[1:6]))
