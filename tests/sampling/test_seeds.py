"""A request's draws are its own: the same alone, in a crowd, preempted, chunked, cached, on 1, 2 and 4 ranks, and as
when this test was written. Every option that rows can have is among the requests."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from sampling_engines import Engines

from nanovllm import LLM, SamplingParams
from nanovllm.kernels import select_kernels
from nanovllm.outputs import RequestOutput

OPTIONS: list[dict[str, Any]] = [
    {"top_p": 0.8},
    {"top_k": 4},
    {"min_p": 0.05, "temperature": 1.5},
    {"top_k": 30, "top_p": 0.9, "temperature": 1.8},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"logit_bias": {300: 4.0, 320: 5.0}, "temperature": 1.3},
    {"bad_words": [" named", " a little"], "temperature": 1.2},
    {"allowed_token_ids": range(200, 900), "temperature": 1.2},
    {"logprobs": 3, "temperature": 1.1},
    {"min_tokens": 20, "stop_token_ids": [13], "temperature": 1.2},
    {},
    {"temperature": 0.0},
    {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 9}}, "top_p": 0.9},
]
TEXTS = ["Once upon a time there was a", "The capital of France is", "One windy day Zoë found a red kite on the hill. "]
MAX_TOKENS = 22

UNCHANGED = {
    0: [502, 549, 413, 477, 13, 483, 399, 290, 259, 604, 584, 320],
    1: [329, 342, 261, 13, 361, 312, 340, 488, 269, 77, 745, 11],
    2: [23, 735, 13, 1021, 21, 440, 220, 17, 301, 220, 19, 13],
    3: [831, 549, 413, 475, 13, 483, 399, 290, 259, 471, 782, 320],
    4: [329, 342, 261, 13, 361, 312, 340, 488, 269, 77, 745, 11],
    5: [16, 306, 220, 23, 301, 220, 24, 13, 1021, 282, 334, 298],
    6: [831, 557, 413, 477, 13, 483, 399, 290, 259, 795, 794, 260],
    7: [329, 342, 261, 13, 361, 312, 340, 488, 269, 77, 745, 11],
    8: [402, 783, 220, 318, 220, 482, 654, 340, 816, 258, 295, 295],
    9: [502, 549, 413, 481, 13, 483, 399, 290, 259, 795, 794, 260],
    10: [329, 342, 261, 757, 259, 391, 488, 269, 77, 745, 11, 220],
    11: [16, 306, 220, 19, 301, 220, 20, 13, 1021, 16, 16, 440],
    12: [855, 557, 413, 475, 13, 483, 399, 290, 259, 779, 780, 320],
    13: [58, 220, 22, 22, 22, 220, 11, 220, 23, 22, 220, 11],
}
"""First tokens of each request, drawn when this test was written."""


def requests() -> list[tuple[str, SamplingParams]]:
    base = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    params = [SamplingParams(**{**base, "seed": 40 + i, **options}) for i, options in enumerate(OPTIONS)]
    return [(TEXTS[i % 3] * (1 + i % 2), one) for i, one in enumerate(params)]


def run(llm: LLM, which: Sequence[int]) -> list[list[int]]:
    all_requests = requests()
    chosen = [all_requests[i] for i in which]
    outputs: list[RequestOutput] = llm.generate([t for t, _ in chosen], [p for _, p in chosen], use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    assert llm.engine.loop._num_sampling == 0
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(engines: Engines) -> list[list[int]]:
    llm = engines.get(disable=("async_scheduling",), enable_prefix_caching=False)
    return [run(llm, [i])[0] for i in range(len(OPTIONS))]


TIGHT = {"num_kvcache_blocks": 7, "disable": ("lookahead",)}
SETTINGS: dict[str, dict[str, Any]] = {
    "crowd": {},
    "synchronous": {"disable": ("async_scheduling",)},
    "chunked": {"max_num_batched_tokens": 16},
    "preempted": TIGHT,
    "preempted, chunked": {**TIGHT, "max_num_batched_tokens": 24, "max_num_seqs": 5},
    "two ranks": {"tensor_parallel_size": 2},
    "two ranks, preempted, chunked": {
        **TIGHT, "tensor_parallel_size": 2, "max_num_batched_tokens": 24, "max_num_seqs": 5,
    },
    "four ranks": {"tensor_parallel_size": 4},
}  # fmt: skip
NIGHTLY = ("preempted", "preempted, chunked", "two ranks", "four ranks")


@pytest.mark.parametrize(
    "options",
    [pytest.param(o, id=name, marks=[pytest.mark.slow] * (name in NIGHTLY)) for name, o in SETTINGS.items()],
)
def test_the_same_tokens(engines: Engines, alone: list[list[int]], options: dict[str, Any]) -> None:
    llm = engines.get(max_model_len=112, **options)
    everyone = list(range(len(OPTIONS)))
    assert run(llm, everyone) == alone
    assert run(llm, everyone[::-1]) == alone[::-1]  # from the prefix cache, in another order
    assert (llm.stats().num_preemptions > 0) == ("num_kvcache_blocks" in options)


def test_as_when_this_was_written(alone: list[list[int]]) -> None:
    assert {i: tokens[:12] for i, tokens in enumerate(alone)} == UNCHANGED


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_vocabulary_that_ranks_share_unevenly(engines: Engines, ranks: int) -> None:
    """Random weights, 301 tokens: padding between the shards is never drawn."""
    changes = {"vocab_size": 301, "eos_token_id": 300}
    random_weights = {"load_format": "dummy", "hf_overrides": changes, "skip_tokenizer_init": True}
    plain = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True}
    params = [
        SamplingParams(**{**plain, "seed": i, **options})
        for i, options in enumerate([*OPTIONS[:5], {"logprobs": 2}, {"min_tokens": 6, "ignore_eos": False}])
    ]
    prompts = [[7 * i + j for j in range(5)] for i in range(len(params))]
    found = []
    for size in (1, ranks):
        llm = engines.get(tensor_parallel_size=size, **random_weights)
        found.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]


def test_triton_kernels_serve_the_same(engines: Engines, alone: list[list[int]], device: torch.device) -> None:
    """The option sampler by Triton (its interpreter, where there is no GPU): the first tokens of every request."""
    pytest.importorskip("triton")
    llm = engines.get(max_num_seqs=16)
    sampler = llm.engine.executor.runner.option_sampler
    twins = sampler._kernels
    sampler._kernels = select_kernels(device, interpret=True)
    short = [(text, replace(params, max_tokens=3, min_tokens=min(params.min_tokens, 3))) for text, params in requests()]
    try:
        outputs = llm.generate([text for text, _ in short], [params for _, params in short], use_tqdm=False)
    finally:
        sampler._kernels = twins
    assert [output.token_ids for output in outputs] == [tokens[:3] for tokens in alone]
