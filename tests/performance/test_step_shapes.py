"""Every batch finds a captured graph, none much larger than itself, and there are few enough of them to capture."""

from typing import Any

import pytest
import torch

from nanovllm.worker.cuda_graphs import (
    CHUNK_BUCKETS,
    MAX_CHUNK_ROWS,
    StepGraphs,
    StepShape,
    decode_buckets,
    mixed_decode_buckets,
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
    largest = max((size for size in CHUNK_BUCKETS if size <= max_tokens), default=0)
    lengths = [n for n in (1, 2, 15, 16, 17, 64, 65, 300, 512, 513, 1024, 1025, 5000) if n <= max_tokens]
    for decodes in range(max_num_seqs + 1):
        for tokens in lengths:
            for rows in {1, min(tokens, MAX_CHUNK_ROWS), min(tokens, MAX_CHUNK_ROWS + 1)}:
                shape = found.shape_for(decodes, rows, tokens)
                if rows > MAX_CHUNK_ROWS or tokens > largest:
                    assert shape is None
                else:
                    assert shape in found._shapes
                    assert shape.decode_rows >= decodes and shape.chunk_tokens >= tokens


def test_there_are_few_graphs(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int) -> None:
    """Each is captured when the engine starts. The largest comes first: the others find their memory in its."""
    shapes = graphs(monkeypatch, max_num_seqs)._shapes
    assert len(shapes) == len(set(shapes)) <= MOST_GRAPHS
    assert shapes[0] == StepShape(max_num_seqs, CHUNK_BUCKETS[-1])
