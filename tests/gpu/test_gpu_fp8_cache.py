"""FP8 keys and values in bfloat16 on a GPU: kernels and graphs against plain PyTorch over the same kind of cache.

Two orders of bfloat16 sums give keys that are rounded to different e4m3 now and then, so the bound is what e4m3 itself
costs: the plain engine's distance from transformers in float32.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from near_ties import assert_parts_only_at_ties
from observing import LogitRecorder
from test_families import CASES, make_model, save
from test_gpu_families import GREEDY, KINDS, NUM_TOKENS, OPTIONS, PROMPTS, SHAPE, log_probs

from nanovllm import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PLAIN: dict[str, Any] = {"attention_backend": "torch", "disable": ("fused_kernels",), "enforce_eager": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {}, "few blocks": {"num_kvcache_blocks": 7, "disable": ("lookahead",)},
    "two ranks": {"tensor_parallel_size": 2},
}  # fmt: skip
NEAR = 0.7
"""Of e4m3's own error, root mean square."""


def scored(folder: str, **options: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Texts, and the log-probabilities [texts, NUM_TOKENS, vocab_size] that they were chosen by."""
    with LLM(folder, **{**OPTIONS, "kv_cache_dtype": "fp8", "enforce_eager": True, **options}) as llm:
        recorder = LogitRecorder(llm)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    lengths = zip(outputs, map(len, PROMPTS), strict=True)
    seen = [recorder.of(output.request_id, length, NUM_TOKENS) for output, length in lengths]
    return [output.token_ids for output in outputs], torch.stack([x.float().log_softmax(-1).cpu() for x in seen])


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_kernels_over_an_fp8_cache(kind: str, tmp_path: Path) -> None:
    case = replace(CASES[kind], entries={**CASES[kind].entries, **SHAPE, **KINDS[kind]})
    model = make_model(case)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.3)  # as large as in a model of a tenth of the width
    folder = str(save(model.to(torch.bfloat16), case, tmp_path))
    texts, plain = scored(folder, **PLAIN)
    cost = plain - log_probs(folder, torch.float32, texts)
    found, ours = scored(folder)
    compared = []
    for text, other, a, b in zip(texts, found, plain, ours, strict=True):
        same = next((n for n, pair in enumerate(zip(text, other, strict=True)) if pair[0] != pair[1]), NUM_TOKENS - 1)
        compared.append(a[: same + 1] - b[: same + 1])  # what the first different token was chosen by, too
    assert torch.cat(compared).square().mean().sqrt() <= NEAR * cost.square().mean().sqrt()
    assert_parts_only_at_ties(found, texts, plain, 2 * cost.abs().max(), 0.2)
    for options in SETTINGS.values():
        with LLM(folder, **{**OPTIONS, "kv_cache_dtype": "fp8", **options}) as llm:
            rounds = [llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(2)]
        for outputs in rounds:
            assert_parts_only_at_ties([output.token_ids for output in outputs], texts, plain, 2 * cost.abs().max(), 0.2)
