"""Every batch finds a captured graph, none much larger than itself, and there are few enough of them to capture."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.config import EngineConfig
from nanovllm.kernels.plan.device import KNOWN
from nanovllm.kernels.plan.plan import Rules
from nanovllm.models.planned import rank_model
from nanovllm.models.registry import read_model_config
from nanovllm.runner.cuda_graphs import StepGraphs, largest_chunk
from nanovllm.wire.shapes import (
    LARGE_CHUNKS,
    MAX_PREFILL_ROWS,
    QUIET_TOKENS,
    SMALL_CHUNKS,
    TILE,
    chunk_within,
    decode_buckets,
    fitting_chunk,
    mixed_decode_buckets,
    mixed_shapes,
    quiet_chunk,
)

MOST_GRAPHS = 80
max_num_seqs = st.integers(1, 1024)


@pytest.fixture(autouse=True, scope="module")
def no_graph_pool() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        yield


def graphs(limit: int, max_tokens: int = 16384) -> StepGraphs:
    """Uncaptured."""
    anything: Any = None
    return StepGraphs(anything, limit, max_tokens, anything)


@given(max_num_seqs, st.data())
def test_every_decode_batch_has_a_graph(limit: int, data: st.DataObject) -> None:
    """Padding is less than the rows themselves, at most 7 up to 64 of them, at most a quarter above."""
    rows, found = data.draw(st.integers(1, limit)), graphs(limit)
    shape = found.shape_for(rows, 0, 0)
    assert shape in found.shapes and shape.chunk_tokens == 0
    padding = shape.decode_rows - rows
    assert 0 <= padding < max(rows, 2)
    assert padding <= (7 if rows <= 64 else rows / 4)


@given(max_num_seqs, st.integers(8, 16384), st.data())
def test_mixed_steps_have_the_smallest_graph_that_holds_them(limit: int, max_tokens: int, data: st.DataObject) -> None:
    """A step with prompt chunks runs eagerly only where it has more rows of them, or more tokens, than any graph."""
    decodes, tokens = data.draw(st.integers(0, limit)), data.draw(st.integers(1, max_tokens))
    rows = data.draw(st.integers(1, min(tokens, MAX_PREFILL_ROWS + 1)))
    holding = [
        shape
        for shape in mixed_shapes(limit, max_tokens)
        if shape.decode_rows >= decodes and shape.chunk_tokens >= tokens
    ]
    shape = graphs(limit, max_tokens).shape_for(decodes, rows, tokens)
    if rows > MAX_PREFILL_ROWS or not holding:
        assert shape is None
    else:
        assert shape in holding and sum(shape) == min(map(sum, holding))


@given(max_num_seqs, st.sampled_from(LARGE_CHUNKS), st.data())
def test_the_chunks_that_the_scheduler_asks_for_fill_a_graph_to_whole_tiles(
    limit: int, chunk: int, data: st.DataObject
) -> None:
    decodes = data.draw(st.integers(0, limit))
    asked = fitting_chunk(decodes, chunk, limit)
    assert chunk / 2 <= asked <= chunk + TILE / 2
    shape = next(s for s in mixed_shapes(limit, 16384) if s.decode_rows >= decodes and s.chunk_tokens >= asked)
    assert shape.chunk_tokens == asked and sum(shape) % TILE == 0


@given(max_num_seqs, st.integers(1, 8192), st.data())
def test_a_cap_of_the_users_does_not_pad_a_step_to_twice_its_tokens(
    limit: int, cap: int, data: st.DataObject
) -> None:
    decodes = data.draw(st.integers(1, limit))
    asked = chunk_within(decodes, cap, limit)
    assert cap / 4 <= asked <= cap
    if asked >= LARGE_CHUNKS[0] and (shape := graphs(limit).shape_for(decodes, 1, asked)) is not None:
        assert shape.chunk_tokens - asked <= TILE


@given(max_num_seqs, st.data())
def test_the_chunks_that_decodes_hardly_notice_fill_a_graph(limit: int, data: st.DataObject) -> None:
    decodes, left = data.draw(st.integers(1, limit)), data.draw(st.integers(1, 1024))
    asked = quiet_chunk(decodes, left, limit)
    if asked is not None:
        shape = next(s for s in mixed_shapes(limit, 16384) if s.decode_rows >= decodes and s.chunk_tokens >= asked)
        assert shape.chunk_tokens == asked >= 128
        assert sum(shape) == QUIET_TOKENS[0] or (sum(shape) == QUIET_TOKENS[1] and left <= asked)


@given(max_num_seqs)
def test_there_are_few_graphs(limit: int) -> None:
    """Each is captured when the engine starts. The largest comes first: the others find their memory in its."""
    shapes = graphs(limit).shapes
    assert len(shapes) == len(set(shapes)) <= MOST_GRAPHS
    assert sum(shapes[0]) >= LARGE_CHUNKS[-1]
    assert {shape.chunk_tokens for shape in shapes} >= {0, *SMALL_CHUNKS, *LARGE_CHUNKS}
    for sizes in (decode_buckets(limit), mixed_decode_buckets(limit)):
        assert sizes == sorted(set(sizes)) and sizes[-1] == limit


@pytest.mark.parametrize(("prefers_eager", "weights", "captured"), [
    (False, 8 * 10**9, True), (True, 8 * 10**9, False), (True, 6 * 10**8, True),
])  # fmt: skip
def test_long_prompts_of_large_models_are_left_to_a_backend_that_is_faster_eagerly(
    prefers_eager: bool, weights: int, captured: bool
) -> None:
    backend: Any = SimpleNamespace(prefers_eager_prompts=prefers_eager)
    found = graphs(256, largest_chunk(16384, backend, weights))
    assert (found.shape_for(0, 1, 4096) is not None) == captured
    assert found.shape_for(0, 1, 3000) is not None and found.shape_for(200, 1, 3000) is not None


@pytest.mark.parametrize(("name", "ranks", "captured"), [
    ("Qwen3-0.6B", 1, True), ("Qwen3-1.7B", 1, False), ("Qwen3-8B", 2, False), ("Qwen3-30B-A3B", 1, False),
    ("Qwen3-30B-A3B", 8, True),
])  # fmt: skip
def test_of_a_mixture_those_experts_keep_a_device_busy_that_a_token_chose(
    name: str, ranks: int, captured: bool
) -> None:
    config = EngineConfig(name, load_format="dummy", device="cuda", tensor_parallel_size=ranks)
    model = read_model_config(config)
    backend: Any = SimpleNamespace(prefers_eager_prompts=True)
    layers = rank_model(model, Rules(KNOWN[0], ranks), "bfloat16")
    found = graphs(256, largest_chunk(16384, backend, layers.num_weights))
    assert (found.shape_for(0, 1, 4096) is not None) == captured
