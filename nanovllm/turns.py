"""Threads that take turns at one engine, and whose outputs each of them steps."""

import os
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from nanovllm.engine.fair_lock import FairLock
from nanovllm.engine.protocol import Engine
from nanovllm.engine.step import Step
from nanovllm.outputs import StepOutput
from nanovllm.terminal import interrupt_between_steps

_CLOSE_PATIENCE = 5.0  # seconds that close() lets another thread's step take to end


class Turns:
    """An engine that several threads use. All methods may be called from any thread: they take effect between two
    steps, and Ctrl-C waits for their end; a second one does not."""

    def __init__(self, engine: Engine, owner: object) -> None:
        """`owner`: object with which the engine is closed."""
        self.engine = engine
        self.step_lock = FairLock()
        self.foreign: list[StepOutput] = []
        """Outputs of add_request's requests while generate() was stepping; the next step() hands them out."""
        self.generating: set[int] = set()
        """Numbers of the rows of all requests of generate()."""
        self.ended: set[int] = set()
        """Requests of generate() whose completions have all ended, until their generate() takes them."""
        # Interpreter exit must not depend on when the owner is collected, nor keep it alive until then.
        self.close = weakref.finalize(owner, _close, engine, self.step_lock)
        self.close.atexit = True

    def require_open(self) -> None:
        """Raises RuntimeError where the engine is closed, or another process's."""
        if not self.close.alive:
            raise RuntimeError("this engine is closed")
        if os.getpid() != (owner := self.engine.owner):  # waiting for what is the owner's would never end
            raise RuntimeError(f"this engine is process {owner}'s: a fork of it cannot use it")

    @contextmanager
    def turn(self) -> Iterator[Engine]:
        """Context in which this thread alone has the engine."""
        self.require_open()
        with interrupt_between_steps(), self.step_lock:
            yield self.engine

    def call(self, name: str, **options: Any) -> Any:
        """Runs a call of engine/calls.py and returns its answer. If it waits for requests, other threads step
        meanwhile."""
        with closing(self.engine.call(name, **options)) as gained:
            while True:
                with self.turn():
                    try:
                        self.dispatch(next(gained))
                    except StopIteration as end:
                        self.dispatch(self.engine.take_unreported())
                        return end.value

    def take_ended(self, unfinished: set[int]) -> set[int]:
        """Takes out those of a generate()'s unfinished requests that have ended: once each, so that a step takes as
        long however many of a batch have. With the lock."""
        found = unfinished & self.ended
        self.ended -= found
        return found

    def dispatch(self, gained: Step) -> None:
        """Keeps the outputs of add_request's requests for step(), and drops those that have ended; notes which requests
        of any thread's generate() have ended."""
        self.foreign += (foreign := self.engine.book.outputs(gained, self.generating))
        for done in gained.done:
            if done.request_id in self.generating:
                self.ended.add(done.request_id)
            else:  # also one whose generate() was interrupted
                self.engine.book.forget(done.request_id)
        if foreign and self.generating:
            self.engine.wake()


def _close(engine: Engine, step_lock: FairLock) -> None:
    """Closes the engine between two steps of other threads, but does not wait long for a step that hangs."""
    with step_lock.within(_CLOSE_PATIENCE):
        engine.close()
