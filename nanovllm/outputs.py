"""What the engine hands back. Plain data, no torch."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RequestMetrics:
    """Moments of one request, in seconds of time.perf_counter()."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class StepOutput:
    """What one request gained in one step."""

    request_id: int
    new_token_ids: list[int]
    finished: bool = False
    finish_reason: str | None = None
    """"stop" (an end-of-text token), "length" (max_tokens, max_model_len or the whole KV cache) or "abort"."""


@dataclass
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass
class RequestOutput:
    """A finished request. The first completion's fields are also reachable as out.text or out["text"]."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache when the request was first scheduled."""
    metrics: RequestMetrics
    finished: bool = field(default=True)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    def __getitem__(self, name: str) -> Any:
        if isinstance(name, str) and not name.startswith("_") and hasattr(self, name):
            return getattr(self, name)
        raise KeyError(name)

    def keys(self) -> list[str]:
        """Names that out[name] accepts, so that dict(out) works."""
        names = ["request_id", "prompt", "prompt_token_ids", "text", "token_ids", "finish_reason"]
        return [*names, "num_cached_tokens", "metrics", "outputs"]
