"""exact_bits: a request's log-probabilities are equal to the last bit, whatever its steps were; twins on a CPU.

The reference is each request alone, whole, without prefix cache, on one rank.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import make_model, save
from workload import LONGEST, ROOMY, Request, make_requests

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput

SHAPE: dict[str, Any] = {"hidden_size": 71, "intermediate_size": 200, "vocab_size": 301}
"""Odd sizes: padded columns, a vocabulary that no number of ranks divides, leaves of a few columns."""
CROWDS: dict[str, dict[str, Any]] = {
    "at once": {},
    "chunked and preempted": {
        "max_num_batched_tokens": 20, "num_kvcache_blocks": LONGEST // 16 + 2, "disable": ("lookahead",)},
}  # fmt: skip


OPTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 1.1, "top_p": 0.8, "min_p": 0.01}, {"temperature": 0.9, "frequency_penalty": 0.6}, {"top_k": 20}
]  # fmt: skip
"""Sampling options that requests take in turn: filters and penalties have sums of their own."""


def scored(index: int, request: Request) -> Request:
    return replace(
        request, params=replace(request.params, logprobs=2, prompt_logprobs=0, **OPTIONS[index % len(OPTIONS)])
    )


MADE = make_requests(vocab_size=SHAPE["vocab_size"])
REQUESTS = [scored(*each) for each in enumerate((*MADE[3:9], MADE[10]))]


def bits(tables: Sequence[Any]) -> list[dict[int, int]]:
    """The float32 patterns of log-probabilities, by position and token."""
    return [{} if table is None else {token: int(np.float32(entry.logprob).view(np.int32))
                                      for token, entry in table.items()} for table in tables]  # fmt: skip


def all_bits(output: RequestOutput) -> tuple[list[int], list[dict[int, int]], list[dict[int, int]]]:
    assert output.outputs[0].logprobs is not None and output.prompt_logprobs is not None
    return output.token_ids, bits(output.outputs[0].logprobs), bits(output.prompt_logprobs)


def assert_bits(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for output, one in zip(outputs, expected, strict=True):
        assert all_bits(output) == all_bits(one)


def generate(llm: LLM, requests: Sequence[Request]) -> list[RequestOutput]:
    return llm.generate([r.prompt for r in requests], [r.params for r in requests], use_tqdm=False)


def without_prompts(requests: Sequence[Request]) -> list[Request]:
    """Such that a prefix may come from the cache."""
    return [replace(r, params=replace(r.params, prompt_logprobs=None)) for r in requests]


def assert_rescored(llm: LLM, outputs: Sequence[RequestOutput]) -> None:
    """Asserts that sampled tokens, given as a prompt, get the bits that they were sampled with."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    whole = [Request(output.prompt_token_ids + output.token_ids, params) for output in outputs]
    for output, again in zip(outputs, generate(llm, whole), strict=True):
        assert output.outputs[0].logprobs is not None and again.prompt_logprobs is not None
        sampled = [{token: table[token]} for token, table in zip(output.token_ids, bits(output.outputs[0].logprobs),
                                                                  strict=True)]  # fmt: skip
        assert bits(again.prompt_logprobs)[len(output.prompt_token_ids) :] == sampled


class References:
    """Each request alone, by type and mode; made once."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options = folder, options
        self._made: dict[tuple[str, str], list[RequestOutput]] = {}

    def start(self, dtype: str, mode: str, **options: Any) -> LLM:
        return LLM(str(self.folder), **{**ROOMY, "dtype": dtype, "exact_bits": mode, **self.options, **options})

    def get(self, dtype: str, mode: str) -> list[RequestOutput]:
        if (dtype, mode) not in self._made:
            with self.start(dtype, mode, enable_prefix_caching=False) as llm:
                assert llm.engine_info()["exact_bits"] == mode
                found = self._made[dtype, mode] = [generate(llm, [request])[0] for request in REQUESTS]
                assert_rescored(llm, found)
        return self._made[dtype, mode]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(save(make_model(seed=3, **SHAPE), tmp_path_factory.mktemp("exact"), dtype=torch.bfloat16))


def nightly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(("dtype", "crowd"), [
    ("float32", "at once"), ("bfloat16", "chunked and preempted"), nightly("float32", "chunked and preempted"),
    nightly("bfloat16", "at once")])  # fmt: skip
def test_no_bit_depends_on_the_steps(references: References, dtype: str, crowd: str) -> None:
    assert_steps(references, dtype, crowd)


EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "vocab_size": SHAPE["vocab_size"], "moe_intermediate_size": 20,
    "num_experts_per_tok": 3, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 7, "norm_topk_prob": True},
    "Qwen2Moe": {"num_experts": 7, "shared_expert_intermediate_size": 28},
    "Glm4Moe": {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    "GptOss": {"num_local_experts": 5, "sliding_window": 24},
    "MiniMaxM2": {"num_local_experts": 6, "rotary_dim": 12},
    "Ernie4_5_Moe": {"moe_num_experts": 6, "moe_k": 3},
    "Laguna": {"num_experts": 6, "shared_expert_intermediate_size": 28, "sliding_window": 24},
}


@pytest.mark.parametrize("family", ["Qwen2Moe", *map(nightly, sorted(FAMILIES.keys() - {"Qwen2Moe"}))])
def test_no_bit_depends_on_the_steps_of_experts(family: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{family}Config")(**EXPERTS, **FAMILIES[family])
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(tmp_path)
    crowd = "chunked and preempted"
    tables = 2 if family == "GptOss" else 1  # a block is part of one: of full layers, or of those with windows
    blocks = tables * CROWDS[crowd]["num_kvcache_blocks"]
    assert_steps(References(tmp_path, load_format="dummy"), "float32", crowd, num_kvcache_blocks=blocks)


def assert_steps(references: References, dtype: str, crowd: str, **options: Any) -> None:
    alone = references.get(dtype, "batch")
    with references.start(dtype, "batch", **CROWDS[crowd] | options) as llm:
        outputs = generate(llm, REQUESTS)
        again = generate(llm, without_prompts(REQUESTS[::-1]))[::-1]
        assert crowd != "at once" or any(output.num_cached_tokens for output in again)
        assert_bits(outputs, alone)
        for second, expected in zip(again, alone, strict=True):
            assert second.outputs[0].logprobs is not None
            assert bits(second.outputs[0].logprobs) == all_bits(expected)[1]


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), nightly("bfloat16", 4), nightly("float32", 2)])
def test_no_bit_depends_on_the_ranks(references: References, dtype: str, size: int) -> None:
    alone = references.get(dtype, "tp")
    with references.start(dtype, "tp", tensor_parallel_size=size, max_num_batched_tokens=100) as llm:
        assert_bits(generate(llm, REQUESTS), alone)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_no_bit_depends_on_the_steps_of_several_ranks(references: References, dtype: str, size: int) -> None:
    with references.start(dtype, "batch", tensor_parallel_size=size, max_num_batched_tokens=24) as llm:
        alone = [generate(llm, [request])[0] for request in REQUESTS]
        assert_bits(generate(llm, REQUESTS), alone)


HEAD = {"method": "eagle3", "model": ".", "num_speculative_tokens": 3, "quantization": "fp8"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"exact_bits": "all"}, "exact_bits='all'"),
    ({"attention_backend": "flex"}, "attention_backend='flex'"),
    ({"kernel_choices": "some.json"}, "kernel_choices='some.json'"),
    ({"quantization": "fp8"}, "quantization='fp8'"),
    ({"speculative_config": HEAD}, "speculative_config: quantization='fp8': must be None with exact_bits='batch'"),
    ({"disable": "gemm_kernels"}, "disable='gemm_kernels'"),
    ({"model_impl": "transformers"}, "model_impl='transformers'"),
    ({"exact_bits": "tp", "tensor_parallel_size": 3}, "tensor_parallel_size=3"),
]


@pytest.mark.parametrize(("options", "named"), REFUSED)
def test_what_would_break_it_is_refused_by_name(references: References, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LLM(str(references.folder), **{**ROOMY, "exact_bits": "batch", **options})
