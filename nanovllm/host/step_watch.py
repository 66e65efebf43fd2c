"""Ends a process of ours in which a step or a call does not end: of a mistake that no wait with a timeout sees."""

import faulthandler
import os
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext

from nanovllm.config import EngineConfig

BEYOND = 300
"""Seconds that a step may take beyond step_timeout, which a device that hangs ends: kernels may be compiled in it."""
CALL_SECONDS = 3600.0
"""The longest that a call, such as new weights from a trainer, may keep an engine from stepping."""
_LOOK = 1.0  # seconds


class StepWatch:
    """Goes around each step of the thread that steps: `with watch: engine.step()`. Does not see a thread that keeps the
    interpreter's lock."""

    def __init__(self, seconds: float, what: str = "step") -> None:
        """Sets the limit: after so many seconds in one step the stacks of all threads go to standard error, and the
        process ends with status 1."""
        self._seconds, self._what = seconds, what
        self._begun = self._ended = 0
        threading.Thread(target=self._look, name="nanovllm-watch", daemon=True).start()

    def __enter__(self) -> None:
        self._begun += 1

    def __exit__(self, *_: object) -> None:
        self._ended = self._begun

    def _look(self) -> None:
        """Adds up looks: of the time for which the process itself was stopped there are none."""
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


def watch_of(config: EngineConfig) -> AbstractContextManager[None]:
    """Watch for steps on a GPU; none on a CPU, where a step may take that long."""
    return StepWatch(config.step_timeout + BEYOND) if config.device == "cuda" else nullcontext()
