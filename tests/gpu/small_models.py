"""Small models in bfloat16, the log-probabilities that their texts are drawn by, and what may differ.

Bfloat16 has no bound that could be known beforehand, so transformers gives it: its float32 model is the truth, and its
own bfloat16 model says how far from that a right computation ends up. Ours must be no farther, up to a factor. Two of
our runs may part only where the reference's best two scores are nearer than that noise.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from family_cases import CASES, Case, make_model, save
from observing import LogitRecorder
from workload import Request, run

from nanovllm import LLM, SamplingParams

DEVICE = "cuda"
NUM_TOKENS = 16
SHAPE = {
    "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 320, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
SMALL_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 136}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
_LATENTS = {
    "num_key_value_heads": 8, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_routed_experts": 24, **SMALL_EXPERTS,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 50, "query_pre_attn_scalar": 64},
    "qwen3_moe": {"num_experts": 32, **SMALL_EXPERTS},
    "qwen2_moe": {"num_experts": 20, **SMALL_EXPERTS, "shared_expert_intermediate_size": 200},
    "glm4_moe": {"n_routed_experts": 24, **SMALL_EXPERTS},
    "laguna": {
        "num_experts": 20, **SMALL_EXPERTS, "shared_expert_intermediate_size": 200, "sliding_window": 50,
        "num_attention_heads_per_layer": [8, 4, 16, 8],
    },
    # transformers reads rotary_dim from 5.18 or so on; before it takes the factor alone.
    "minimax_m2": {
        "num_local_experts": 24, "num_experts_per_tok": 4, "rotary_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
    "ernie4_5_moe": {"moe_num_experts": 20, "moe_k": 4, "moe_intermediate_size": 136},
    "granitemoeshared": {
        "num_local_experts": 16, "num_experts_per_tok": 4, "shared_intermediate_size": 200,
        "attention_multiplier": 0.125,  # else attention is so sharp that bfloat16 changes whole texts
    },
    # transformers reads swiglu_limit from 5.18 or so on; before it takes gpt-oss's own number, as here.
    "gpt_oss": {"num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 50, "swiglu_limit": 7.0},
    # Heads of recurrent layers as published: 128 x 128 of Qwen3.5, 64 of Mamba-2 with states of 128.
    "qwen3_5": _DELTA,
    "qwen3_5_moe": {**_DELTA, "num_experts": 32, **SMALL_EXPERTS, "shared_expert_intermediate_size": 200},
    "nemotron_h": {
        "mamba_num_heads": 16, "mamba_head_dim": 64, "n_groups": 4, "ssm_state_size": 128, "n_routed_experts": 24,
        **SMALL_EXPERTS, "moe_shared_expert_intermediate_size": 200,
    },
    "lfm2": {},
    "deepseek_v3": {**_LATENTS, "q_lora_rank": 256},
    "glm4_moe_lite": {**_LATENTS, "q_lora_rank": 192, "qk_nope_head_dim": 192, "v_head_dim": 256},
    "gemma4": {"head_dim": 256, "global_head_dim": 512, "num_key_value_heads": 2, "sliding_window": 50},
    "gemma4, experts": {  # of two layers: bfloat16 changes whole texts of four
        "global_head_dim": 128, "sliding_window": 50, "num_experts": 20, "top_k_experts": 4,
        "moe_intermediate_size": 136, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    },
}
PROMPTS = [[(37 * i * i + 11 * n) % 1021 for i in range(n)] for n in (1, 3, 17, 60, 128, 300, 520)]
OPTIONS: dict[str, Any] = {
    "device": DEVICE, "dtype": "bfloat16", "skip_tokenizer_init": True, "kvcache_block_size": 128,
    "num_kvcache_blocks": 128, "share_gpus": True, "max_num_seqs": 8, "max_num_batched_tokens": 512,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
NO_FARTHER, OUTLIER = 1.5, 3.0
"""Times the root mean square of transformers' own bfloat16 errors, and times their largest."""


def make_checkpoint(kind: str, folder: Path, **entries: Any) -> str:
    """Writes a checkpoint of one of KINDS, with these entries of its configuration, or of another family."""
    case = CASES.get(kind, Case(kind, {}))
    case = replace(case, entries={**case.entries, **SHAPE, **KINDS.get(kind, {}), **entries})
    model, factor = make_model(case), 0.3 * (512 / case.entries["hidden_size"]) ** 0.5
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)  # so that logits spread by a few units, whatever the width is
    return str(save(model.to(torch.bfloat16), case, folder))


def eager_scores(
    folder: str, crowds: Sequence[Sequence[Request]] = (), **options: Any
) -> tuple[list[list[int]], torch.Tensor]:
    """Our texts, one crowd after another (default: PROMPTS, greedy), and the log-probabilities that they were chosen
    by, float32 [texts, tokens, vocab_size] on the CPU."""
    crowds = crowds or [[Request(prompt, GREEDY) for prompt in PROMPTS]]
    with LLM(folder, **{**OPTIONS, "enforce_eager": True, **options}) as llm:
        recorder = LogitRecorder(llm)
        outputs = [output for crowd in crowds for output in run(llm, crowd)]
    seen = [recorder.of(one.request_id, len(one.prompt_token_ids), len(one.token_ids)) for one in outputs]
    return [output.token_ids for output in outputs], torch.stack([logits.log_softmax(-1) for logits in seen])


def load_model(folder: str, dtype: torch.dtype) -> Any:
    """transformers', on the device."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=dtype, attn_implementation="eager").to(DEVICE).eval()


def log_probs(
    folder: str, dtype: torch.dtype, texts: Sequence[list[int]], prompts: Sequence[list[int]] = PROMPTS
) -> torch.Tensor:
    """transformers', as eager_scores: where each output token is chosen.

    The model is loaded in `dtype`: casting it afterwards would round the rope table as well."""
    return log_probs_of(load_model(folder, dtype), texts, prompts)


def references(
    folder: str, texts: Sequence[list[int]], prompts: Sequence[list[int]] = PROMPTS
) -> tuple[torch.Tensor, torch.Tensor]:
    """log_probs in float32, which are exact, and in bfloat16."""
    return log_probs(folder, torch.float32, texts, prompts), log_probs(folder, torch.bfloat16, texts, prompts)


@torch.inference_mode()
def log_probs_of(
    model: Any, texts: Sequence[list[int]], prompts: Sequence[list[int]] = PROMPTS
) -> torch.Tensor:
    """log_probs of a module that is there already."""
    found = []
    for prompt, text in zip(prompts, texts, strict=True):
        logits = model(torch.tensor([prompt + text], device=DEVICE)).logits[0, len(prompt) - 1 : -1]
        found.append(logits.float().log_softmax(-1).cpu())
    return torch.stack(found)


def assert_no_farther(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> float:
    """Our log-probabilities are as near to the exact ones as transformers' are; returns the largest error of those."""
    error, noise = ours - exact, theirs - exact
    assert error.square().mean().sqrt() <= NO_FARTHER * noise.square().mean().sqrt()
    assert error.abs().max() <= OUTLIER * noise.abs().max()
    return noise.abs().max().item()


def assert_parts_only_at_ties(
    found: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], scores: torch.Tensor, bound: float | torch.Tensor
) -> None:
    """Each text is the reference's up to a token whose score is behind by at most `bound`; at least a fifth of the
    tokens are compared. `scores`: [texts, tokens, vocab_size]."""
    compared = 0
    for tokens, text, of_text in zip(found, texts, scores, strict=True):
        assert len(tokens) == len(text)
        part = next((n for n, (a, b) in enumerate(zip(tokens, text, strict=True)) if a != b), len(text))
        compared += part
        if part < len(text):
            assert of_text[part, text[part]] - of_text[part, tokens[part]] <= bound
    assert compared >= 0.2 * sum(map(len, texts))
