"""What a worker does all day: read a command, carry it out, answer if it was a call."""

from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from nanovllm.config import EngineConfig
from nanovllm.executor.channel import STEP, CommandReader, WorkerState
from nanovllm.executor.store import open_store
from nanovllm.model_config import ModelConfig
from nanovllm.runner.model_runner import ModelRunner

_SPIN_SECONDS = 2.0  # for which a worker of a GPU waits for its next command before it sleeps


def run_worker(
    ring: CommandReader, control: Connection, rank: int, init: tuple[EngineConfig, ModelConfig, int], store_fd: int
) -> None:
    """init: the options, with no "auto" left; the model; threads of each rank on a CPU, whose cores the ranks share.
    Returns never; rank 0 ends this process (see main.py)."""
    config, model_config, num_threads = init
    if config.device == "cpu":
        torch.set_num_threads(num_threads)
    else:
        ring.spin_seconds, ring.counts_work = _SPIN_SECONDS, False
    control.send(("result", None))  # imported
    runner = ModelRunner(config, model_config, rank, open_store(store_fd), ring.report_progress)
    runner.load()
    _report_compiling(ring)
    control.send(("result", None))  # loaded
    while True:
        ring.set_state(WorkerState.IDLE)
        kind, message = ring.receive()
        if kind == STEP:
            ring.set_state(WorkerState.STEPPING)
            runner.launch(np.frombuffer(message, dtype=np.int32))
        else:
            ring.set_state(WorkerState.CALLING)
            method, args = message
            control.send(("result", getattr(runner, method)(*args)))
        ring.mark_done()


def _report_compiling(ring: CommandReader) -> None:
    """Lets rank 0 tell a worker that compiles a kernel from one that hangs."""
    try:
        from triton import knobs
    except ImportError:
        return
    states: list[WorkerState] = []

    def begin(**_: Any) -> bool:
        states.append(ring.set_state(WorkerState.COMPILING))
        return False  # do compile

    def end(**_: Any) -> None:
        ring.set_state(states.pop())

    knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = begin, end
