"""Work of an engine that one thread steps and others give to it."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from nanovllm.engine.step import Step
from nanovllm.errors import check_alive


class Work(ABC):
    """Tasks of other threads for the one that steps, and outputs that it has not handed out."""

    def __init__(self) -> None:
        self._work = threading.Condition()
        """Notified when something is asked for, and when the engine is closed."""
        self._inbox: deque[Any] = deque()
        self._unreported = Step()
        """Outputs collected between two steps; the next step hands them out."""
        self._closed = False
        self._error: BaseException | None = None
        """The error that ended this engine."""

    @abstractmethod
    def is_busy(self) -> bool:
        """See Engine.is_busy."""

    def ask(self, *tasks: Any) -> None:
        """Puts tasks into the inbox. From any thread."""
        with self._work:
            self._inbox += tasks
            self._work.notify_all()

    def take_unreported(self) -> Step:
        """Returns, once, the outputs that the next step would hand out beside its own."""
        gained, self._unreported = self._unreported, Step()
        return gained

    def leave_unreported(self, step: Step) -> None:
        """Leaves a step's outputs to the next one, or to take_unreported."""
        self._unreported.extend(step)

    def raise_failure(self) -> None:
        """Raises RuntimeError if this engine is closed or has failed."""
        check_alive(self._closed, self._error)

    def wait_for_work(self, timeout: float, or_until: Callable[[], bool] = lambda: False) -> bool:
        """See Engine.wait_for_work."""
        with self._work:
            return self._work.wait_for(lambda: self._closed or self.is_busy() or or_until(), timeout=timeout)

    def wake(self) -> None:
        """Lets a thread that waits for work look again. From any thread."""
        with self._work:
            self._work.notify_all()
