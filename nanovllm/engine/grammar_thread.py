"""Requests whose grammar is still to be compiled, which may take seconds."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Request = TypeVar("Request")


class GrammarThread(Generic[Request]):
    """Adds such requests to an engine, one after the other. Steps and other requests do not wait for them."""

    def __init__(self, add: Callable[[Request], None], abort: Callable[[int], None]) -> None:
        """`add`: compiles and queues a request, and raises nothing. `abort`: ends one by its id."""
        self._add, self._abort = add, abort
        self._waiting: set[int] = set()
        self._requests: queue.SimpleQueue[tuple[int, Request]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="nanovllm-grammars", daemon=True).start()

    def put(self, request_id: int, request: Request) -> None:
        """From any thread."""
        self._waiting.add(request_id)
        self._requests.put((request_id, request))

    def withdraw(self, request_id: int) -> bool:
        """Whether the request was not in the engine yet; then it is not computed, and nothing is said of it."""
        try:
            self._waiting.remove(request_id)
        except KeyError:
            return False
        return True

    def _run(self) -> None:
        while True:
            request_id, request = self._requests.get()
            if request_id in self._waiting:
                self._add(request)
                if not self.withdraw(request_id):  # another thread has done that meanwhile
                    self._abort(request_id)
