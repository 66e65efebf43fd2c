"""The order in which processes see each other's writes to memory that they share."""

import threading


class Fence:
    """Called: orders all loads and stores before it against all after it, on any processor.

    A lock that is taken and released once lets both sides slip into its middle (Arm); the second time keeps them apart:
    what is before the first release, what is after the second acquire, and these two, stay in order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            pass
        with self._lock:
            pass
