"""Waits for what other processes and threads do, and what the system says of processes."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 60.0


def wait_for(condition: Callable[[], Any], what: str, seconds: float = PATIENCE, interval: float = 0.02) -> Any:
    """Polls until `condition` is true; returns what it returned. Fails with `what` after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(interval)
    return found


def _stat(process: int) -> list[str]:
    """Fields of /proc/PID/stat from the third, the state, on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def alive(processes: set[int]) -> set[int]:
    """Processes of these that run, and are no zombies."""
    found = set()
    for process in processes:
        try:
            if _stat(process)[0] != "Z":
                found.add(process)
        except OSError:
            continue
    return found


def cpu_seconds(processes: set[int]) -> float:
    """Time that these have computed until now."""
    ticks = sum(int(field) for process in processes for field in _stat(process)[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
