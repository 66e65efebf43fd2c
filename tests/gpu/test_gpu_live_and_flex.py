"""Paths other than the default, in bfloat16 on a GPU: modules of transformers, live ones beside their optimizer, and
other attention backends, by the noise bound of small_models.py."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from small_models import (
    DEVICE,
    GREEDY,
    NUM_TOKENS,
    OPTIONS,
    PROMPTS,
    assert_parts_only_at_ties,
    eager_scores,
    load_model,
    log_probs_of,
    make_checkpoint,
    references,
)

from nanovllm import LLM
from nanovllm.attention import flash_import

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

WINDOW, CAP, LAYERS = 50, 4.0, 4
MODELS_OWN = {
    "layer_types": ["sliding_attention"] * LAYERS, "sliding_window": WINDOW, "attn_logit_softcapping": CAP
}  # fmt: skip
NEITHER = {"hf_overrides": {"layer_types": ["full_attention"] * LAYERS, "attn_logit_softcapping": None}}
FUNCTIONS: dict[str, Any] = {
    "score_mod": lambda score, slot, head, query, key: CAP * torch.tanh(score / CAP),
    "mask_mod": lambda slot, head, query, key: query - key < WINDOW,
}


def bound_of(folder: str, texts: list[list[int]]) -> float:
    """Bound on differences of log-probabilities: twice what rounding makes in transformers'."""
    exact, theirs = references(folder, texts)
    return 2 * (theirs - exact).abs().max().item()


def test_a_window_and_a_softcap_given_to_flex_equal_the_models_own(tmp_path: Path) -> None:
    folder = make_checkpoint("gemma2", tmp_path, **MODELS_OWN)
    texts, ours = eager_scores(folder)
    bound = bound_of(folder, texts)
    found, scores = eager_scores(folder, attention_backend="flex", **NEITHER, **FUNCTIONS)
    assert (scores[:, 0] - ours[:, 0]).abs().max() <= bound
    assert_parts_only_at_ties(found, texts, ours, bound)
    _, scores = eager_scores(folder, **NEITHER)
    assert (scores[:, 0] - ours[:, 0]).abs().max() > bound, "neither matters here"


@pytest.mark.skipif(not flash_import.installed(), reason="needs flash-attn-4")
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_flash_attention_with_windows_caps_and_sinks(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)
    texts, ours = eager_scores(folder, attention_backend="triton")
    bound = bound_of(folder, texts)
    found, scores = eager_scores(folder, attention_backend="flash")
    assert (scores[:, 0] - ours[:, 0]).abs().max() <= bound
    assert_parts_only_at_ties(found, texts, ours, bound)


@pytest.mark.parametrize("kind", ["GPTNeoX", "gemma2"])
def test_modules_of_transformers_over_the_paged_cache(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)
    texts, ours = eager_scores(folder, model_impl="transformers")
    exact, theirs = references(folder, texts)
    assert (ours - exact).square().mean().sqrt() <= 1.5 * (theirs - exact).square().mean().sqrt()
    with LLM(folder, model_impl="transformers", **OPTIONS) as llm:
        alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in [*PROMPTS, PROMPTS[-1]]]
    assert alone[-1].num_cached_tokens >= 128
    found = [output.token_ids for output in alone[:-1]]
    assert_parts_only_at_ties(found, texts, ours, 2 * (theirs - exact).abs().max())


def greedy(model: Any) -> list[list[int]]:
    """Token ids of transformers' own generate, past the end of text."""
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    with torch.no_grad():
        ids = [model.generate(torch.tensor([prompt], device=DEVICE), **options) for prompt in PROMPTS]
    return [found[0, len(prompt) :].tolist() for prompt, found in zip(PROMPTS, ids, strict=True)]


@pytest.mark.parametrize(("kind", "fused"), [("llama", False), ("qwen3_moe", True)])
def test_a_step_of_the_optimizer_changes_what_it_changes_in_transformers(
    kind: str, fused: bool, tmp_path: Path
) -> None:
    model = load_model(make_checkpoint(kind, tmp_path), torch.bfloat16)
    optimizer, before = torch.optim.AdamW(model.parameters(), lr=0.003, fused=fused), None
    options = {name: OPTIONS[name] for name in ("skip_tokenizer_init", "num_kvcache_blocks", "max_num_seqs")}
    with LLM.from_module(model, **options) as llm:
        for _ in range(3):
            texts = greedy(model)
            assert texts != before
            scores = log_probs_of(model, texts)
            bound = 2 * (scores - log_probs_of(copy.deepcopy(model).float(), texts)).abs().max()
            found = [output.token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
            assert_parts_only_at_ties(found, texts, scores, bound)
            before, ids = texts, torch.tensor([PROMPTS[4]], device=DEVICE)
            model.train()(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()


def test_a_live_modules_parameters_are_not_held_twice() -> None:
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32768}
    config = transformers.LlamaConfig(**shape, num_attention_heads=16, num_key_value_heads=4)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    sizes, before = [parameter.nbytes for parameter in model.parameters()], torch.cuda.memory_allocated()
    options = {"num_kvcache_blocks": 4, "max_num_batched_tokens": 64, "max_num_seqs": 2}
    with LLM.from_module(model, skip_tokenizer_init=True, enforce_eager=True, **options) as llm:
        llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
        assert torch.cuda.memory_allocated() - before < 0.05 * sum(sizes)
        assert llm.engine_info()["copied_parameters"] == 0
