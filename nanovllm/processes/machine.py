"""Cores and memory that this process may use: the machine's, its affinity's and its control groups'. No torch."""

import os
from contextlib import suppress
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
    return min([machine, *(limit for limit, _ in _memory_limits())])


def available_memory() -> int:
    """Bytes of memory that this process may take beside what is taken: of the machine, or the least that a control
    group of its leaves. What is cached of files counts as free."""
    with open("/proc/meminfo") as lines:
        machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *(limit - taken for limit, taken in _memory_limits())])


def _memory_limits() -> list[tuple[int, int]]:
    """(bytes allowed, bytes taken, but for files) of each control group of this process that has a limit (versions 1
    and 2)."""
    found = []
    for folder in _own_folders("memory"):
        names = ("memory.max", "memory.current", "")
        if (folder / "memory.limit_in_bytes").exists():
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        with suppress(OSError, ValueError, KeyError):  # no limit, or nothing that says what is taken
            limit = int((folder / names[0]).read_text())
            found.append((limit, 0))
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            files = sum(int(counts[f"{names[2]}{kind}_file"]) for kind in ("active", "inactive"))
            found[-1] = (limit, int((folder / names[1]).read_text()) - files)
    return found


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
