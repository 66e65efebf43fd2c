"""The lock of turns: first come, first served, also when a signal's handler raises while a thread is getting it."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from system import wait_for
from threads import run_in_threads

from nanovllm.engine.fair_lock import FairLock


@pytest.mark.parametrize("after", [False, True], ids=["just before it is acquired", "just after"])
def test_an_exception_while_getting_it_leaves_it_free(after: bool) -> None:
    lock: Any = FairLock()
    inner = lock._lock

    def acquire() -> None:
        if after:
            inner.acquire()
        raise TimeoutError("an alarm")

    lock._lock = SimpleNamespace(acquire=acquire, release=inner.release)
    with pytest.raises(TimeoutError), lock:
        pass
    assert run_in_threads(lambda: lock._next.acquire(timeout=5), lambda: inner.acquire(timeout=5)) == [True, True]


def test_an_exception_after_it_was_got_leaves_it_free_for_its_own_thread_too() -> None:
    lock: Any = FairLock()
    plain = lock._next

    class Alarm:
        def __enter__(self) -> None:
            plain.acquire()

        def __exit__(self, *_: object) -> None:
            plain.release()
            lock._next = plain
            raise TimeoutError("an alarm")

    lock._next = Alarm()
    with pytest.raises(TimeoutError), lock:
        pass
    with lock:
        pass
    assert run_in_threads(lambda: lock._lock.acquire(timeout=5)) == [True]


def test_a_thread_that_asks_again_at_once_lets_those_that_wait_go_first() -> None:
    """As one does that steps in a loop."""
    lock, order = FairLock(), []

    def ask(name: str) -> None:
        with lock:
            order.append(name)

    other = threading.Thread(target=ask, args=("other",))
    with lock:
        other.start()
        wait_for(lock._next.locked, "thread that waits")
        with pytest.raises(RuntimeError, match="this thread is already in a call of this engine"):
            ask("itself")
    ask("again")
    other.join(5)
    assert order == ["other", "again"]
