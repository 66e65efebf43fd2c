"""The key-value store where the ranks of one engine meet while they start: on the loopback, on a port that was free."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

_TIMEOUT = timedelta(seconds=300)  # for what is set late, but by a rank that lives
_LOOK_INTERVAL = 0.01  # seconds between looks at the store: everybody is about to arrive


def open_store() -> dist.TCPStore:
    """A store whose server lives in this process. Its port is reachable from this machine alone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        return dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )


class WatchedStore(dist.Store):
    """A store whose waits also end when `check` raises: whoever we wait for may have died on its way here."""

    def __init__(self, store: dist.TCPStore, check: Callable[[], object]) -> None:
        super().__init__()
        self.unwatched = store
        self._check = check

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

    def check(self, keys: list[str]) -> bool:
        return self.unwatched.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self.unwatched.add(key, amount)
