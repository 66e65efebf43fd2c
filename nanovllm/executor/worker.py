"""A worker: `python -m nanovllm.executor.worker RANK CONTROL_FD MEMORY_FD DOORBELL_FD STORE_FD PARENT`,
started by processes.py. It reads a command, carries it out, and answers if it was a call."""

import os
import pickle
import select
import socket
import sys
import threading
import traceback
from operator import attrgetter
from typing import Any

from nanovllm.executor.channel import STEP, CommandReader, WorkerState
from nanovllm.models.plugins import load_plugins
from nanovllm.processes.child import leave_signals_to_parent
from nanovllm.processes.framing import framed

_LOOK_SECONDS = 0.5
_SPIN_SECONDS = 2.0  # for which a worker of a GPU waits for its next command before it sleeps


def main(rank: int, control_fd: int, memory_fd: int, doorbell_fd: int, store_fd: int, parent: int) -> None:
    """parent: rank 0's process, which may be gone by now."""
    leave_signals_to_parent()
    control = socket.socket(fileno=control_fd)
    ring = CommandReader(memory_fd, rank - 1, doorbell_fd)
    threading.Thread(target=_follow_parent, args=(control, ring, parent), daemon=True).start()
    try:
        _work(ring, control, rank, store_fd)
    except BaseException as error:
        # What is wrong with the user's files or options is raised to them as such; in mid-step it is a bug of ours.
        kinds = (FileNotFoundError, ValueError) if ring.state is WorkerState.CALLING else ()
        kind = next((kind for kind in kinds if isinstance(error, kind)), None)
        try:
            _send(control, "error", (kind, str(error), traceback.format_exc()))
        finally:
            os._exit(1)  # not sys.exit: destructors of half-broken communicators may wait for ranks that are gone


def _send(control: socket.socket, kind: str, value: Any) -> None:
    for piece in framed(pickle.dumps((kind, value), pickle.HIGHEST_PROTOCOL)):
        control.sendall(piece)


def _follow_parent(control: socket.socket, ring: CommandReader, parent: int) -> None:
    """Ends this process when rank 0 says so (by any message), closes its end, or is no more.

    Whatever the main thread is doing meanwhile: importing, loading, waiting in a collective for ranks that are gone.
    """
    try:
        said = select.poll()
        said.register(control, select.POLLIN)
        while not said.poll(_LOOK_SECONDS * 1000):
            ring.report_work()
            if os.getppid() != parent:  # a process that rank 0 forked may hold its end of the socket open
                break
    finally:
        os._exit(0)


def _work(ring: CommandReader, control: socket.socket, rank: int, store_fd: int) -> None:
    """Returns never; rank 0 ends this process."""
    # Torch and the engine, while rank 0 resolves its options.
    import numpy as np
    import torch

    from nanovllm.executor.store import open_store
    from nanovllm.runner.model_runner import ModelRunner

    _, (_, (config, packed, num_threads)) = ring.receive()  # what rank 0 sends first (LocalExecutor)
    load_plugins(config.plugins)
    model_config = pickle.loads(packed)  # which may hold a plugin's own classes
    if config.device == "cpu":
        torch.set_num_threads(num_threads)
    else:
        ring.spin_seconds, ring.counts_work = _SPIN_SECONDS, False
    _send(control, "result", None)  # imported
    runner = ModelRunner(config, model_config, rank, open_store(store_fd), ring.report_progress)
    runner.weights.load()
    _report_compiling(ring)
    _send(control, "result", None)  # loaded
    while True:
        ring.state = WorkerState.IDLE
        kind, message = ring.receive()
        if kind == STEP:
            ring.state = WorkerState.STEPPING
            runner.launch(np.frombuffer(message, dtype=np.int32))
        else:
            ring.state = WorkerState.CALLING
            method, args = message
            _send(control, "result", attrgetter(method)(runner)(*args))


def _report_compiling(ring: CommandReader) -> None:
    """Lets rank 0 tell a worker that compiles a kernel from one that hangs."""
    try:
        from triton import knobs
    except ImportError:
        return
    states: list[WorkerState] = []

    def begin(**_: Any) -> bool:
        states.append(ring.state)
        ring.state = WorkerState.COMPILING
        return False  # do compile

    def end(**_: Any) -> None:
        ring.state = states.pop()

    knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = begin, end


if __name__ == "__main__":
    main(*map(int, sys.argv[1:7]))
