"""A worker that fails (or only works for long) where the test says: FAULT="import|group|load|step|call|memory:how", for
one rank of an engine."""

import os
import signal
import struct
import sys
import time
from typing import Any


def fail(*_: Any, **__: Any) -> Any:
    how = os.environ["FAULT"].split(":")[1]
    if how == "exit":
        os._exit(3)
    if how == "half":  # of a reply
        os.write(int(sys.argv[2]), struct.pack("<Q", 1 << 20) + bytes(1000))
    if how in ("stop", "half"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "sleep":
        time.sleep(600)
    if how == "work":
        end = time.monotonic() + 4.5
        while time.monotonic() < end:
            pass
        return
    if how == "value":
        raise ValueError("hidden_size=-1: must be positive")
    raise KeyError("a bug of ours")


def lacks_once(runner: Any, name: str) -> None:
    prepare, calls = getattr(runner, name), []

    def lack_or_prepare(*args: Any) -> str | None:
        calls.append(1)
        return "taken by others" if len(calls) == 1 else prepare(*args)

    setattr(runner, name, lack_or_prepare)


def install(where: str) -> None:
    if where == "import":
        fail()
    from nanovllm.runner import model_runner
    from nanovllm.runner.rank_weights import RankWeights
    from nanovllm.runner.sleep import SleepableMemory

    if where == "group":
        group = model_runner.TensorParallelGroup
        model_runner.TensorParallelGroup = lambda *args, **options: fail() or group(*args, **options)  # type: ignore
    elif where == "load":
        RankWeights.load = fail  # type: ignore[method-assign]
    elif where == "call":
        RankWeights.take_from_bucket = fail  # type: ignore[method-assign]
    elif where == "memory":  # there is none at the first time of asking
        for name in ("prepare_sleep", "prepare_wake_up"):
            lacks_once(SleepableMemory, name)
    elif where == "step":
        launch, steps = model_runner.ModelRunner.launch, []

        def launch_or_fail(self: Any, packed: Any) -> None:
            steps.append(1)
            if len(steps) == 4:
                fail()
            launch(self, packed)

        model_runner.ModelRunner.launch = launch_or_fail  # type: ignore[method-assign]


if __name__ == "__main__":
    from nanovllm.executor.worker import main

    if sys.argv[1] == "1":
        install(os.environ["FAULT"].split(":")[0])
    main(*map(int, sys.argv[1:7]))
