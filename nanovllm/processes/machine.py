"""Cores and memory that this process may use, by the machine, its affinity and its control groups. No torch."""

import os
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Number of cores that this process may use, by its affinity and the CPU quotas of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(int, _quotas())]))


def usable_memory() -> int:
    """Bytes of memory that this process may use: those of the machine, or the lowest limit of its control groups."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for limit, _ in _memory_limits())])


def available_memory() -> int:
    """Bytes of memory that are free for this process: of the machine, or the least that one of its control groups has
    left. Cached files count as free."""
    with open("/proc/meminfo") as lines:
        machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *(limit - taken for limit, taken in _memory_limits())])


def _memory_limits() -> list[tuple[int, int]]:
    """(limit, bytes used without cached files) of each control group of this process with a limit (versions 1 and
    2)."""
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
    """CPU quota of each control group of this process with a limit, in cores (versions 1 and 2)."""
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
    """Folders of this process's control groups of a controller, and of their parents."""
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
