"""exact_bits: a request's log-probabilities are equal to the last bit, whatever its steps were; twins on a CPU.

The reference is each request alone, whole, without prefix cache, on one rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_model, save
from workload import LONGEST, ROOMY, Request, make_requests

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput

SHAPE: dict[str, Any] = {"hidden_size": 72, "intermediate_size": 200, "vocab_size": 301}
"""Odd sizes: padded columns, a vocabulary that no number of ranks divides, leaves of a few columns."""
CROWDS: dict[str, dict[str, Any]] = {
    "at once": {},
    "chunked and preempted": {
        "max_num_batched_tokens": 20, "num_kvcache_blocks": LONGEST // 16 + 2, "disable": ("lookahead",)},
}  # fmt: skip


def scored(request: Request) -> Request:
    return replace(request, params=replace(request.params, logprobs=2, prompt_logprobs=0))


REQUESTS = [scored(request) for request in make_requests(vocab_size=SHAPE["vocab_size"])[3:10]]


def bits(tables: Sequence[Any]) -> list[dict[int, int]]:
    """The float32 patterns of log-probabilities, by position and token."""
    return [{} if table is None else {token: int(np.float32(entry.logprob).view(np.int32))
                                      for token, entry in table.items()} for table in tables]  # fmt: skip


def all_bits(output: RequestOutput) -> tuple[list[int], list[dict[int, int]], list[dict[int, int]]]:
    assert output.outputs[0].logprobs is not None and output.prompt_logprobs is not None
    return output.token_ids, bits(output.outputs[0].logprobs), bits(output.prompt_logprobs)


def generate(llm: LLM, requests: Sequence[Request]) -> list[RequestOutput]:
    return llm.generate([r.prompt for r in requests], [r.params for r in requests], use_tqdm=False)


def without_prompts(requests: Sequence[Request]) -> list[Request]:
    """Such that a prefix may come from the cache."""
    return [replace(r, params=replace(r.params, prompt_logprobs=None)) for r in requests]


def assert_rescored(llm: LLM, outputs: Sequence[RequestOutput]) -> None:
    """What was sampled, given as a prompt, gets the bits that it was sampled with."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    whole = [Request(output.prompt_token_ids + output.token_ids, params) for output in outputs]
    for output, again in zip(outputs, generate(llm, whole), strict=True):
        assert output.outputs[0].logprobs is not None and again.prompt_logprobs is not None
        sampled = [{token: table[token]} for token, table in zip(output.token_ids, bits(output.outputs[0].logprobs),
                                                                  strict=True)]  # fmt: skip
        assert bits(again.prompt_logprobs)[len(output.prompt_token_ids) :] == sampled


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(seed=3, **SHAPE), tmp_path_factory.mktemp("exact"), dtype=torch.bfloat16)


def start(folder: Path, dtype: str, mode: str, **options: Any) -> LLM:
    return LLM(str(folder), **{**ROOMY, "dtype": dtype, "exact_bits": mode, **options})


@pytest.fixture(scope="module")
def alone(folder: Path, dtype: str) -> Iterator[dict[str, list[RequestOutput]]]:
    """The reference of each mode."""
    found = {}
    for mode in ("batch", "tp"):
        with start(folder, dtype, mode, enable_prefix_caching=False) as llm:
            found[mode] = [generate(llm, [request])[0] for request in REQUESTS]
            if mode == "batch":
                assert llm.engine_info()["exact_bits"] == "batch"
                assert_rescored(llm, found[mode])
    yield found


@pytest.mark.parametrize("crowd", list(CROWDS))
def test_no_bit_depends_on_the_steps(
    folder: Path, dtype: str, crowd: str, alone: dict[str, list[RequestOutput]]
) -> None:
    with start(folder, dtype, "batch", **CROWDS[crowd]) as llm:
        outputs = generate(llm, REQUESTS)
        again = generate(llm, without_prompts(REQUESTS[::-1]))[::-1]
        assert crowd != "at once" or any(output.num_cached_tokens for output in again)
        for output, second, expected in zip(outputs, again, alone["batch"], strict=True):
            assert all_bits(output) == all_bits(expected)
            assert second.outputs[0].logprobs is not None
            assert bits(second.outputs[0].logprobs) == all_bits(expected)[1]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_bit_depends_on_the_ranks(
    folder: Path, dtype: str, size: int, alone: dict[str, list[RequestOutput]]
) -> None:
    with start(folder, dtype, "tp", tensor_parallel_size=size, max_num_batched_tokens=100) as llm:
        for output, expected in zip(generate(llm, REQUESTS), alone["tp"], strict=True):
            assert all_bits(output) == all_bits(expected)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_no_bit_depends_on_the_steps_of_several_ranks(folder: Path, dtype: str, size: int) -> None:
    with start(folder, dtype, "batch", tensor_parallel_size=size, max_num_batched_tokens=24) as llm:
        alone = [generate(llm, [request])[0] for request in REQUESTS]
        for output, expected in zip(generate(llm, REQUESTS), alone, strict=True):
            assert all_bits(output) == all_bits(expected)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"exact_bits": "all"}, "exact_bits='all'"),
    ({"attention_backend": "flex"}, "attention_backend='flex'"),
    ({"kernel_choices": "some.json"}, "kernel_choices='some.json'"),
    ({"quantization": "fp8"}, "quantization='fp8'"),
    ({"disable": "gemm_kernels"}, "disable='gemm_kernels'"),
    ({"model_impl": "transformers"}, "model_impl='transformers'"),
    ({"exact_bits": "tp", "tensor_parallel_size": 3}, "tensor_parallel_size=3"),
]


@pytest.mark.parametrize(("options", "named"), REFUSED)
def test_what_would_break_it_is_refused_by_name(folder: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LLM(str(folder), **{**ROOMY, "exact_bits": "batch", **options})
