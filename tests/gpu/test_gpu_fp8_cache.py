"""FP8 keys and values in bfloat16 on a GPU: kernels and graphs against plain PyTorch over the same kind of cache.

Two orders of bfloat16 sums give keys that are rounded to different e4m3 now and then, so the bound is what e4m3 itself
costs: the plain engine's distance from transformers in float32.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import (
    GREEDY,
    NUM_TOKENS,
    OPTIONS,
    PROMPTS,
    assert_parts_only_at_ties,
    eager_scores,
    log_probs,
    make_checkpoint,
)

from nanovllm import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

FP8 = {"kv_cache_dtype": "fp8"}
PLAIN: dict[str, Any] = {"attention_backend": "torch", "disable": ("fused_kernels",)}
SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {}, "few blocks": {"num_kvcache_blocks": 7, "disable": ("lookahead",)},
    "two ranks": {"tensor_parallel_size": 2},
}  # fmt: skip
NEAR = 0.7
"""Bound as a share of e4m3's own error, root mean square."""


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_kernels_over_an_fp8_cache(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)
    texts, plain = eager_scores(folder, **FP8, **PLAIN)
    cost = plain - log_probs(folder, torch.float32, texts)
    found, ours = eager_scores(folder, **FP8)
    compared = []
    for text, other, a, b in zip(texts, found, plain, ours, strict=True):
        same = next((n for n, pair in enumerate(zip(text, other, strict=True)) if pair[0] != pair[1]), NUM_TOKENS - 1)
        compared.append(a[: same + 1] - b[: same + 1])  # what the first different token was chosen by, too
    assert torch.cat(compared).square().mean().sqrt() <= NEAR * cost.square().mean().sqrt()
    assert_parts_only_at_ties(found, texts, plain, 2 * cost.abs().max())
    for options in SETTINGS.values():
        with LLM(folder, **{**OPTIONS, **FP8, **options}) as llm:
            rounds = [llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(2)]
        for outputs in rounds:
            assert_parts_only_at_ties([output.token_ids for output in outputs], texts, plain, 2 * cost.abs().max())
