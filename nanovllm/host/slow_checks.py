"""Requests whose check is slow, such as those with a grammar to compile."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from nanovllm.host import wire


class SlowChecks:
    """Checks such requests in threads and adds them to an engine, which steps meanwhile."""

    def __init__(
        self, name: str, num_threads: int, add: Callable[[wire.Add], None], abort: Callable[[int], None]
    ) -> None:
        """`add`: checks and queues a request, and raises nothing. `abort`: ends one by its id."""
        self._add, self._abort = add, abort
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._waiting: dict[int, tuple[wire.Add, Future[None]]] = {}

    def put(self, request: wire.Add) -> None:
        """Queues a request."""
        number = request.request_id
        added = self._threads.submit(self._add, request)
        self._waiting[number] = request, added
        added.add_done_callback(lambda _: self._waiting.pop(number, None))

    @property
    def waiting(self) -> list[int]:
        """Ids of the requests that are not in the engine yet."""
        return list(self._waiting)

    def withdraw(self, request_id: int) -> wire.Add | None:
        """Takes a request back if it is not in the engine yet, and returns it; it will not be computed."""
        request, added = self._waiting.pop(request_id, (None, None))
        if added is not None and not added.cancel():  # it is being checked
            added.add_done_callback(lambda _: self._abort(request_id))
        return request
