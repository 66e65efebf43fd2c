"""The key-value store where the ranks of one engine meet: a file without a name, which only they inherit.

A TCPStore would answer every user of this machine, and who writes to it chooses where activations go.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

_TIMEOUT = timedelta(seconds=300)  # for what is set late, but by a rank that lives
_OPEN_FILES = "/proc/self/fd"
_LOOK_INTERVAL = 0.01  # seconds between looks at the store: everybody is about to arrive


def open_store(fd: int) -> dist.FileStore:
    """Opens the store in an inherited file. It opens the file again for each access, by number: drop it before the
    number is closed, or it would find another file there."""
    path = f"{_OPEN_FILES}/{fd}"
    if not os.path.exists(path):  # torch would wait for it for minutes
        raise OSError("tensor_parallel_size: several ranks need /proc, which is not mounted here")
    return dist.FileStore(path, -1)


class WatchedStore(dist.Store):
    """A store whose waits also end when `check` raises: the rank that is waited for may have died on its way here."""

    def __init__(self, store: dist.Store, check: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._store: dist.Store | None = store
        self._check = check

    @property
    def unwatched(self) -> dist.Store:
        """Store without the checks, for threads that may outlive the interpreter."""
        if self._store is None:
            raise RuntimeError("this store is closed")
        return self._store

    def close(self) -> None:
        """Drops the store, even if others still hold this object."""
        self._store = None

    def set(self, key: str, value: str) -> None:
        self.unwatched.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.unwatched.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = (timeout or _TIMEOUT).total_seconds()
        deadline = time.monotonic() + seconds
        while not self.unwatched.check(keys):
            self._check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"no rank has set {', '.join(keys)} within {seconds:.0f} s")
            time.sleep(_LOOK_INTERVAL)
