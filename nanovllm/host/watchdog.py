"""Watchdog: ends a process in which a step or a call hangs, where no other timeout notices it."""

import faulthandler
import os
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext

from nanovllm.config import EngineConfig

BEYOND = 300
"""Seconds that a step may take beyond step_timeout, which is the limit of a device that hangs. Kernels may be compiled
in a step."""
CALL_SECONDS = 3600.0
"""Seconds that a call, such as new weights from a trainer, may keep an engine from stepping."""
_LOOK = 1.0  # seconds


class Watchdog:
    """Limit on the duration of each step: `with watchdog: engine.step()`. Cannot notice a thread that holds the GIL."""

    def __init__(self, seconds: float, what: str = "step") -> None:
        """`seconds`: the limit. Beyond it the stacks of all threads go to standard error, and the process exits with
        status 1."""
        self._seconds, self._what = seconds, what
        self._begun = self._ended = 0
        threading.Thread(target=self._look, name="nanovllm-watch", daemon=True).start()

    def __enter__(self) -> None:
        self._begun += 1

    def __exit__(self, *_: object) -> None:
        self._ended = self._begun

    def _look(self) -> None:
        """Counts looks rather than time, so that time in which the whole process was stopped does not count."""
        step, waited = 0, 0.0
        while waited <= self._seconds:
            time.sleep(_LOOK)
            if self._begun == step != self._ended:
                waited += _LOOK
            else:
                step, waited = self._begun, 0.0
        print(f"nanovllm: a {self._what} has not finished for {self._seconds:.0f} s", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)


def step_watchdog(config: EngineConfig) -> AbstractContextManager[None]:
    """Watchdog for steps on a GPU. On a CPU a step may take that long, so there is none."""
    return Watchdog(config.step_timeout + BEYOND) if config.device == "cuda" else nullcontext()
