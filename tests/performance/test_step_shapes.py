"""Every batch finds a captured graph, none much larger than itself, and there are few enough of them to capture."""

from typing import Any

import pytest
import torch

from nanovllm.runner.cuda_graphs import StepGraphs
from nanovllm.wire.shapes import (
    LARGE_CHUNKS,
    MAX_CHUNK_ROWS,
    SMALL_CHUNKS,
    TILE,
    decode_buckets,
    fitting_chunk,
    mixed_decode_buckets,
    mixed_shapes,
)

LIMITS = [1, 2, 3, 7, 12, 100, 200, 256, 300, 512, 1000]
MOST_GRAPHS = 80


@pytest.fixture(params=LIMITS)
def max_num_seqs(request: pytest.FixtureRequest) -> int:
    limit: int = request.param
    return limit


def graphs(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, max_tokens: int = 16384) -> StepGraphs:
    """Uncaptured."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    anything: Any = None
    return StepGraphs(anything, max_num_seqs, max_tokens, anything)


@pytest.mark.parametrize("buckets", [decode_buckets, mixed_decode_buckets])
def test_buckets_ascend_to_the_limit(buckets: Any, max_num_seqs: int) -> None:
    sizes = buckets(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    assert sizes[0] == (0 if buckets is mixed_decode_buckets else 1)


def test_every_decode_batch_has_a_graph(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int) -> None:
    """Padding is less than the rows themselves, at most 7 up to 64 of them, at most a quarter above."""
    found = graphs(monkeypatch, max_num_seqs)
    for rows in range(1, max_num_seqs + 1):
        shape = found.shape_for(rows, 0, 0)
        assert shape in found._shapes and shape.chunk_tokens == 0
        padding = shape.decode_rows - rows
        assert 0 <= padding < max(rows, 2)
        assert padding <= (7 if rows <= 64 else rows / 4)


@pytest.mark.parametrize("max_tokens", [8, 16, 100, 512, 16384])
def test_mixed_steps_have_a_graph_or_are_large(
    monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, max_tokens: int
) -> None:
    """A step with chunks runs eagerly only where it has more of them, or more tokens, than any graph."""
    found = graphs(monkeypatch, max_num_seqs, max_tokens)
    shapes = mixed_shapes(max_num_seqs, max_tokens)
    lengths = [n for n in (1, 2, 15, 16, 17, 64, 65, 300, 512, 513, 1024, 1025, 5000) if n <= max_tokens]
    for decodes in range(max_num_seqs + 1):
        largest = max((shape.chunk_tokens for shape in shapes if shape.decode_rows >= decodes), default=0)
        for tokens in lengths:
            for rows in {1, min(tokens, MAX_CHUNK_ROWS), min(tokens, MAX_CHUNK_ROWS + 1)}:
                shape = found.shape_for(decodes, rows, tokens)
                if rows > MAX_CHUNK_ROWS or tokens > largest:
                    assert shape is None
                else:
                    assert shape in found._shapes
                    assert shape.decode_rows >= decodes and shape.chunk_tokens >= tokens
                    assert not any(
                        other.decode_rows >= decodes and other.chunk_tokens >= tokens and sum(other) < sum(shape)
                        for other in shapes
                    )


@pytest.mark.parametrize("chunk", LARGE_CHUNKS)
def test_the_chunks_that_the_scheduler_asks_for_fill_a_graph_to_whole_tiles(max_num_seqs: int, chunk: int) -> None:
    shapes = mixed_shapes(max_num_seqs, 16384)
    for decodes in range(max_num_seqs + 1):
        asked = fitting_chunk(decodes, chunk, max_num_seqs)
        assert chunk / 2 <= asked <= chunk + TILE / 2
        shape = next(s for s in shapes if s.decode_rows >= decodes and s.chunk_tokens >= asked)
        assert shape.chunk_tokens == asked and sum(shape) % TILE == 0


def test_there_are_few_graphs(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int) -> None:
    """Each is captured when the engine starts. The largest comes first: the others find their memory in its."""
    shapes = graphs(monkeypatch, max_num_seqs)._shapes
    assert len(shapes) == len(set(shapes)) <= MOST_GRAPHS
    assert sum(shapes[0]) >= LARGE_CHUNKS[-1]
    assert {shape.chunk_tokens for shape in shapes} >= {0, *SMALL_CHUNKS, *LARGE_CHUNKS}


def test_graph_memory_is_extrapolated_from_the_smaller_increment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library loads while the second graph is captured is not taken for every graph's."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    no_stream: Any = None
    graphs = StepGraphs(lambda shape: None, 8, 0, no_stream)
    assert [shape.decode_rows for shape in graphs.shapes] == [8, 4, 2, 1]
    monkeypatch.setattr(graphs, "_capture", lambda shape: None)
    used = iter([100, 400, 460, 463])
    assert graphs.measure(lambda: next(used)) == 300 + 60 + 3 + 3
