"""What the engine hands back. Plain data, no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import numpy as np


@dataclass
class RequestMetrics:
    """Moments of one request, in seconds of time.perf_counter()."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    token_times: list[float] = field(default_factory=list, repr=False)
    """When each output token reached the host."""

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


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token at one position of a text."""

    logprob: float
    """Natural logarithm of its probability, from the raw logits in float32."""
    rank: int
    """1 for the likeliest token; equally likely tokens share the better rank where they were drawn or given."""
    decoded_token: str | None
    """The token's own text; None without a tokenizer. Half a character shows as U+FFFD."""


class LogprobRow(NamedTuple):
    """The token at one position and the likeliest ones there: a line of a step's table, taken apart when looked at."""

    token_id: int
    table: np.ndarray
    """int32 [lines, 2 + 2 k], each line as kernels/logprobs.py lays it out: log-probability of the token (float32
    bits), its rank, the k likeliest ids, their log-probabilities (float32 bits)."""
    line: int

    @property
    def logprob(self) -> float:
        return float(self.table[self.line, :1].view(np.float32)[0])

    @property
    def rank(self) -> int:
        return int(self.table[self.line, 1])

    def top(self, k: int) -> list[tuple[int, float]]:
        """The k likeliest ids and their log-probabilities."""
        words = self.table[self.line, 2:]
        middle = words.size // 2
        ids, logprobs = words[:k], words[middle : middle + k].view(np.float32)
        return list(zip(ids.tolist(), logprobs.tolist(), strict=True))


class LogprobsList(Sequence[dict[int, Logprob] | None]):
    """One dict of token id -> Logprob for each position, the position's own token first; built when it is looked at.

    None stands where there is nothing to say (the first token of a prompt).
    """

    def __init__(self, rows: Sequence[LogprobRow | None], k: int, decode: Callable[[int], str | None]) -> None:
        """`k`: likeliest tokens to show of each row. `decode`: token id -> its text."""
        self._rows, self._k, self._decode = rows, k, decode

    @property
    def total(self) -> float:
        """Sum of the log-probabilities of the positions' own tokens."""
        return sum(row.logprob for row in self._rows if row is not None)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, index: slice) -> "LogprobsList": ...
    def __getitem__(self, index: int | slice) -> "dict[int, Logprob] | LogprobsList | None":
        if isinstance(index, slice):
            return LogprobsList(self._rows[index], self._k, self._decode)
        row = self._rows[index]
        if row is None:
            return None
        found = {row.token_id: Logprob(row.logprob, row.rank, self._decode(row.token_id))}
        for place, (token_id, logprob) in enumerate(row.top(self._k), 1):
            if token_id not in found:
                found[token_id] = Logprob(logprob, place, self._decode(token_id))
        return found

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"LogprobsList({list(self)!r})"


@dataclass
class StepOutput:
    """What one completion of a request gained in one step."""

    request_id: int
    new_token_ids: list[int]
    finished: bool = False
    finish_reason: str | None = None
    """"stop" (an end-of-text token, stop_token_ids, a stop string or the end of a grammar), "length" (max_tokens,
    max_model_len or the whole KV cache) or "abort"."""
    index: int = 0
    """Which of the request's n completions; `finished` is about this one."""
    stop_reason: int | str | None = None
    """The stop string or the id of stop_token_ids that ended it; for "abort", why where there is a reason to give."""
    logprobs: LogprobsList | None = None
    """Of new_token_ids, where the request asks for them."""


@dataclass
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    """See StepOutput.stop_reason."""
    logprobs: LogprobsList | None = None
    metrics: RequestMetrics | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the output tokens' log-probabilities, where `logprobs` was asked for."""
        return None if self.logprobs is None else self.logprobs.total


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
    """Those of the first completion."""
    finished: bool = field(default=True)
    prompt_logprobs: LogprobsList | None = None
    """By prompt position, None for the first token; where the request asks for them."""

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
        return [*names, "num_cached_tokens", "metrics", "outputs", "prompt_logprobs"]
