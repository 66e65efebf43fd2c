"""model_impl="transformers": unmodified modules of transformers over our paged cache, equal to transformers' own."""

import gc
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_cases import (
    AGAIN,
    CASES,
    EXPERTS,
    GREEDY,
    HEADS,
    NUM_TOKENS,
    OPTIONS,
    PROMPTS,
    SHAPE,
    TOLERANCE,
    WINDOW,
    Case,
    make_model,
    randomised,
    reference_logits,
    save,
)
from observing import LogitRecorder
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.models.registry import read_model_config

GEMMA4 = {
    "global_head_dim": 32, "sliding_window": WINDOW, "hidden_size_per_layer_input": 0, "num_hidden_layers": 6,
    "vocab_size_per_layer_input": 211, "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
FOREIGN = {
    "GPT-NeoX: parallel blocks, partial rope": Case("GPTNeoX", {"num_hidden_layers": 3}),
    "GPT-2: positions are learned": Case("GPT2", {"num_hidden_layers": 3}),
    "OPT: positions come from the mask where none are given": Case("OPT", {"ffn_dim": 52, "word_embed_proj_dim": 48}),
    "OLMo: norms without weights": Case("Olmo", {"clip_qkv": 0.5}),
    "StableLM: grouped heads": Case("StableLm", {"use_qkv_bias": True}),
    "DiffLlama: attends twice in a layer": Case("DiffLlama", {}),
    "Persimmon: attention without keywords": Case("Persimmon", {}),
    "Gemma 4: two sizes of heads, values from keys": Case(
        "Gemma4Text", {**HEADS, **GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    ),
    "Gemma 4 E: layers that read others' keys, embeddings of each layer": Case(
        "Gemma4Text",
        {**HEADS, **GEMMA4, "num_hidden_layers": 12, "num_kv_shared_layers": 6, "hidden_size_per_layer_input": 8},
    ),
}
FORCED = {name: CASES[name] for name in ("llama", "gemma2", "gemma3", "qwen3", "mistral", "cohere", "afmoe")}
"""Windows, soft-caps and scales come through the interface; AFMoE takes views of what attention gives."""
ALL = {**FOREIGN, **FORCED}


@pytest.mark.parametrize("name", ALL)
def test_equals_transformers_alone_in_a_crowd_in_chunks_and_cached(name: str, tmp_path: Path) -> None:
    model = make_model(ALL[name])
    with LLM(str(save(model, ALL[name], tmp_path)), model_impl="transformers", **OPTIONS) as llm:
        recorder = LogitRecorder(llm)
        crowd = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        cached = llm.generate(PROMPTS, replace(GREEDY, max_tokens=AGAIN), use_tqdm=False)
        alone = llm.generate(PROMPTS[1], replace(GREEDY, max_tokens=AGAIN), use_tqdm=False)
        assert cached[-1].num_cached_tokens >= 16
        assert llm.engine_info()["model_impl"] == "transformers"
    for prompt, *outputs in zip(PROMPTS, crowd, cached, strict=True):
        outputs += alone if prompt == PROMPTS[1] else []
        theirs = reference_logits(model, prompt, outputs[0].token_ids)
        assert theirs.std(-1).min() > 0.05
        for output in outputs:
            count = len(output.token_ids)
            assert count in (NUM_TOKENS, AGAIN) and output.token_ids == theirs[:count].argmax(-1).tolist()
            ours = recorder.of(output.request_id, len(prompt), count)
            torch.testing.assert_close(ours, theirs[:count], **TOLERANCE)


def test_the_text_of_a_whole_model_that_transformers_counts_among_causal_ones(tmp_path: Path) -> None:
    """Gemma 4 as it is published, with its encoder of images."""
    text = {**SHAPE, **HEADS, **GEMMA4, "model_type": "gemma4_text"}
    vision = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.Gemma4Config(text_config=text, vision_config={**vision, "head_dim": 8})
    config.image_token_id, config.video_token_id, config.audio_token_id = 208, 209, 210
    torch.manual_seed(0)
    model = randomised(transformers.AutoModelForImageTextToText, config)
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), model_impl="transformers", **OPTIONS) as llm:
        assert llm.engine_info()["model_impl"] == "transformers"
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == reference_logits(model, prompt, output.token_ids).argmax(-1).tolist()


def test_auto_takes_it_for_unknown_architectures_alone_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, chosen in (("GPTNeoX", "transformers"), ("Llama", "native")):
        folder = save(make_model(Case(name, {})), Case(name, {}), tmp_path / name)
        caplog.clear()
        with caplog.at_level(logging.WARNING), LLM(str(folder), **OPTIONS) as llm:
            assert llm.engine_info()["model_impl"] == chosen
        warned = [record.message for record in caplog.records if "transformers computes it" in record.message]
        assert len(warned) == (chosen == "transformers")
    with pytest.raises(ValueError, match="architectures='GPTNeoXForCausalLM': must be one of"):
        LLM(str(tmp_path / "GPTNeoX"), model_impl="native", **OPTIONS)
    with pytest.raises(ValueError, match="tensor_parallel_size=2: must be 1 where transformers"):
        LLM(str(tmp_path / "GPTNeoX"), tensor_parallel_size=2, **OPTIONS)


REFUSED = {
    "Falcon": ({}, "does not go through transformers' attention interface"),
    "Lfm2": ({"layer_types": ["conv", "full_attention", "conv", "full_attention"]}, "two texts, packed"),
    "Llama4Text": ({"attention_chunk_size": 8}, "masks pieces of 8 tokens"),
    "Roberta": ({"is_decoder": True, "pad_token_id": 1}, "two texts, packed"),  # its positions begin at 2
    "DeepseekV4": ({**EXPERTS, "q_lora_rank": 16, "head_dim": 8, "num_hidden_layers": 3}, "keys for 160 tokens"),
    "HYV4": (EXPERTS, "asks for what packed rows do not have"),
}


@pytest.mark.parametrize("config", REFUSED)
def test_what_packed_rows_cannot_give_is_refused(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the trial alone: of most of these config.json would have said it before."""
    for reader in ("registry", "transformers_model"):
        monkeypatch.setattr(f"nanovllm.models.{reader}.unserved_parts", lambda raw: "")
    entries, message = REFUSED[config]
    case = Case(config, entries)
    folder = save(make_model(case), case, tmp_path)
    with pytest.raises(ValueError, match=f"model_impl='transformers': must be of another model: .*{message}"):
        LLM(str(folder), model_impl="transformers", **OPTIONS)


def test_a_package_that_a_module_lacks_is_named_in_our_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(make_model(Case("GPTNeoX", {})), Case("GPTNeoX", {}), tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise ImportError("\nTimmWrapperModel requires timm:\n`pip install timm`")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(ValueError, match=r"must be of another model: it needs packages .* not installed: Timm.*$"):
        LLM(str(folder), **OPTIONS)


@pytest.mark.parametrize(
    ("model_type", "entries", "message"),
    [
        ("gpt_neox", {"num_attention_heads": "x"}, "config.json: transformers does not take it: .*num_attention_heads"),
        ("gpt_neox", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config={.*: must be absent"),
        ("jamba", {}, r"JambaForCausalLM has recurrent layers: not served\. docs/models\.md lists"),
        ("longcat_flash", {}, "LongcatFlashForCausalLM has latent attention: not served"),
    ],
)
def test_what_transformers_fills_in_and_cannot_take_is_refused_by_the_configuration_alone(
    model_type: str, entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """In one line of ours: no other library's advice, and before any weight."""
    raw = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]], "model_type": model_type, **entries}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ValueError, match=f"^{message}.*$"):
        read_model_config(EngineConfig(str(tmp_path)))


def test_what_our_layers_alone_serve_is_refused_by_the_option(tmp_path: Path) -> None:
    raw = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "layer_types": ["linear_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ValueError, match=r"model_impl='transformers': must be 'auto' or 'native' for .* has recurrent"):
        read_model_config(EngineConfig(str(tmp_path), model_impl="transformers"))


@pytest.mark.parametrize("newer", [False, True])
def test_overrides_of_rotary_embeddings_count_whichever_spelling_the_file_has(tmp_path: Path, newer: bool) -> None:
    rope = {"rope_theta": 5000.0}
    raw = {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "vocab_size": 64}
    raw |= {"rope_parameters": {"rope_type": "default", **rope}} if newer else rope
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")

    def found(**overrides: Any) -> tuple[Any, ...]:
        config = read_model_config(EngineConfig(str(tmp_path), hf_overrides=overrides)).transformers_config
        table = transformers.StableLmConfig.from_dict(config).rope_parameters
        return table["rope_type"], table["rope_theta"], table.get("factor")

    assert found(rope_theta=9.0) == ("default", 9.0, None)
    assert found(rope_scaling={"rope_type": "linear", "factor": 2.0}) == ("linear", 5000.0, 2.0)
    assert found(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}) == ("linear", 9.0, 2.0)


@pytest.mark.parametrize("newer", [False, True])
def test_the_context_under_longrope_is_the_original_one(tmp_path: Path, newer: bool) -> None:
    """Beyond it the module takes the long list for the short texts of a step, too."""
    lists = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **lists}
    raw = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 48, "num_attention_heads": 4}
    raw |= {"max_position_embeddings": 512, "original_max_position_embeddings": 64}
    raw |= {"rope_parameters": rope} if newer else {"rope_scaling": {"type": "longrope", **lists}}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert read_model_config(EngineConfig(str(tmp_path), model_impl="transformers")).usual_context == 64


def test_new_weights_and_two_engines_at_once(tmp_path: Path) -> None:
    case = FOREIGN["GPT-NeoX: parallel blocks, partial rope"]
    models = [make_model(case, seed) for seed in (1, 2)]
    folders = [save(model, case, tmp_path / str(n)) for n, model in enumerate(models)]
    with LLM(str(folders[0]), **OPTIONS) as first, LLM(str(folders[1]), **OPTIONS) as second:
        a, b = (llm.generate(PROMPTS, GREEDY, use_tqdm=False) for llm in (first, second))
        first.load_weights(models[1].state_dict().items())
        again = first.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.token_ids for o in again] == [o.token_ids for o in b] != [o.token_ids for o in a]
    gc.collect()
    assert not [name for name in transformers.AttentionInterface._global_mapping if name.startswith("nanovllm")]


def test_dummy_weights_need_no_file_and_leave_the_callers_random_numbers_alone(tmp_path: Path) -> None:
    case: Any = Case("GPTNeoX", {})
    save(make_model(case), case, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with LLM(str(tmp_path), load_format="dummy", **OPTIONS) as llm:
        assert torch.equal(torch.rand(2), expected)
        assert len(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].token_ids) == NUM_TOKENS
