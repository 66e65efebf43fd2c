"""Interface that an LLM needs of an engine, whether the engine is here or elsewhere."""

from collections.abc import Callable, Generator
from typing import Any, Protocol

from nanovllm.config import EngineConfig
from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.engine_stats import EngineStats
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.request_book import RequestBook
from nanovllm.engine.step import Step
from nanovllm.model_config import ModelConfig
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer


class Engine(Protocol):
    """Token ids in, token ids out. One thread at a time steps and calls; the other methods may be called from any."""

    config: EngineConfig
    """Options, with nothing left open."""
    model_config: ModelConfig
    tokenizer: Tokenizer
    book: RequestBook
    """Requests of this engine."""

    @property
    def owner(self) -> int:
        """Id of the process that can use this engine; a fork of it cannot."""

    @property
    def shares_weights(self) -> bool:
        """Whether it computes with the weights of a module, whose owner writes to them."""

    @property
    def state(self) -> EngineState:
        """State of the engine that calls change."""

    @property
    def computed(self) -> tuple[int, int]:
        """Prompt tokens and decoded tokens that were computed since the start."""

    def add_request(
        self, prompt: Prompt, params: SamplingParams, request_id: int | None = None,
        output_token_ids: list[int] | None = None,
    ) -> int:  # fmt: skip
        """Queues a request; returns its id. `request_id`: one that was reserved, for a request that was checked.
        `output_token_ids`: the output begins with these."""

    def abort(self, request_id: int) -> None:
        """Ends a request; its last StepOutput says "abort". Unknown and finished ids are ignored."""

    def abort_all(self) -> list[int]:
        """Ends all requests that are unfinished now, with what they have; returns their ids."""

    def step(self) -> Step:
        """Runs a step and returns what requests gained."""

    def call(self, name: str, **options: Any) -> Generator[Step, None, Any]:
        """Runs one of engine/calls.py; yields what requests gain where it waits for them. Returns its answer."""

    def take_unreported(self) -> Step:
        """Returns, once, what a call has left to the next step to hand out."""

    def notice_new_weights(self, surely: bool = False) -> None:
        """See EngineControl.notice_new_weights."""

    def resume(self) -> None:
        """Ends a pause."""

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do or to report."""

    def is_busy(self) -> bool:
        """Whether a step would do or report anything now. False where all requests are held back."""

    def wait_for_work(self, timeout: float, or_until: Callable[[], bool] = lambda: False) -> bool:
        """Sleeps until a step has something to do, `or_until` is true after a `wake`, or the engine is closed; at most
        `timeout` seconds. Returns whether it was woken."""

    def wake(self) -> None:
        """Lets a thread that waits for work look again."""

    def stats(self) -> EngineStats:
        """Gauges of now, and counters since the start."""

    def info(self) -> dict[str, Any]:
        """Facts about this engine for logs and benchmarks: devices, backends, kernels, versions."""

    def close(self) -> None:
        """Ends what computes, and frees the devices. Does nothing the second time."""
