"""An engine in this process: requests come in, are checked and queued; the loop (loop.py) computes them."""

from collections.abc import Generator
from contextlib import closing
from typing import Any

from nanovllm.engine.calls import CALLS
from nanovllm.engine.control import EngineControl
from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.loop import EngineLoop
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.request_book import RequestBook
from nanovllm.engine.step import Step
from nanovllm.engine.trace import Trace
from nanovllm.executor.protocol import Executor
from nanovllm.model_config import ModelConfig
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer


class LLMEngine:
    """Rank 0: a book of requests, a loop of steps over all ranks, and what changes these while they run. Token ids in,
    token ids out.

    add_request and abort may be called from any thread; what they ask for happens at the start of the next step. One
    thread at a time may step.
    """

    def __init__(
        self, executor: Executor, model_config: ModelConfig, tokenizer: Tokenizer, trace: Trace | None = None
    ) -> None:
        """`executor`: started; this engine closes it."""
        self.executor, self.config, self.model_config, self._trace = executor, executor.config, model_config, trace
        self.state = EngineState()
        self.loop = EngineLoop(executor, model_config, trace, self.state)
        self.scheduler = self.loop.scheduler
        self.book = RequestBook(self.config, model_config, tokenizer, self.scheduler.capacity_tokens, self.state)
        self.control = EngineControl(self.loop, self.book, self.state)
        self.tokenizer = tokenizer
        self.startup_seconds = 0.0
        self.owner, self.shares_weights = executor.owner, executor.shares_weights
        # What an Engine does and its loop and its control do for it; see Engine.
        loop, control = self.loop, self.control
        self.step, self.stats = loop.step, loop.stats
        self.has_unfinished_requests, self.is_busy = loop.has_unfinished_requests, loop.is_busy
        self.wait_for_work, self.wake, self.take_unreported = loop.wait_for_work, loop.wake, loop.take_unreported
        self.abort_all, self.resume = control.abort_all, control.resume
        self.notice_new_weights = control.notice_new_weights

    # -- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self, prompt: Prompt, params: SamplingParams, request_id: int | None = None,
        output_token_ids: list[int] | None = None,
    ) -> int:  # fmt: skip
        """Queues a request; returns its id. `request_id`: one that was reserved, for a request that was checked.
        `output_token_ids`: the output begins with these. From any thread.

        Raises ValueError as RequestBook.check does; QueueFull where max_queued_requests wait (reserved ids do not
        count).
        """
        args = prompt, params, request_id, output_token_ids
        return self.book.open(*args, num_waiting=lambda: self.loop.num_waiting, queue=self.loop.add)

    def abort(self, request_id: int) -> None:
        """Ends a request; its last StepOutput says "abort". Unknown and finished ids are ignored."""
        self.loop.abort([seqs] if (seqs := self.book.rows_of(request_id)) is not None else [])

    # -- calls --------------------------------------------------------------------------------------------------

    def call(self, name: str, **options: Any) -> Generator[Step, None, Any]:
        """Runs one of engine/calls.py; yields what requests gain where it needs steps. Returns its answer."""
        steps = CALLS[name].run(self, **options)
        if not isinstance(steps, Generator):
            return steps
        with closing(steps):
            while True:
                try:
                    next(steps)
                    self.loop.leave_unreported(self.step())
                    next(steps)  # what it waits for may be there, and no other thread need step before
                except StopIteration as end:
                    return end.value
                yield self.take_unreported()

    # -- the rest -----------------------------------------------------------------------------------------------

    @property
    def computed(self) -> tuple[int, int]:
        """See Engine.computed."""
        return self.loop.num_prefill_tokens, self.loop.num_decode_tokens

    def info(self) -> dict[str, Any]:
        """Facts about this engine for logs and benchmarks: devices, backends, kernels, versions."""
        return {**self.executor.info(), "startup_seconds": round(self.startup_seconds, 2)}

    def close(self) -> None:
        """Ends the workers and frees the devices. Does nothing the second time."""
        self.loop.close()
        self.book.close()
        if self._trace is not None:
            self._trace.close()
        self.executor.close()
