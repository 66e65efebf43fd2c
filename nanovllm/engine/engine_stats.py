"""Gauges and counters of an engine."""

from dataclasses import dataclass, field

ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of EngineStats.iteration_tokens."""


@dataclass(frozen=True)
class EngineStats:
    """Gauges of an engine, and its counters since it started. Completions of n > 1 count one by one, their prompt
    once."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of the KV blocks that running completions hold, 0..1. A finished prompt that may still be a hit is free."""
    prompt_tokens: int = 0
    """Prompt tokens of requests that have begun, those found in the prefix cache included."""
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache, at the first admission of each request."""
    prefix_cache_hits: int = 0
    prefix_cache_state_misses: int = 0
    """Prompt tokens whose blocks the prefix cache had, but no state of the recurrent layers after them: computed anew.
    """
    num_preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Number of ended completions by finish reason."""
    iteration_tokens: tuple[int, ...] = ()
    """Histogram of steps by the tokens that they computed: a bucket up to each of ITERATION_TOKENS, and one above."""
    iteration_tokens_sum: int = 0
    spec_decode_num_drafts: int = 0
    """Number of times that drafts of a completion were verified."""
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    """Drafted tokens that were right."""
    spec_decode_accepted_per_pos: tuple[int, ...] = ()
    """Right ones by their place after the last token."""
    running_adapters: tuple[str, ...] = ()
    """Names of the adapters of running completions; of one that was removed or replaced meanwhile, its digest."""
    waiting_adapters: tuple[str, ...] = ()
    """Names of the adapters of completions that wait in an engine's queue."""
