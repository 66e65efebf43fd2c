"""Outputs of the engine: plain data, no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from nanovllm.logprobs import KeptIds, LogprobsList

if TYPE_CHECKING:
    import numpy as np


@dataclass
class RequestMetrics:
    """Moments of one request, in seconds of time.perf_counter()."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    token_times: list[float] = field(default_factory=list, repr=False)
    """Time at which each output token reached the host."""

    @property
    def queued(self) -> float | None:
        """Seconds from arrival to the first step that computes some of it."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between tokens, after the first."""
        times = self.token_times
        return None if len(times) < 2 else (times[-1] - times[0]) / (len(times) - 1)


class _ByName:
    """Base of dataclasses whose fields, and the properties of _MORE, are also reachable as out[name], and by
    dict(out)."""

    _MORE: ClassVar[tuple[str, ...]] = ()

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> tuple[str, ...]:
        """Names that out[name] accepts."""
        return (*vars(self), *self._MORE)


@dataclass
class StepOutput(_ByName):
    """Tokens that one completion of a request gained in one step."""

    request_id: int
    new_token_ids: list[int]
    finished: bool = False
    finish_reason: str | None = None
    """"stop" (an end-of-text token, stop_token_ids, a stop string or the end of a grammar), "length" (max_tokens,
    max_model_len or the whole KV cache) or "abort"."""
    index: int = 0
    """Number of the completion, 0 to n - 1; `finished` is about this one."""
    stop_reason: int | str | None = None
    """The stop string or the id of stop_token_ids that ended it; for "abort", why where there is a reason to give."""
    logprobs: LogprobsList | None = field(default=None, repr=False)
    """Log-probabilities of new_token_ids, if the request asks for them."""
    pooled: "np.ndarray | None" = field(default=None, repr=False)
    """Embedding of the prompt, float32 [hidden]; with `finished`, of a model of embeddings."""


@dataclass
class CompletionOutput(_ByName):
    """One continuation of a prompt."""

    _MORE = ("cumulative_logprob",)

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    """See StepOutput.stop_reason."""
    logprobs: LogprobsList | None = None
    metrics: RequestMetrics | None = None
    sampling_mask: KeptIds | None = None
    """Ids that each token was sampled from, if the request asks for them."""
    weight_versions: list[tuple[int, int, int]] = field(default_factory=list)
    """Weights that the tokens come from: (version, first token, end) in order; LLM.load_weights counts versions."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the output tokens' log-probabilities, where `logprobs` was asked for."""
        return None if self.logprobs is None else self.logprobs.total


@dataclass
class RequestOutput(_ByName):
    """A finished request. The first completion's text, token_ids and finish_reason are reachable here too. Every field
    is also reachable as out["text"]."""

    _MORE = ("text", "token_ids", "finish_reason")

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache when the request was first scheduled."""
    metrics: RequestMetrics
    """Metrics of the first completion."""
    finished: bool = field(default=True)
    prompt_logprobs: LogprobsList | None = None
    """Log-probabilities by prompt position, None for the first token; only if the request asks for them."""
    pooled: "np.ndarray | None" = field(default=None, repr=False)
    """Embedding of the prompt, float32 [hidden], of a model of embeddings; None where it was aborted."""

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first completion."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """Reason for which the first completion ended: "stop", "length" or "abort"."""
        return self.outputs[0].finish_reason
