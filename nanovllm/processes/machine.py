"""Cores and memory that this process may use: the machine's, its affinity's and its control groups'. No torch."""

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores that this process may use: by its affinity, and by the CPU time that its control groups have."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(int, _quotas())]))


def usable_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or the least that a control group of its allows."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = [machine]
    for folder in _own_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                found.append(int((folder / name).read_text()))
            except (OSError, ValueError):
                continue  # another version, or "max"
    return min(found)


def _quotas() -> list[float]:
    """CPUs that each control group of this process may use at a time, where it has a limit (versions 1 and 2)."""
    found = []
    for folder in _own_folders("cpu"):
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


def _own_folders(controller: str) -> list[Path]:
    """Folders of this process's control groups of a controller, and of those that they are in."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = _CGROUPS if not controllers else _CGROUPS / controller
        if not controllers or controller in controllers.split(","):
            own = root / path.lstrip("/")
            folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return folders
