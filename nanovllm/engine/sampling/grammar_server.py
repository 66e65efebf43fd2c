"""Checks constraints: `python -m nanovllm.engine.sampling.grammar_server FD PARENT`, started by grammar_checks.py.

Each is compiled in a fork of this process, whose memory and CPU time the kernel bounds: the library has no bound of its
own on the states of an intersection, and a thread that computes them cannot be ended. A fork stays for the next check
unless it has grown. What takes long waits its turn behind others of its kind; what is quick does not wait for it.
"""

import os
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import NamedTuple, NoReturn

from nanovllm.engine.sampling.grammar_compiler import GrammarCompiler
from nanovllm.engine.sampling.grammar_limits import STACK_BYTES
from nanovllm.errors import short

MAX_MIB = 256
"""Maximum memory that a check may take beyond its stack and what this process has. The largest constraints that
grammar_limits.py lets in take 25."""
_MOST_GROWTH = 32 << 20
"""Bytes by which a fork may have grown if it is to stay."""
_LEAST_BYTES = 1 << 20
"""Memory of a compiled constraint, where it found room in what its fork had before."""
_LOOK_SECONDS = 0.5


class Verdict(NamedTuple):
    """Answer to a check."""

    number: int
    error: str | None = None
    """Reason why the constraint is refused; None: it may be compiled elsewhere."""
    is_lasting: bool = True
    """False: it may be right at another time."""
    num_bytes: int = 0
    """Memory that it took."""
    lane: int = 0
    """Index of the lane that it went through: of the quick or of the slow ones."""


class Job(NamedTuple):
    """A constraint to check."""

    number: int
    kind: str
    text: str


class Fork(NamedTuple):
    """A fork of this process, which takes (kind, text) and answers (error, bytes taken, whether it stays)."""

    process: int
    link: Connection


@dataclass
class Lane:
    """Checks of one kind: how many at once, for how long, and how many wait."""

    at_once: int
    seconds: float
    """CPU time of each."""
    most_waiting: int
    nice: int
    waiting: deque[Job] = field(default_factory=deque)
    idle: list[Fork] = field(default_factory=list)
    running: int = 0


class Run(NamedTuple):
    """A check at work."""

    job: Job
    fork: Fork
    lane: int
    deadline: float
    """Time (monotonic) at which it is killed: a fork that gets no CPU, or waits for something, ends as well."""


class Lanes:
    """All checks. One that takes too long among the quick ones begins anew among the slow ones."""

    def __init__(self, compiler: GrammarCompiler, answer: Callable[[Verdict], None]) -> None:
        self._compiler, self._answer = compiler, answer
        self._lanes = (Lane(4, 0.1, sys.maxsize, nice=0), Lane(1, 2.0, 8, nice=5))
        self.runs: dict[Connection, Run] = {}

    def put(self, job: Job, number: int = 0) -> None:
        """Queues a check in a lane."""
        lane = self._lanes[number]
        if len(lane.waiting) >= lane.most_waiting:
            self._answer(Verdict(job.number, f"{lane.most_waiting} others that take long are checked first", False))
        else:
            lane.waiting.append(job)

    def start(self) -> None:
        """Starts checks where there is room."""
        for number, lane in enumerate(self._lanes):
            while lane.waiting and lane.running < lane.at_once:
                job = lane.waiting.popleft()
                try:
                    fork = lane.idle.pop() if lane.idle else self._fork(lane)
                    fork.link.send((job.kind, job.text))
                except OSError as error:
                    self._answer(Verdict(job.number, f"no process can be made: {short(error)}", False))
                    continue
                lane.running += 1
                self.runs[fork.link] = Run(job, fork, number, time.monotonic() + 10 * lane.seconds)

    def _fork(self, lane: Lane) -> Fork:
        ours, theirs = Pipe()
        with theirs:
            process = os.fork()
            if process == 0:
                _work(self._compiler, lane, theirs)
        return Fork(process, ours)

    def end_late(self) -> None:
        """Ends the forks whose time is over; `collect` finds out."""
        for run in self.runs.values():
            if time.monotonic() > run.deadline:
                os.kill(run.fork.process, signal.SIGKILL)

    def collect(self, link: Connection) -> None:
        """Takes the answer of a fork that has one, or has ended."""
        job, fork, number, _ = self.runs.pop(link)
        lane = self._lanes[number]
        lane.running -= 1
        try:
            error, num_bytes, stays = link.recv()
        except (EOFError, OSError):
            self._collect_dead(job, fork, number)
            return
        if stays:
            lane.idle.append(fork)
        else:
            _status(fork)
        self._answer(Verdict(job.number, error, True, num_bytes, number))

    def _collect_dead(self, job: Job, fork: Fork, number: int) -> None:
        status = _status(fork)
        if number == 0 and os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGKILL):
            self.put(job, 1)
            return
        most = f"{self._lanes[1].seconds:.0f} s of CPU time or {MAX_MIB} MiB of memory"
        self._answer(Verdict(job.number, f"it takes more than {most}"))


def _status(fork: Fork) -> int:
    """Exit status of a fork that ends."""
    fork.link.close()
    return os.waitpid(fork.process, 0)[1]


def _work(compiler: GrammarCompiler, lane: Lane, link: Connection) -> NoReturn:
    """Checks one constraint after the other. In a fork, which ends here."""
    with suppress(BaseException):
        os.closerange(3, link.fileno())  # those of other processes, whose ends must be seen
        os.closerange(link.fileno() + 1, link.fileno() + 64)
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=_check_all, args=(compiler, lane, link), daemon=True)
        thread.start()
        thread.join()
    os._exit(0)


def _check_all(compiler: GrammarCompiler, lane: Lane, link: Connection) -> None:
    base, stays = _bound_this_process(lane), True
    while stays:
        kind, text = link.recv()
        before, error = _resident(), None
        signal.setitimer(signal.ITIMER_PROF, lane.seconds)
        try:
            start = compiler.check(kind, text)
        except Exception as found:
            start, error = None, short(found)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        taken = _resident() - before
        del start
        stays = _resident() - base < _MOST_GROWTH
        link.send((error, max(taken, _LEAST_BYTES), stays))


def _bound_this_process(lane: Lane) -> int:
    """Has the kernel end this process where it takes too much. Returns the bytes that it has in memory."""
    os.nice(lane.nice)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where the machine has no memory left, this goes first
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library says where it finds no memory
    most = _pages()[0] * resource.getpagesize() + (MAX_MIB << 20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return _resident()


def _pages() -> list[int]:
    """Pages of this process: of its address space, and in memory."""
    with open("/proc/self/statm") as file:
        return [int(pages) for pages in file.read().split()[:2]]


def _resident() -> int:
    """Bytes of this process in memory."""
    return _pages()[1] * resource.getpagesize()


def serve(link: Connection, parent: int) -> None:
    """Answers jobs until the other end is closed or its process is gone."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends a fork
    compiler = GrammarCompiler(*link.recv())
    link.send(None)
    lanes = Lanes(compiler, lambda verdict: link.send(tuple(verdict)))  # there this module has another name
    while os.getppid() == parent:  # another process may hold the other end open: a fork of the one that is gone
        for ready in wait([link, *lanes.runs], _LOOK_SECONDS):
            assert isinstance(ready, Connection)
            if ready is link:
                lanes.put(Job(*link.recv()))
            else:
                lanes.collect(ready)
        lanes.end_late()
        lanes.start()


def main(fd: int, parent: int) -> None:
    try:
        serve(Connection(fd), parent)
    except (EOFError, OSError):
        pass
    finally:
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # the forks too


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
