"""Every family of models against transformers, on tiny random checkpoints: logits, greedy tokens, and the same text
alone, in a crowd, in chunks, from the cache, preempted and on several ranks."""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import (
    AGAIN,
    ALTERNATING,
    CASES,
    GREEDY,
    NUM_TOKENS,
    OPTIONS,
    PROMPTS,
    SLIDING,
    TOLERANCE,
    WINDOW,
    Case,
    for_four_ranks,
    make_model,
    reference_logits,
    save,
    with_layers,
)
from observing import LogitRecorder, StepWitness
from programs import run_interpreted

from nanovllm import LLM, SamplingParams


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    """A family with two layers, where those are of all its kinds."""
    case = CASES[request.param]
    by_layer = any("layer" in name or "pattern" in name for name in (*case.entries, *(case.written or {})))
    has_two_kinds = case.entries.keys() >= ALTERNATING.keys() and not case.written
    by_layer &= not (has_two_kinds and case.entries["layer_types"] == ALTERNATING["layer_types"])
    return case if by_layer or "decoder_sparse_step" in case.entries else with_layers(case, 2)


TIGHT = {**OPTIONS, "num_kvcache_blocks": 5, "disable": ("async_scheduling", "lookahead")}
"""Blocks of 16 tokens, of which the prompts and their texts need six."""


def test_equals_transformers_alone_in_a_crowd_in_chunks_cached_and_preempted(case: Case, tmp_path: Path) -> None:
    model = make_model(case)
    expect_logits_of_transformers(model, save(model, case, tmp_path))


def expect_logits_of_transformers(model: Any, folder: Path) -> None:
    """Steps of nine tokens cut the longest prompt into chunks; the second round finds it in the cache. Blocks that
    windows have passed serve others soon where memory is tight: then an engine with room has the hits."""
    with LLM(str(folder), **OPTIONS) as llm:
        memory = llm.engine.scheduler.memory
        num_blocks = memory.row_blocks(len(PROMPTS[2]) + NUM_TOKENS) + memory.row_blocks(len(PROMPTS[1])) + 1
        has_windows = memory.window_blocks(1) > 0
        if has_windows:
            num_cached, _ = compare_logits(llm, model)
            assert num_cached >= 16
    with LLM(str(folder), **{**TIGHT, **({"num_kvcache_blocks": num_blocks} if has_windows else {})}) as llm:
        num_cached, num_preempted = compare_logits(llm, model, once=has_windows)
        assert num_preempted > 0 and (num_cached >= 16 or has_windows)


def compare_logits(llm: LLM, model: Any, once: bool = False, greedy: SamplingParams = GREEDY) -> tuple[int, int]:
    """Returns how many tokens the last prompt found in the cache, and how many rows began again. once: in a crowd, but
    neither cached nor alone."""
    recorder, witness = LogitRecorder(llm), StepWitness().watch(llm)
    crowd = cached = llm.generate(PROMPTS, greedy, use_tqdm=False)
    alone: list[Any] = []
    if not once:
        cached = llm.generate(PROMPTS, replace(GREEDY, max_tokens=AGAIN), use_tqdm=False)
        alone = llm.generate(PROMPTS[1], replace(GREEDY, max_tokens=AGAIN), use_tqdm=False)
    for prompt, *outputs in zip(PROMPTS, crowd, cached, strict=True):
        outputs += alone if prompt == PROMPTS[1] else []
        theirs = reference_logits(model, prompt, outputs[0].token_ids)
        assert theirs.std(-1).min() > 0.05
        for output in outputs:
            count = len(output.token_ids)
            assert count in (NUM_TOKENS, AGAIN)
            ours = recorder.of(output.request_id, len(prompt), count)
            torch.testing.assert_close(ours, theirs[:count], **TOLERANCE)
            expect_best_tokens(theirs[:count], output.token_ids)
    return cached[-1].num_cached_tokens, witness.num_rows_after_preemption


@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
def test_states_in_bfloat16_stay_close(name: str, tmp_path: Path) -> None:
    """A state is rounded once a step: log-probabilities move by a hundredth or so, and mostly less."""
    case = CASES[name]
    model, params = make_model(case), replace(GREEDY, prompt_logprobs=0)
    folder = str(save(model, case, tmp_path))
    found = []
    for dtype in ("float32", "bfloat16"):
        with LLM(folder, **OPTIONS, state_dtype=dtype) as llm:
            lines = [line for line in llm.generate(PROMPTS[2], params, use_tqdm=False)[0].prompt_logprobs or [] if line]
            found.append(torch.tensor([entry.logprob for line in lines for entry in line.values()]))
    assert 0 < (found[0] - found[1]).abs().max() < 0.05


def test_models_without_states_take_no_options_of_states(tmp_path: Path) -> None:
    """LFM2's layers keep inputs, in lines, and no states."""
    conv = str(save(make_model(CASES["lfm2"]), CASES["lfm2"], tmp_path))
    given = ("demo", "state_dtype", "bfloat16"), ("demo", "num_state_lines", 8), (conv, "state_dtype", "bfloat16")
    for model, name, value in given:
        with pytest.raises(ValueError, match=f"^{name}={value!r}: must be .* for a model without recurrent"):
            LLM(model, device="cpu", skip_tokenizer_init=True, **{name: value})


@pytest.mark.parametrize("name", ["cohere2", "qwen3", "qwen3_moe"])
def test_a_step_that_ends_no_prompt_leaves_its_last_layer_after_the_keys(name: str, tmp_path: Path) -> None:
    """On a GPU kernels refuse to multiply no rows."""
    case, rows = CASES[name], []
    with LLM(str(save(make_model(case), case, tmp_path)), **OPTIONS) as llm:
        last = llm.engine.executor.runner.model.layers[-1]
        for module in (last.self_attn.o_proj, last.mlp):
            module.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[0]))
        llm.generate(PROMPTS[2], replace(GREEDY, max_tokens=1), use_tqdm=False)
    assert len(PROMPTS[2]) > 2 * OPTIONS["max_num_batched_tokens"] and rows == [1, 1]


def test_three_ranks_share_nine_heads(tmp_path: Path) -> None:
    """SmolLM2-135M's heads, with the norms and head_dim of others beside."""
    case = Case("Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 64})
    expect_tokens_of_transformers(case, tmp_path, tensor_parallel_size=3)


HEAD_DIMS = [(64, "Llama"), (80, "Qwen2"), (96, "Cohere2"), (128, "Olmo2"), (256, "Gemma2")]


@pytest.mark.parametrize(("head_dim", "config"), HEAD_DIMS)
def test_head_dims(head_dim: int, config: str, tmp_path: Path) -> None:
    """Of one layer; hidden_size / heads where the family has no entry for it."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 2 * head_dim}
    windows = {} if config in ("Llama", "Olmo2", "Qwen2") else {"sliding_window": WINDOW, "layer_types": [SLIDING]}
    case = Case(config, {**shape, **windows, "head_dim": head_dim})
    expect_tokens_of_transformers(case, tmp_path)


RANKS = (
    "llama", "qwen2, seven a group", "gemma2", "olmo2", "phi3", "cohere2",
    "qwen3_moe", "qwen2_moe", "granitemoe", "glm4_moe", "gpt_oss", "minimax_m2", "ernie4_5_moe", "granitemoeshared",
    "hunyuan_v1_moe", "olmoe", "dots1", "solar_open", "hy_v3", "exaone_moe", "laguna", "afmoe",
    "granite 4 without recurrent layers", "granite 4", "granite 4 without experts", "qwen3_next", "qwen3_5_moe",
    "olmo_hybrid", "lfm2", "lfm2_moe", "nemotron_h", "nemotron_h with latent experts", "gemma4", "gemma4, experts",
    "gemma4, keys of other layers and inputs of each", "deepseek_v2", "deepseek_v2, lite", "deepseek_v3",
    "deepseek_v3, queries of rows, not interleaved", "glm4_moe_lite", "mistral4",
)  # fmt: skip
SHARED_IN_WAYS_OF_THEIR_OWN = (
    "olmo2", "phi3", "glm4_moe", "gpt_oss", "laguna", "qwen3_next", "lfm2", "granite 4",
    "nemotron_h with latent experts", "gemma4, experts", "gemma4, keys of other layers and inputs of each",
    "deepseek_v2, lite",
)  # fmt: skip
"""Norms over all heads, projections packed in one tensor, shared experts, sinks by head, states by head, channel and
group, experts beside an MLP, inputs of single layers, rows of a cache that all heads share."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in SHARED_IN_WAYS_OF_THEIR_OWN)) for n in RANKS],
)
def test_two_ranks_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    expect_tokens_of_transformers(CASES[name], tmp_path, tensor_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_four_ranks_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    expect_tokens_of_transformers(for_four_ranks(CASES[name]), tmp_path, tensor_parallel_size=4)


def expect_tokens_of_transformers(case: Case, folder: Path, **options: Any) -> None:
    model = make_model(case)
    with LLM(str(save(model, case, folder)), **OPTIONS, **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expect_best_tokens(reference_logits(model, prompt, output.token_ids), output.token_ids)


def expect_best_tokens(logits: torch.Tensor, token_ids: list[int]) -> None:
    """Asserts that the best tokens were taken where their scores lead clearly; most do."""
    best = logits.topk(2)
    sure = best.values[:, 0] - best.values[:, 1] > 1e-3
    assert sure.sum() > len(sure) // 2
    assert torch.equal(torch.tensor(token_ids)[sure], best.indices[:, 0][sure])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gemma4", "gemma4, experts", "olmo3", "cohere2", "nemotron",
                                  "hunyuan_v1_dense", "qwen2_moe", "glm4_moe", "gpt_oss", "minimax_m2", "ernie4_5_moe",
                                  "laguna", "lfm2", "qwen3_5", "olmo_hybrid", "granite 4",
                                  "gemma4, keys of other layers and inputs of each", "deepseek_v2", "glm4_moe_lite",
                                  "mistral4"])
def test_triton_kernels_give_the_logits_of_transformers(name: str) -> None:
    """By Triton's interpreter: this file run as a script."""
    pytest.importorskip("triton")
    run_interpreted(__file__, (name,))


def serve_with_triton(case: Case) -> None:
    """Two layers with keys of their own and three tokens, for the interpreter is slow."""
    case = with_layers(case, 2 + case.entries.get("num_kv_shared_layers", 0))
    model, greedy = make_model(case), replace(GREEDY, max_tokens=3)
    options = {**OPTIONS, "attention_backend": "triton"}
    with tempfile.TemporaryDirectory() as folder, LLM(str(save(model, case, Path(folder))), **options) as llm:
        recorder = LogitRecorder(llm)
        outputs = llm.generate(PROMPTS[1:], greedy, use_tqdm=False)
    for prompt, output in zip(PROMPTS[1:], outputs, strict=True):
        ours = recorder.of(output.request_id, len(prompt), 3)
        torch.testing.assert_close(ours, reference_logits(model, prompt, output.token_ids), **TOLERANCE)


if __name__ == "__main__":
    serve_with_triton(CASES[sys.argv[1]])
