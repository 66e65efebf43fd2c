"""The lock of turns, when a signal's handler raises while a thread is getting it."""

import threading
from typing import Any

import pytest

from nanovllm.engine.fair_lock import FairLock


class Interrupted:
    """A lock; an exception comes just before or just after it is acquired."""

    def __init__(self, lock: Any, after: bool) -> None:
        self._lock, self._after = lock, after

    def acquire(self, *args: Any, **options: Any) -> bool:
        if self._after:
            self._lock.acquire()
        raise TimeoutError("an alarm")

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def is_free(lock: FairLock) -> bool:
    got: list[bool] = []

    def ask() -> None:
        with lock:
            got.append(True)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(5)
    return bool(got)


@pytest.mark.parametrize("after", [False, True])
def test_an_exception_while_getting_it_leaves_it_free(after: bool) -> None:
    lock = FairLock()
    inner = lock._lock
    lock._lock = Interrupted(inner, after)  # type: ignore[assignment]
    with pytest.raises(TimeoutError), lock:
        pass
    lock._lock = inner
    assert is_free(lock)
