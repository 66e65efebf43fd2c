"""Results of a step: the loop returns them, a host sends them, a fleet passes them on, a library or a server takes them
in. A row has one number everywhere: completion i of a request is row id + i. No torch, no numpy."""

import msgspec

from nanovllm.engine.engine_stats import EngineStats


class Finish(msgspec.Struct, array_like=True):
    """End of a completion, with its last token if this step computed one."""

    row: int
    token: int | None
    reason: str
    """See StepOutput.finish_reason."""
    stop_reason: int | str | None = None
    """See StepOutput.stop_reason."""
    weight_versions: list[tuple[int, int, int]] = []
    """See CompletionOutput.weight_versions; empty if all tokens are of version 0."""
    pooled: bytes | None = None
    """Embedding of the prompt, float32, of a model of embeddings."""


class Done(msgspec.Struct, array_like=True):
    """End of a request: all of its completions have ended. Times are those of the first completion, in seconds."""

    request_id: int
    num_cached_tokens: int = 0
    queued: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


class Step(msgspec.Struct, array_like=True, tag=True):
    """Results of one step, or of several: rows and tokens as two columns, and lists of what only some rows have. The
    fields from `logprobs` on are filled in where it is sent (host/engine_host.py)."""

    rows: list[int] = []
    tokens: list[int] = []
    finishes: list[Finish] = []
    done: list[Done] = []
    logprobs: list[tuple[int, bytes]] = []
    """(row, a line of LogprobRows), in the order of the row's tokens."""
    kept: list[tuple[int, bytes]] = []
    """(row, the ids (int32) that a token was sampled from), likewise, if sampling_mask asks for them."""
    prompts: list[tuple[int, list[bytes | None]]] = []
    """(request, a line of LogprobRows for each position of its prompt), sent once, with its first token or its end."""
    begun: list[tuple[int, int]] = []
    """(request, tokens of its prompt that were cached), likewise."""
    stats: EngineStats | None = None
    """Counters of the engine, sent about ten times a second and whenever a completion ends."""
    computed: tuple[int, int] = (0, 0)
    """Prompt tokens and decoded tokens computed since the start; sent with stats."""

    def __bool__(self) -> bool:
        return bool(self.rows or self.finishes)

    @property
    def numbers(self) -> list[int]:
        """Rows that gained something."""
        return [*self.rows, *(end.row for end in self.finishes)]

    def extend(self, other: "Step") -> None:
        """Appends another step's tokens and ends."""
        self.rows += other.rows
        self.tokens += other.tokens
        self.finishes += other.finishes
        self.done += other.done


def aborted(request_id: int, n: int, why: str | None = None) -> Step:
    """Step that ends all n completions of a request as aborted."""
    rows = range(request_id, request_id + n)
    return Step(finishes=[Finish(row, None, "abort", why) for row in rows], done=[Done(request_id)])
