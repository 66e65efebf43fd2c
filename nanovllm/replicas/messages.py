"""What a replica and its front say to each other; pickled, over a socket that only they hold."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nanovllm.config import EngineConfig
from nanovllm.logprobs import KeptIds
from nanovllm.outputs import EngineStats


@dataclass(frozen=True)
class Start:
    """The first message to a replica."""

    config: EngineConfig
    devices: str | None
    """CUDA_VISIBLE_DEVICES of the replica; None: as inherited."""
    num_threads: int | None
    """Of torch, for all ranks of a replica on a CPU together; None: as torch says."""

    def with_blocks(self, num_blocks: int | None) -> "Start":
        """With as many KV blocks as were counted on, where the replica takes the place of one that was lost."""
        return self if num_blocks is None else replace(self, config=replace(self.config, num_kvcache_blocks=num_blocks))


@dataclass(frozen=True)
class Ready:
    """The first answer."""

    config: EngineConfig
    """With nothing left open."""
    num_kvcache_blocks: int
    info: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """The last answer of a replica that cannot go on."""

    kind: type[Exception] | None
    """What to raise to the user for a mistake of theirs; None for everything else."""
    text: str


@dataclass(frozen=True)
class Refused:
    """A request that cannot be computed."""

    request_id: int
    text: str


@dataclass(frozen=True)
class Answer:
    """A call is over, and all that was gained before has been sent."""

    number: int
    """That of the call."""
    value: Any
    error: type[Exception] | None = None
    text: str = ""


class Completed(NamedTuple):
    """How a completion ended: outputs.Ending, without what the front counts itself."""

    reason: str
    stop_reason: int | str | None
    num_cached_tokens: int
    queued: float | None
    """Seconds in the replica's own queue."""
    prompt_words: list[Any] | None
    """A line of log-probabilities for each token of the prompt, where the request asks for them (logprobs.py)."""
    kept_ids: KeptIds | None


class Gained(NamedTuple):
    """outputs.StepColumns of one step."""

    columns: bytes
    """int64: request ids, then indices, then token ids."""
    ended: dict[int, Completed]
    scores: dict[int, Any]
    """By entry: the line of log-probabilities of the token."""


class Counted(NamedTuple):
    """The engine's counters: now and then, and before a Gained with which something ends."""

    num_prefill_tokens: int
    num_decode_tokens: int
    stats: EngineStats
