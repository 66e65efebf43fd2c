"""Chunk sizes: how many prompt tokens a step takes beside decodes, which wait for these."""

from nanovllm.config import EngineConfig
from nanovllm.engine.sequence import Sequence
from nanovllm.wire.shapes import chunk_within, fitting_chunk, quiet_chunk

_LEAST, _MOST = 1024, 4096
"""Bounds of the default: where running requests and prompts wait for each other about as long, and where a larger chunk
gains nothing more. In between it doubles, and is changed a little so that chunk and decodes fill a captured shape
(wire/shapes.py)."""
_SHORT_PROMPT = 1024
"""Tokens. Where no more are left to compute, chunks are so small that decodes hardly notice; not at the end of a prompt
that had more, which has waited long enough."""

Chunk = tuple[Sequence, int]
"""A row and how many tokens of its prompt a step computes."""


def is_partial(chunk: Chunk) -> bool:
    """Whether the chunk leaves tokens of the prompt for later steps."""
    seq, count = chunk
    return count < seq.num_tokens_to_compute


def most_prompt_tokens(
    config: EngineConfig, is_dense: bool, num_decode_rows: int, num_waiting_tokens: int, prompts: list[Sequence],
    most_rows: int,
) -> int:  # fmt: skip
    """Maximum prompt tokens of a step with so many decodes. `is_dense`: see Scheduler. `prompts`: rows whose prompt is
    partly computed. `most_rows`: decodes that a step can have on the device."""
    if (cap := config.max_num_prefill_tokens_with_decodes) is not None:
        return chunk_within(num_decode_rows, cap, most_rows)
    high = _MOST
    if is_dense:
        left = num_waiting_tokens + sum(seq.num_tokens_to_compute for seq in prompts)
        longest = max((seq.num_tokens - seq.num_cached_tokens for seq in prompts), default=0)
        if max(left, longest) <= _SHORT_PROMPT:
            quiet = quiet_chunk(num_decode_rows, left, most_rows)
            if quiet is not None:
                return quiet
        if config.tensor_parallel_size == 1:  # more gains nothing: GEMMs are as fast
            high //= 2
    share = max(_LEAST, num_waiting_tokens // 8)
    chunk = min(high, 1 << (share.bit_length() - 1))
    return fitting_chunk(num_decode_rows, chunk, most_rows)
