"""Odd shapes in bfloat16 on a GPU against transformers, by the noise bound of test_gpu_exactness.py: widths, groups and
vocabularies that no tile and no number of ranks divides. Most shapes are fixed, the others drawn from fixed seeds."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from near_ties import assert_parts_only_at_ties
from observing import LogitRecorder
from test_families import Case, make_model, save

from nanovllm import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

DEVICE = "cuda"
NUM_TOKENS = 12
NO_FARTHER, OUTLIER = 1.5, 3.0
"""As in test_gpu_exactness.py."""
COMPARED_SHARE = 0.2
LENGTHS = (1, 3, 17, 60, 128, 200, 300)
PREFIX = 150
"""Tokens that the last prompt shares with the one before it."""
OPTIONS: dict[str, Any] = {
    "device": DEVICE, "dtype": "bfloat16", "skip_tokenizer_init": True, "kvcache_block_size": 128,
    "num_kvcache_blocks": 64, "share_gpus": True, "max_num_seqs": 8, "max_num_batched_tokens": 192,
}  # fmt: skip
"""Few tokens a step, so that long prompts come in chunks beside decodes."""
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def shape(
    config: str, head_dim: int, group: int, kv_heads: int, hidden: int, intermediate: int, vocab: int
) -> tuple[str, dict[str, Any]]:
    """The family and its configuration, of two layers; `group` query heads read each key/value head."""
    return config, {
        "head_dim": head_dim, "num_attention_heads": group * kv_heads, "num_key_value_heads": kv_heads,
        "hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocab, "num_hidden_layers": 2,
        "max_position_embeddings": 1024, "tie_word_embeddings": False,
    }  # fmt: skip


def random_shape(seed: int) -> tuple[str, dict[str, Any]]:
    rng = random.Random(seed)
    group, kv_heads = rng.randint(1, 16), rng.choice((2, 4))
    heads = group * kv_heads
    return shape(
        rng.choice(("Qwen3", "Llama")),
        head_dim=8 * rng.randint(2, 32),
        group=group,
        kv_heads=kv_heads,
        hidden=8 * heads * rng.randint(1, 1 + 80 // heads),  # transformers' Llama takes only multiples of its heads
        intermediate=rng.randint(150, 1500),
        vocab=rng.randint(600, 3000),
    )


SHAPES = {
    "72, three a group": shape("Qwen3", 72, 3, 2, 328, 1100, 1021),
    "80, seven a group": shape("Llama", 80, 7, 2, 560, 334, 1537),
    "96, one a group": shape("Qwen3", 96, 1, 6, 576, 333, 2003),
    "160, sixteen a group": shape("Llama", 160, 16, 2, 224, 701, 997),
    "256, five a group": shape("Qwen3", 256, 5, 2, 640, 1102, 1531),
    **{f"seed {seed}": random_shape(seed) for seed in (2, 3, 7)},
}


def make_checkpoint(config: str, entries: dict[str, Any], folder: Path) -> str:
    """In bfloat16, with weights that keep the logits' spread at a few units whatever the widths are."""
    model = make_model(Case(config, entries))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
    return str(save(model.to(torch.bfloat16), Case(config, entries), folder))


def make_prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(5)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]
    prompts[-1][:PREFIX] = prompts[-2][:PREFIX]
    return prompts


@torch.inference_mode()
def log_probs(folder: str, dtype: torch.dtype, prompts: list[list[int]], texts: list[list[int]]) -> torch.Tensor:
    """transformers', float32 [texts, NUM_TOKENS, vocab_size] on the CPU: where each output token is chosen.

    The model is loaded from its file in `dtype`: casting it afterwards would round the rope table as well."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=dtype, attn_implementation="eager").to(DEVICE).eval()
    found = []
    for prompt, text in zip(prompts, texts, strict=True):
        logits = model(torch.tensor([prompt + text], device=DEVICE)).logits[0, len(prompt) - 1 : -1]
        found.append(logits.float().log_softmax(-1).cpu())
    return torch.stack(found)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Log-probabilities of eager steps; then greedy tokens from graphs, in crowds, from the cache and alone, on one
    rank and on two."""
    config, entries = SHAPES[name]
    folder, prompts = make_checkpoint(config, entries, tmp_path), make_prompts(entries["vocab_size"])
    with LLM(folder, **OPTIONS, enforce_eager=True) as llm:
        recorder = LogitRecorder(llm)
        crowd = llm.generate(prompts, GREEDY, use_tqdm=False)
    texts = [output.token_ids for output in crowd]
    ours = torch.stack([
        recorder.of(output.request_id, len(prompt), NUM_TOKENS).log_softmax(-1)
        for output, prompt in zip(crowd, prompts, strict=True)
    ])
    exact, theirs = (log_probs(folder, dtype, prompts, texts) for dtype in (torch.float32, torch.bfloat16))
    noise, error = theirs - exact, ours - exact
    assert error.square().mean().sqrt() <= NO_FARTHER * noise.square().mean().sqrt()
    assert error.abs().max() <= OUTLIER * noise.abs().max()
    for ranks in (1, 2):
        with LLM(folder, **OPTIONS, tensor_parallel_size=ranks) as llm:
            assert (llm.engine_info()["cuda_graphs"] > 0) == (DEVICE == "cuda")
            rounds = [llm.generate(prompts, GREEDY, use_tqdm=False) for _ in range(2)]
            alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
        assert rounds[1][-1].num_cached_tokens > 0
        bound = 2 * noise.abs().max()
        for outputs in (*rounds, alone):
            assert_parts_only_at_ties([output.token_ids for output in outputs], texts, ours, bound, COMPARED_SHARE)
