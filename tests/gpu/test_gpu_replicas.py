"""Replicas, and ranks without peer memory, that take turns on one GPU: they give the tokens of one engine."""

from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu

DEMO = str(Path(__file__).resolve().parents[2] / "nanovllm" / "demo_model")
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "num_kvcache_blocks": 64, "max_num_seqs": 16}
SHARED: list[dict[str, Any]] = [
    {"data_parallel_size": 2},
    {"tensor_parallel_size": 2, "enforce_eager": True, "disable": ("peer_all_reduce",)},
]


def test_those_who_share_a_gpu_give_the_tokens_of_one_engine() -> None:
    """In float32, where scores of other batches differ by rounding alone: up to a near tie in some long text."""
    prompts = [[3 + n % 5] * (20 + 7 * (n % 4)) + [5 + n, 9] for n in range(40)]
    params = [SamplingParams(temperature=n % 2, max_tokens=64, ignore_eos=True) for n in range(40)]
    found = []
    for extra in ({}, *SHARED):
        with LLM(DEMO, share_gpus=True, **OPTIONS, **extra) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    for others in found[1:]:
        assert sum(one == other for one, other in zip(found[0], others, strict=True)) >= 38

