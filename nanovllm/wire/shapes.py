"""The padded shapes of steps that are kept as CUDA graphs, and the chunk sizes that fill them.

The scheduler asks how many prompt tokens go well beside its decodes, the workers capture what it will ask for. A
GEMM works in tiles of 128 tokens or more, so the shapes of large steps are whole tiles in all, decodes included: 256
decodes come with 3,840 prompt tokens, where 4,096 would begin one more row of tiles in every GEMM.
"""

from typing import NamedTuple


class StepShape(NamedTuple):
    """The padded shape of a step: rows that decode, and prompt-chunk tokens (of at most MAX_PREFILL_ROWS rows)."""

    decode_rows: int
    chunk_tokens: int
    has_adapters: bool = False
    """Some rows have adapters."""


MAX_PREFILL_ROWS = 32
SMALL_CHUNKS = (16, 64, 128, 256)
LARGE_CHUNKS = (512, 1024, 2048, 4096)
"""Chunk sizes that the padded prompt tokens of a captured step are made of. Larger graphs would need much memory for
their activations a second time; such chunks keep the device busy while the host launches them kernel by kernel."""
QUIET_TOKENS = (256, 320)
"""Tokens, decodes included, of a step that lasts little longer than its decodes alone: reading the weights of a dense
model takes about as long as multiplying them by so many rows. The second where that is the end of all prompts."""
QUIET_DECODES = (32, 64, 128)
"""Padded decode rows of such steps."""
TILE = 128
"""Tokens of a tile."""


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Padded row counts of steps that only decode, ascending; the last is max_num_seqs, so every batch finds a graph.

    Fine where a step is short and a padding row would show, coarse where weights or KV dominate it.
    """
    sizes = [1, 2, 4, 8, 12, 16, *range(24, 65, 8), *range(80, 257, 16), *range(288, 513, 32)]
    sizes += range(576, max_num_seqs, 64)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def mixed_decode_buckets(max_num_seqs: int) -> list[int]:
    """Padded decode rows of steps that also compute prompt chunks: none, and quarters of max_num_seqs, by 64."""
    step = -(-max_num_seqs // 256) * 64
    return [0, *range(step, max_num_seqs, step), max_num_seqs]


def fitting_chunk(num_decode_rows: int, chunk: int, max_num_seqs: int) -> int:
    """Prompt tokens, about `chunk` (of LARGE_CHUNKS), that go with so many decodes: they fill the padded step that
    holds both to whole tiles."""
    padded = next(size for size in mixed_decode_buckets(max_num_seqs) if size >= num_decode_rows)
    if chunk >= 1024 and 2 * padded <= chunk:
        return chunk - padded
    return (padded + chunk + TILE // 2) // TILE * TILE - padded


def chunk_within(num_decode_rows: int, cap: int, max_num_seqs: int) -> int:
    """Prompt tokens, at most `cap`, that go with so many decodes. A few more than a captured shape holds would pad the
    step to one of twice as many."""
    if cap > LARGE_CHUNKS[-1]:
        return cap  # not captured, so at its exact size
    if cap < LARGE_CHUNKS[0]:
        return min(cap, SMALL_CHUNKS[-1])
    chunk = max(size for size in LARGE_CHUNKS if size <= cap)
    return min(cap, fitting_chunk(num_decode_rows, chunk, max_num_seqs))


def quiet_chunk(num_decode_rows: int, num_tokens_left: int, max_num_seqs: int) -> int | None:
    """Maximum prompt tokens that so many decodes hardly notice, where prompts have `num_tokens_left` to compute; None:
    these decodes are too many for that."""
    padded = next((size for size in QUIET_DECODES if num_decode_rows <= size < max_num_seqs), None)
    if padded is None:
        return None
    usual, last = (total - padded for total in QUIET_TOKENS)
    return last if num_tokens_left <= last else usual


def mixed_shapes(max_num_seqs: int, max_tokens: int) -> list[StepShape]:
    """Steps with up to `max_tokens` prompt tokens, those with fewest tokens in all first."""
    buckets = mixed_decode_buckets(max_num_seqs)
    shapes = {StepShape(rows, chunk) for rows in {0, max_num_seqs} for chunk in SMALL_CHUNKS}
    for rows in (rows for rows in QUIET_DECODES if rows < max_num_seqs):
        chunks = {*(chunk for chunk in SMALL_CHUNKS if rows + chunk < QUIET_TOKENS[0])}
        shapes |= {StepShape(rows, chunk) for chunk in chunks | {total - rows for total in QUIET_TOKENS}}
    shapes |= {StepShape(rows, fitting_chunk(rows, chunk, max_num_seqs)) for rows in buckets for chunk in LARGE_CHUNKS}
    return sorted((shape for shape in shapes if shape.chunk_tokens <= max_tokens), key=lambda s: (sum(s), s))
