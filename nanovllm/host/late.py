"""Requests that take long to check, beside the steps and the other requests."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class LateRequests:
    """Adds such requests to an engine, one after the other, in a thread of its own."""

    def __init__(self, name: str, add: Callable[[Any], None], abort: Callable[[int], None]) -> None:
        """`add`: checks and queues a request, and raises nothing. `abort`: ends one by its id."""
        self._add, self._abort = add, abort
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: dict[int, Future[None]] = {}

    def put(self, request_id: int, request: Any) -> None:
        """Queues a request. May be called from any thread."""
        added = self._waiting[request_id] = self._thread.submit(self._add, request)
        added.add_done_callback(lambda _: self._waiting.pop(request_id, None))

    def withdraw(self, request_id: int) -> bool:
        """Whether this call takes the request back before it is in the engine; then it is not computed."""
        added = self._waiting.pop(request_id, None)
        if added is None:
            return False
        if not added.cancel():  # it is being checked
            added.add_done_callback(lambda _: self._abort(request_id))
        return True
