"""A lock that serves threads in the order in which they ask."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class FairLock:
    """A lock that waiting threads get before its last owner gets it again. (A thread that steps in a loop asks again at
    once. It would win a plain lock every time, and the others would wait until it has finished everything.)"""

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._lock = threading.RLock()  # which knows by itself whose it is
        self._owner: int | None = None

    def __enter__(self) -> None:
        """Raises RuntimeError where this thread holds the lock already: it would wait for itself."""
        if self._owner == threading.get_ident():  # a signal's handler in mid-step, or load_weights' own iterable
            raise RuntimeError("this thread is already in a call of this engine")
        try:
            with self._next:
                self._lock.acquire()
                self._owner = threading.get_ident()
        except BaseException:  # of a signal's handler: nobody would give back what we may have got already
            if self._owner == threading.get_ident():
                self._owner = None
            with suppress(RuntimeError):  # it is not ours
                self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._owner = None
        self._lock.release()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Waits for the lock no longer than `seconds`, then goes ahead without it."""
        mine = [lock for lock in (self._next, self._lock) if lock.acquire(timeout=seconds / 2)]
        try:
            yield
        finally:
            for lock in mine:
                lock.release()
