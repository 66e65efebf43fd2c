"""Replicas on GPUs: two that take turns on one give the tokens of an engine without a front."""

from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu

DEMO = str(Path(__file__).resolve().parents[2] / "nanovllm" / "demo_model")
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "num_kvcache_blocks": 64, "max_num_seqs": 16}


def test_two_replicas_on_one_gpu_give_the_tokens_of_one_engine() -> None:
    """In float32, where scores of other batches differ by rounding alone: up to a near tie in some long text."""
    prompts = [[3 + n % 5] * (20 + 7 * (n % 4)) + [5 + n, 9] for n in range(40)]
    params = [SamplingParams(temperature=n % 2, max_tokens=64, ignore_eos=True) for n in range(40)]
    found = []
    for extra in ({}, {"data_parallel_size": 2, "share_gpus": True}):
        with LLM(DEMO, **OPTIONS, **extra) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert sum(one == other for one, other in zip(*found, strict=True)) >= 38
