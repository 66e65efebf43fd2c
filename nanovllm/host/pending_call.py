"""A call that several engines work on, until all have answered or are lost."""

from collections.abc import Callable, Sequence
from typing import Any

from nanovllm.engine.calls import CALLS
from nanovllm.errors import ReplicaError
from nanovllm.host import wire

OnDone = Callable[["PendingCall"], None]


class InternalError(RuntimeError):
    """An internal error in a call; the engine's log has its traceback."""


class PendingCall:
    """A call and the answers to it."""

    def __init__(
        self, number: int, name: str, options: dict[str, Any], engines: Sequence[int], on_done: OnDone
    ) -> None:
        """`number`: of the call. `engines`: numbers of those that run it. `on_done`: called when the call has ended."""
        self.number, self.name, self.options, self.on_done = number, name, options, on_done
        self.spec = CALLS[name]
        self.waiting = set(engines)
        """Engines that have not answered."""
        self.relay_to: set[int] = set()
        """Engines to which the weights are passed on that another one receives."""
        self.answers: dict[int, wire.Answer] = {}

    @property
    def is_users_load(self) -> bool:
        """Whether it loads an adapter for a user: one that an engine had missed says which digest it must have."""
        return self.name == "load_adapter" and "digest" not in self.options

    def settle(self, number: int, answer: wire.Answer | None) -> bool:
        """Notes that an engine has answered, or is lost; returns whether the call has just ended."""
        if number not in self.waiting:
            return False
        self.waiting.discard(number)
        if answer is not None:
            self.answers[number] = answer
        return not self.waiting

    def result(self) -> Any:
        """Merges the engines' answers. Raises the first error among them."""
        answers = [self.answers[number] for number in sorted(self.answers)]
        for answer in answers:
            if answer.kind is not None:
                raise wire.KINDS.get(answer.kind, InternalError)(answer.message)
        if not answers:
            raise ReplicaError(f"{self.name}: every replica was lost meanwhile")
        return self.spec.merge([answer.value for answer in answers])
