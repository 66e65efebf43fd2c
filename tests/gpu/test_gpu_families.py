"""One family of each kind in bfloat16 on a GPU against transformers, by the noise bound of test_gpu_exactness.py:
windows that prompts cross, soft-caps, sinks, experts; eager and in graphs, alone, in crowds and on two ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from near_ties import assert_parts_only_at_ties
from observing import LogitRecorder
from test_families import CASES, make_model, save

from nanovllm import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

DEVICE = "cuda"
NUM_TOKENS = 16
NO_FARTHER, OUTLIER = 1.5, 3.0
"""As in test_gpu_exactness.py."""
SHAPE = {
    "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 320, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
SMALL_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 136}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 50, "query_pre_attn_scalar": 64},
    "qwen3_moe": {"num_experts": 32, **SMALL_EXPERTS},
    "qwen2_moe": {"num_experts": 20, **SMALL_EXPERTS, "shared_expert_intermediate_size": 200},
    "glm4_moe": {"n_routed_experts": 24, **SMALL_EXPERTS},
    # transformers reads swiglu_limit from 5.18 or so on; before it takes gpt-oss's own number, as here.
    "gpt_oss": {"num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 50, "swiglu_limit": 7.0},
}
PROMPTS = [[(37 * i * i + 11 * n) % 1021 for i in range(n)] for n in (1, 3, 17, 60, 128, 300, 520)]
OPTIONS: dict[str, Any] = {
    "device": DEVICE, "dtype": "bfloat16", "skip_tokenizer_init": True, "kvcache_block_size": 128,
    "num_kvcache_blocks": 64, "share_gpus": True, "max_num_seqs": 8, "max_num_batched_tokens": 512,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {}, "plain kernels": {"disable": ("fused_kernels",)}, "two ranks": {"tensor_parallel_size": 2}
}


@torch.inference_mode()
def log_probs(folder: str, dtype: torch.dtype, texts: list[list[int]]) -> torch.Tensor:
    """transformers', float32 [texts, NUM_TOKENS, vocab_size] on the CPU: where each output token is chosen."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=dtype, attn_implementation="eager").to(DEVICE).eval()
    found = []
    for prompt, text in zip(PROMPTS, texts, strict=True):
        logits = model(torch.tensor([prompt + text], device=DEVICE)).logits[0, len(prompt) - 1 : -1]
        found.append(logits.float().log_softmax(-1).cpu())
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_in_bfloat16(kind: str, tmp_path: Path) -> None:
    case = replace(CASES[kind], entries={**CASES[kind].entries, **SHAPE, **KINDS[kind]})
    model = make_model(case)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.3)  # as large as in a model of a tenth of the width
    folder = str(save(model.to(torch.bfloat16), case, tmp_path))
    with LLM(folder, **OPTIONS, enforce_eager=True) as llm:
        recorder = LogitRecorder(llm)
        crowd = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    texts = [output.token_ids for output in crowd]
    lengths = zip(crowd, map(len, PROMPTS), strict=True)
    seen = [recorder.of(output.request_id, length, NUM_TOKENS) for output, length in lengths]
    ours = torch.stack([logits.float().log_softmax(-1).cpu() for logits in seen])
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
