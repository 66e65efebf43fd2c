"""What a trainer does to several replicas as one: the part of ReplicatedEngine that asks all of them."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.model_config import ModelConfig
from nanovllm.outputs import StepColumns
from nanovllm.replicas.inbox import Inbox
from nanovllm.replicas.link import ReplicaLink
from nanovllm.replicas.messages import Answer
from nanovllm.replicas.ranks import ReplicaRanks
from nanovllm.replicas.router import Router
from nanovllm.replicas.weights import buckets
from nanovllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch


class ReplicaControl(LLMEngine):
    """Between two steps, by the thread that may step; but abort_all, pause_steps and resume from any thread."""

    def __init__(
        self, links: Sequence[ReplicaLink], inbox: Inbox, router: Router, ranks: ReplicaRanks,
        model_config: ModelConfig, tokenizer: Tokenizer,
    ) -> None:  # fmt: skip
        super().__init__(ranks, model_config, tokenizer)  # type: ignore[arg-type]
        self._links: list[ReplicaLink | None] = list(links)
        self._events, self._router = inbox, router
        self._num_calls = 0
        self._answers: dict[ReplicaLink, Answer] = {}
        """To the last call."""
        self._weights_replaced = False
        self._falls_asleep = False
        """Whether a call of `sleep` is on its way."""
        self._lost: list[int] = []
        """Replicas to start again when the others are awake, and, where these have other weights than the checkpoint,
        when all weights come anew."""

    def _take_events_in(self, columns: StepColumns, waits: bool) -> None:
        raise NotImplementedError

    def _start_again(self, number: int) -> None:
        raise NotImplementedError

    def _send(self, number: int, message: Any) -> None:
        link = self._links[number]
        if link is not None:
            link.send(link.pack(message))

    def _send_all(self, message: Any) -> None:
        links = [link for link in self._links if link is not None]
        packed = links[0].pack(message) if links else None
        for link in links:
            link.send(packed)

    def _ask(self, method: str, *args: Any, weights: "Iterable[tuple[str, torch.Tensor]] | None" = None) -> list[Any]:
        """Calls a method of every replica's engine; returns what they return. What they gain until then is handed out
        by the next step. Raises what the first raises that does."""
        asked = [link for link in self._links if link is not None]
        self._num_calls += 1
        self._answers = {}
        self._send_all(("call", self._num_calls, method, args, weights is not None))
        try:
            for bucket in buckets(weights) if weights is not None else ():
                self._send_all(("bucket", bucket, None))
        except BaseException as error:
            self._send_all(("bucket", None, f"the weights ended: {type(error).__name__}"))
            self._await_answers(asked)
            raise
        if weights is not None:
            self._send_all(("bucket", None, None))
        self._await_answers(asked)
        answers = [self._answers[link] for link in asked if link in self._answers]
        for answer in answers:
            if answer.error is not None:
                raise answer.error(answer.text)
        return [answer.value for answer in answers]

    def _await_answers(self, asked: list[ReplicaLink]) -> None:
        while any(link in self._links and link not in self._answers for link in asked):
            self._take_events_in(self._unreported, waits=True)

    def begin_update(self, in_flight: str, partial: bool) -> None:
        """Of all weights, it waits for replicas to start that were lost since the update before."""
        self._check_update(in_flight)
        self._weights_replaced = True
        self._start_lost(weights_come=not partial)
        self._router.forget_cached()
        self._incomplete = "an update of the weights has begun and did not finish"
        self._ask("begin_update", in_flight, partial)

    def finish_update(self, version: int | None) -> None:
        """None computes with the new weights before all have them."""
        super().finish_update(version)
        self._send_all(("go_on",))

    def settle(self, then: Callable[[], None] = lambda: None) -> None:
        """In a pause: takes in what replicas are still computing. They do by themselves what follows."""
        if self.is_paused:
            self._ask("pause_steps")

    def reset_prefix_cache(self) -> None:
        """See LLM.reset_prefix_cache."""
        self._ask("reset_prefix_cache")
        self._router.forget_cached()

    def resume(self) -> None:
        """See EngineControl.resume."""
        super().resume()
        self._inbox.append(("resume", []))
        self.wake()

    def wake(self) -> None:
        """See EngineLoop.wake; also for a step that waits for replicas."""
        super().wake()
        self._events.put((None, None))

    def sleep(self, level: int, tags: Iterable[str] | None) -> int:
        """See LLM.sleep; the bytes of all replicas."""
        self._falls_asleep = True
        try:
            freed = super().sleep(level, tags)
        finally:
            self._falls_asleep = False
            self._start_lost()
        self._router.forget_cached()
        return freed

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """See LLM.wake_up."""
        super().wake_up(tags)
        self._start_lost()

    def _start_lost(self, weights_come: bool = False) -> None:
        """Those that were lost, once their time has come."""
        may_start = not (self.asleep or self._falls_asleep) and (weights_come or not self._weights_replaced)
        while may_start and self._lost:
            self._start_again(self._lost.pop())
