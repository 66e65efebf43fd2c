"""One family of each kind in bfloat16 on a GPU against transformers, by the noise bound of test_gpu_exactness.py:
windows that prompts cross, soft-caps, sinks, experts; eager and in graphs, alone, in crowds and on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from near_ties import assert_parts_only_at_ties
from small_models import GREEDY, KINDS, OPTIONS, PROMPTS, eager_scores, log_probs, make_checkpoint

from nanovllm import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NO_FARTHER, OUTLIER = 1.5, 3.0
"""As in test_gpu_exactness.py."""
SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {}, "plain kernels": {"disable": ("fused_kernels",)}, "two ranks": {"tensor_parallel_size": 2}
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_in_bfloat16(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)
    texts, ours = eager_scores(folder)
    exact, theirs = (log_probs(folder, dtype, texts) for dtype in (torch.float32, torch.bfloat16))
    noise, error = theirs - exact, ours - exact
    assert error.square().mean().sqrt() <= NO_FARTHER * noise.square().mean().sqrt()
    assert error.abs().max() <= OUTLIER * noise.abs().max()
    for options in SETTINGS.values():
        with LLM(folder, **{**OPTIONS, **options}) as llm:
            rounds = [llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(2)]
            alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
        for outputs in (*rounds, alone):
            assert_parts_only_at_ties([output.token_ids for output in outputs], texts, ours, 2 * noise.abs().max(), 0.2)


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_steps_that_end_no_prompt(kind: str, quantization: str | None, tmp_path: Path) -> None:
    """Their last layer computes nothing after attention."""
    if (kind, quantization) == ("qwen3_moe", "int4"):
        pytest.skip("not served")
    options = {**OPTIONS, "quantization": quantization, "max_num_batched_tokens": 64}
    with LLM(make_checkpoint(kind, tmp_path), **options) as llm:
        outputs = [llm.generate(PROMPTS[-1], GREEDY, use_tqdm=False)[0] for _ in range(2)]
    assert outputs[1].num_cached_tokens > 0
    assert len(outputs[0].token_ids) == len(outputs[1].token_ids) == GREEDY.max_tokens
