"""FP8 weights in bfloat16 on a GPU: tensor cores, CUDA cores, graphs, chunks and ranks against widened products.

Two orders of sums round an activation to different e4m3 numbers now and then, so the bound is what FP8 itself costs:
the widened engine's distance from transformers with the wide weights in float32. Texts of this random model part early
so: on a CPU, where one definition is computed in bfloat16 and in float32, a quarter of the tokens come before.
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
from nanovllm.layers import quantized

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {}, "few blocks": {"num_kvcache_blocks": 7, "disable": ("lookahead",)},
    "chunks": {"max_num_batched_tokens": 160}, "library": {"disable": ("gemm_kernels",)},
    "plain kernels": {"disable": ("fused_kernels",)}, "two ranks": {"tensor_parallel_size": 2},
}  # fmt: skip
COMPARED_SHARE = 0.05


def test_kernels_and_library_against_widened_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES["llama"], entries={**CASES["llama"].entries, **SHAPE, **KINDS["llama"]})
    model = make_model(case)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.3)  # as large as in a model of a tenth of the width
    folder = str(save(model.to(torch.bfloat16), case, tmp_path))
    options = {**OPTIONS, "quantization": "fp8"}
    with monkeypatch.context() as patch:
        patch.setattr(quantized, "supports_fp8", lambda device: False)
        with LLM(folder, **{**options, "enforce_eager": True}) as llm:
            recorder = LogitRecorder(llm)
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    lengths = zip(outputs, map(len, PROMPTS), strict=True)
    seen = [recorder.of(output.request_id, length, NUM_TOKENS) for output, length in lengths]
    texts = [output.token_ids for output in outputs]
    plain = torch.stack([x.float().log_softmax(-1).cpu() for x in seen])
    cost = plain - log_probs(folder, torch.float32, texts)
    for setting in SETTINGS.values():
        with LLM(folder, **{**options, **setting}) as llm:
            rounds = [llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(2)]
        bound = 2 * cost.abs().max()
        for found in rounds:
            assert_parts_only_at_ties([one.token_ids for one in found], texts, plain, bound, COMPARED_SHARE)
