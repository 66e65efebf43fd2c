"""Watches a server from within: how long its event loop and its engine were held up, in CPU time, so that other work on
the machine does not count, and how long the loop waited for something. Imported by the processes that are watched; the
test reads the file that they map.

    python -c "import watching; watching.watch_front(); ..."
    python -m watching FD PARENT        an engine, see host/program.py; of SIMULATED_ENGINE, simulated_engine.py
"""

import asyncio
import mmap
import os
import signal
import socket
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
SLOW_START = 0.5
"""Seconds that a process takes to start, as where memory is short; of simulated engines alone."""
CALLBACK, LOOP, WAIT, ENGINE = range(4)
"""Places of the longest callback of the event loop (CPU seconds of its thread), of the longest time in which the
loop did nothing else (CPU seconds of its thread, and of that other thread which worked most: one at a time can hold the
loop up), of the longest wait in a callback (seconds in which its thread neither worked nor stood in line for a core: it
slept), and between two steps (CPU seconds of the engine)."""


class Watch:
    """The file."""

    def __init__(self, path: str | Path) -> None:
        if not Path(path).exists():
            Path(path).write_bytes(bytes(8 * 4))
        with open(path, "r+b") as file:
            self.longest = memoryview(mmap.mmap(file.fileno(), 8 * 4)).cast("d")

    def note(self, field: int, seconds: float) -> None:
        self.longest[field] = max(self.longest[field], seconds)

    def reset(self) -> None:
        for field in range(4):
            self.longest[field] = 0.0


def watch_front() -> None:
    """Runs the server in asyncio's own event loop, whose callbacks can be timed."""
    watch = Watch(os.environ[FILE])
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    scheduled = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115  # of the loop's thread
    run: Callable[[Any], None] = asyncio.events.Handle._run  # type: ignore[attr-defined]

    def in_line() -> float:
        """Seconds that the thread has stood in line for a core."""
        return int(os.pread(scheduled.fileno(), 64, 0).split()[1]) / 1e9

    def timed(handle: Any) -> None:
        begin, working, waiting = time.perf_counter(), time.thread_time(), in_line()
        run(handle)
        work = time.thread_time() - working
        watch.note(CALLBACK, work)
        watch.note(WAIT, time.perf_counter() - begin - work - (in_line() - waiting))

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
    if "SIMULATED_ENGINE" in os.environ:
        _start_slowly()


def _start_slowly() -> None:
    from nanovllm.host import handle

    start = handle.start_python

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(SLOW_START)
        return start(*arguments, **options)

    handle.start_python = slow


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


def _simulate(link: socket.socket) -> None:
    """Runs a simulated engine, which leaves its front and lingers where a signal asks for it."""
    from simulated_engine import simulate

    signal.signal(signal.SIGUSR1, lambda *_: (link.shutdown(socket.SHUT_RDWR), time.sleep(60)))
    simulate(link)
    os._exit(0)


if __name__ == "__main__":
    if "SIMULATED_ENGINE" in os.environ:
        _simulate(socket.socket(fileno=int(sys.argv[1])))
    _watch_engine()
    from nanovllm.host.program import main

    main(*map(int, sys.argv[1:3]))
