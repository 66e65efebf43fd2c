"""How many threads compute on a CPU, and that those which wait sleep. No torch: it takes both over as it is loaded."""

import os
import sys
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_NUMBERS_PER_THREAD = 1 << 19
"""Of a square matrix as wide as the model: below, handing work to a thread costs more than the thread computes."""


def let_waiting_threads_sleep() -> None:
    """Tells OpenMP, before torch loads it: by default its threads spin for milliseconds between two operations, and on
    cores that others use as well, those spin in whose place one could compute. What the environment says stays."""
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def usable_cores() -> int:
    """Cores that this process may use: by its affinity, and by the CPU time that its control groups have."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(int, _quotas())]))


def threads_for(hidden_size: int, cores: int) -> int:
    """Threads that compute a model of this width fastest on so many cores."""
    return max(1, min(cores, hidden_size * hidden_size // _NUMBERS_PER_THREAD))


def _quotas() -> list[float]:
    """CPUs that each control group of this process may use at a time, where it has a limit (versions 1 and 2)."""
    found = []
    for folder in _own_folders():
        try:
            if (limit := folder / "cpu.max").exists():
                quota, period = limit.read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            if quota not in ("max", "-1"):
                found.append(int(quota) / int(period))
        except (OSError, ValueError):
            continue  # no control group of CPUs
    return found


def _own_folders() -> list[Path]:
    """Of this process's control groups and of those that they are in."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = _CGROUPS if not controllers else _CGROUPS / "cpu"
        if not controllers or "cpu" in controllers.split(","):
            own = root / path.lstrip("/")
            folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return folders
