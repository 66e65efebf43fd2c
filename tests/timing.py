"""Seconds that a call takes, for bounds that must also hold on a busy machine."""

import time
from collections.abc import Callable


def seconds(call: Callable[[], object], rounds: int, warmup: int) -> list[float]:
    """Seconds of each of `rounds` calls after `warmup` others, ascending."""
    for _ in range(warmup):
        call()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times)
