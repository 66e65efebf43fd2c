"""The lock of turns, when a signal's handler raises while a thread is getting it."""

from types import SimpleNamespace
from typing import Any

import pytest
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
