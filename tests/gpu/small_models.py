"""Small models of several families in bfloat16, and the log-probabilities of their greedy texts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from observing import LogitRecorder
from test_families import CASES, Case, make_model, save

from nanovllm import LLM, SamplingParams

DEVICE = "cuda"
NUM_TOKENS = 16
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


def make_checkpoint(kind: str, folder: Path, **entries: Any) -> str:
    """Of one of KINDS, with these entries of its configuration, or of another family of transformers."""
    case = CASES.get(kind, Case(kind, {}))
    case = replace(case, entries={**case.entries, **SHAPE, **KINDS.get(kind, {}), **entries})
    model = make_model(case)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.3)  # as large as in a model of a tenth of the width
    return str(save(model.to(torch.bfloat16), case, folder))


def eager_scores(folder: str, **options: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Our greedy texts, and the log-probabilities [texts, NUM_TOKENS, vocab_size] that they were chosen by."""
    with LLM(folder, **{**OPTIONS, "enforce_eager": True, **options}) as llm:
        recorder = LogitRecorder(llm)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    lengths = zip(outputs, map(len, PROMPTS), strict=True)
    seen = [recorder.of(output.request_id, length, NUM_TOKENS) for output, length in lengths]
    return [output.token_ids for output in outputs], torch.stack([x.float().log_softmax(-1).cpu() for x in seen])


def load_model(folder: str, dtype: torch.dtype) -> Any:
    """transformers', on the device."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=dtype, attn_implementation="eager").to(DEVICE).eval()


def log_probs(folder: str, dtype: torch.dtype, texts: list[list[int]]) -> torch.Tensor:
    """transformers', float32 [texts, NUM_TOKENS, vocab_size] on the CPU: where each output token is chosen."""
    return log_probs_of(load_model(folder, dtype), texts)


@torch.inference_mode()
def log_probs_of(model: Any, texts: list[list[int]]) -> torch.Tensor:
    """log_probs of a module that is there already."""
    found = []
    for prompt, text in zip(PROMPTS, texts, strict=True):
        logits = model(torch.tensor([prompt + text], device=DEVICE)).logits[0, len(prompt) - 1 : -1]
        found.append(logits.float().log_softmax(-1).cpu())
    return torch.stack(found)
