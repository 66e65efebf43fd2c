"""Watches a server from within: how long its event loop and its engine were held up, in CPU time, so that other work on
the machine does not count. Imported by the processes that are watched; the test reads the file that they map.

    python -c "import watching; watching.watch_front(); ..."
    python -m watching FD PARENT        an engine, see host/program.py
"""

import asyncio
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE = "NANOVLLM_TEST_WATCH"
"""Environment variable: the file."""
BEAT = 0.005
CALLBACK, LOOP, ENGINE = range(3)
"""Places of the longest callback of the event loop (CPU seconds of its thread), of the longest time in which the
loop did nothing else (CPU seconds of its thread, and of that other thread which worked most: one at a time can hold the
loop up), and between two steps (CPU seconds of the engine)."""


class Watch:
    """The file."""

    def __init__(self, path: str | Path) -> None:
        if not Path(path).exists():
            Path(path).write_bytes(bytes(24))
        with open(path, "r+b") as file:
            self.longest = memoryview(mmap.mmap(file.fileno(), 24)).cast("d")

    def note(self, field: int, seconds: float) -> None:
        self.longest[field] = max(self.longest[field], seconds)

    def reset(self) -> None:
        for field in (CALLBACK, LOOP, ENGINE):
            self.longest[field] = 0.0


def watch_front() -> None:
    """Runs the server in asyncio's own event loop, whose callbacks can be timed."""
    watch = Watch(os.environ[FILE])
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    run: Callable[[Any], None] = asyncio.events.Handle._run  # type: ignore[attr-defined]

    def timed(handle: Any) -> None:
        begin = time.thread_time()
        run(handle)
        watch.note(CALLBACK, time.thread_time() - begin)

    asyncio.events.Handle._run = timed  # type: ignore[attr-defined]
    start = asyncio.Runner.run

    def run_with_beat(runner: asyncio.Runner, main: Any) -> Any:
        loop = runner.get_loop()
        own = threading.get_ident()
        last = _thread_times()

        def beat() -> None:
            nonlocal last
            now = _thread_times()
            gained = {thread: seconds - last.get(thread, 0.0) for thread, seconds in now.items()}
            watch.note(LOOP, gained.pop(own) + max(gained.values(), default=0.0))
            last = now
            loop.call_later(BEAT, beat)

        loop.call_soon(beat)
        return start(runner, main)

    asyncio.Runner.run = run_with_beat  # type: ignore[method-assign, assignment]


def _thread_times() -> dict[int, float]:
    """CPU seconds of each of Python's threads, which take turns. (The threads of libraries wait for nobody's turn.)"""
    found = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            with suppress(OSError):  # it has ended
                found[thread.ident] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


def _watch_engine() -> None:
    from nanovllm.host.engine_host import EngineHost

    watch = Watch(os.environ[FILE])
    send = EngineHost._send_gained
    last = time.process_time()

    def noted(host: EngineHost, gained: Any) -> None:
        nonlocal last
        now = time.process_time()
        watch.note(ENGINE, now - last)
        last = now
        send(host, gained)

    EngineHost._send_gained = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    _watch_engine()
    from nanovllm.host.program import main

    main(*map(int, sys.argv[1:3]))
