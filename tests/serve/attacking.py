"""Servers that are attacked beside a stream of another user, and how long that user was held up."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import watching
from serving import COMPLETIONS, ROOT, Server, ready_server

GAP = 0.1
"""CPU seconds in which the event loop, or the engine, may do nothing for others, on a machine that is not slow; and
seconds in which the loop may wait for something."""
TRIES = 3
"""Times that an attack may be tried: what holds others up does so each time, a machine that others use too does not."""
MEMORY = 100
"""MiB that the front may grow by in an attack, and by all that it keeps."""
PLAIN = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}


class Attack(NamedTuple):
    """An attack on a server, and what it may hold up."""

    run: Callable[[Server], None]
    computes: bool = False
    """Whether the engine has long prompts to compute: then its steps take longer, as they may."""
    on_fleet: bool = False
    """Whether it is one on a server with two replicas and two keys."""


class Watched(NamedTuple):
    """A server, how long it was held up, the MiB that its front had when it was ready, and another user's key."""

    server: Server
    watch: watching.Watch
    memory: float
    key: str | None = None

    def suffer(self, attack: Attack) -> None:
        """Runs an attack beside a stream of another user, who must not be held up, and looks at the front's memory."""
        server, watch, memory, key = self
        Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
        before = peak(server)
        fields = (watching.CALLBACK, watching.LOOP, watching.WAIT, *(() if attack.computes else (watching.ENGINE,)))
        for attempt in range(TRIES):
            with another_user(server, key):
                watch.reset()
                attack.run(server)
            seconds = [watch.longest[field] for field in fields]
            if max(seconds) < GAP:
                break
            assert attempt + 1 < TRIES or max(seconds) < gap(), seconds
        assert peak(server) - before < MEMORY and before - memory < MEMORY


@contextmanager
def watched(
    folder: Path, *arguments: str, key: str | None = None, limits: Any = None, **options: Any
) -> Iterator[Watched]:
    """A server that is watched from within. Takes what ready_server takes, and another user's key."""
    watch = watching.Watch(folder / "watch")
    places = os.pathsep.join(map(str, (ROOT / "scripts", Path(__file__).parent)))
    env = {watching.FILE: str(folder / "watch"), "PYTHONPATH": places}
    patches = {"nanovllm.host.handle:MODULE": "watching", "nanovllm.serve.lifecycle:_DESCRIPTORS": 1}
    first = "import watching; watching.watch_front(); "
    with ready_server(folder, *arguments, env=env, limits=patches | (limits or {}), first=first, **options) as server:
        yield Watched(server, watch, peak(server), key)
        assert "Traceback" not in server.log


def gap() -> float:
    """GAP, and more where this machine takes more than 80 ms of its CPU for some work on 16 MB."""
    taken = []
    for _ in range(TRIES):
        begin = time.thread_time()
        (b"a,b," * (4 << 20)).translate(None, b",").split(b"a")
        taken.append(time.thread_time() - begin)
    return max(GAP, GAP * min(taken) / 0.08)


def peak(server: Server) -> float:
    """MiB that the front has had since this was reset."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@contextmanager
def another_user(server: Server, key: str | None) -> Iterator[None]:
    """Reads streams one after the other and asks for /health; both must go on."""
    begun, is_over = threading.Event(), threading.Event()

    def read(client: httpx.Client) -> None:
        while not is_over.is_set():
            with client.stream("POST", COMPLETIONS, json=PLAIN) as response:
                assert response.status_code == 200
                for _ in response.iter_bytes():
                    begun.set()
                    if is_over.is_set():
                        return

    def look(client: httpx.Client) -> None:
        while not is_over.wait(0.05):
            assert client.get("/health").json() == {"status": "ok"}

    with server.client(key) as client, ThreadPoolExecutor(2) as pool:
        both = [pool.submit(each, client) for each in (read, look)]
        assert begun.wait(20)
        client.get("/health")  # its connection is kept for the others
        try:
            yield
        finally:
            is_over.set()
        for each in both:
            each.result()


def descendants(process: int) -> float:
    """MiB in memory of all processes that a process has started, and these."""
    found = 0.0
    for child in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for each in map(int, child.read_text().split()):
                pages = Path(f"/proc/{each}/statm").read_text().split()[1]
                found += int(pages) * os.sysconf("SC_PAGE_SIZE") / (1 << 20) + descendants(each)
    return found
