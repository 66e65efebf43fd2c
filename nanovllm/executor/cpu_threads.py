"""Threads that compute on a CPU: their number, and that those which wait sleep. No torch: it takes both over as it is
loaded."""

import os
import sys

_NUMBERS_PER_THREAD = 1 << 19
"""Least elements for each thread, of a square matrix as wide as the model: with fewer, handing work to a thread costs
more than the thread computes."""


def let_waiting_threads_sleep() -> None:
    """Tells OpenMP, before torch loads it: by default its threads spin for milliseconds between two operations, and on
    cores that others use as well, those spin in whose place one could compute. What the environment says stays."""
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def threads_for(hidden_size: int, cores: int) -> int:
    """Threads that compute a model of this width fastest on so many cores."""
    return max(1, min(cores, hidden_size * hidden_size // _NUMBERS_PER_THREAD))
