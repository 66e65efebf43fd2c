"""FP8 keys and values: a request's tokens do not depend on neighbours, chunks, cache, preemption or ranks.

A key that another order of float32 sums moves across the border between two e4m3 is rare; what it does to a score is
within the bound of comparing.py for models of this size.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpoints import make_model, save
from comparing import Expected
from workload import BLOCK, LONGEST, ROOMY, Engines, assert_outputs, make_requests, run, tokens_alone

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.pointwise.kv_store import quantised_reference
from nanovllm.runner.model_runner import ModelRunner

REQUESTS = make_requests()
TIGHT: dict[str, Any] = {"num_kvcache_blocks": LONGEST // BLOCK, "disable": ("lookahead",)}


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    engines = Engines(**ROOMY, kv_cache_dtype="fp8")
    try:
        yield engines
    finally:
        engines.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(make_model(seed=1), tmp_path_factory.mktemp("fp8")))


@pytest.fixture(scope="module")
def expected(folder: str) -> list[Expected]:
    return tokens_alone(folder, REQUESTS, kv_cache_dtype="fp8")


@pytest.mark.parametrize(("options", "chunks", "preempts"), [
    ({}, False, False),
    ({"max_num_batched_tokens": BLOCK}, True, False),
    ({**TIGHT, "max_num_batched_tokens": 20}, True, True),
    pytest.param({"max_num_batched_tokens": 64, "tensor_parallel_size": 2}, True, False, marks=pytest.mark.slow),
], ids=["crowd", "chunks", "preempted", "two ranks"])  # fmt: skip
def test_tokens_are_those_of_a_request_alone(
    options: dict[str, Any], chunks: bool, preempts: bool, engines: Engines, folder: str, expected: list[Expected]
) -> None:
    """In one call, and on one rank in a second one that finds prompts in the prefix cache."""
    llm, witness = engines.get(folder, **options)
    assert llm.engine_info()["kv_cache_dtype"] == "float8_e4m3fn"
    for call in range(2 if llm.config.tensor_parallel_size == 1 else 1):
        outputs = run(llm, REQUESTS)
        assert_outputs(outputs, REQUESTS, expected, f"call {call}")
    assert any(output.num_cached_tokens for output in outputs)
    assert (witness.num_partial_chunks > 0) == chunks
    assert (witness.num_rows_after_preemption > 0) == preempts


def test_the_cache_holds_the_keys_and_values_of_a_wider_one(engines: Engines, folder: str) -> None:
    """Rounded: of the first layer, which no rounding of an earlier one reaches."""
    caches = []
    for options in ({}, {"kv_cache_dtype": "auto"}):
        with LLM(folder, **{**ROOMY, "kv_cache_dtype": "fp8", **options}) as llm:
            llm.generate([REQUESTS[9].prompt], SamplingParams(max_tokens=1), use_tqdm=False)
            runner: ModelRunner = llm.engine.executor.runner  # type: ignore[attr-defined]
            layer = runner.model.attention_layers()[0]
            caches.append((layer.cache.k, layer.cache.v, layer.cache.scales))
    (k8, v8, scales), (k, v, none) = caches
    assert none is None and scales is not None
    for number, (narrow, wide) in enumerate(((k8, k), (v8, v))):
        rounded, scale = quantised_reference(wide)
        assert wide.count_nonzero() > 1000
        assert torch.equal(scale, scales[..., number])
        assert (rounded.float() == narrow.float()).float().mean() > 0.9999


def test_twice_as_many_tokens_fit(folder: str) -> None:
    own = {"device": "cpu", "cpu_kvcache_gib": 0.01, "max_model_len": 256, "skip_tokenizer_init": True}
    with LLM(folder, dtype="bfloat16", **own) as wide:
        layout = wide.engine.executor.runner.state_memory.layout  # type: ignore[attr-defined]
        wide_blocks = wide.engine_info()["num_kvcache_blocks"]
    per_block = BLOCK * layout.token_bytes(torch.float8_e4m3fn)
    head_dim = layout.lanes[0].widths[0]
    assert per_block == BLOCK * layout.token_bytes(torch.bfloat16) * (head_dim + 2) // (2 * head_dim)
    with LLM(folder, kv_cache_dtype="fp8", **own) as llm:
        blocks = llm.engine_info()["num_kvcache_blocks"]
    assert isinstance(blocks, int) and isinstance(wide_blocks, int)
    assert blocks == int(0.01 * 2**30) // per_block and blocks > 1.8 * wide_blocks
