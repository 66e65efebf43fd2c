"""The text of models that read images, against transformers' whole module: names and nesting are those that its
save_pretrained writes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_cases import (
    AGAIN,
    ALTERNATING,
    DELTA,
    EXPERTS,
    GEMMA4,
    GEMMA4_E,
    GREEDY,
    GROUPED,
    HEADS,
    LATENT,
    OPTIONS,
    PROMPTS,
    SHAPE,
    SHARED,
    TWO_BASES,
    YARN,
    randomised,
    reference_logits,
)
from safetensors.torch import load_file, save_file
from test_families import compare_logits, expect_best_tokens, expect_logits_of_transformers

from nanovllm import LLM
from nanovllm.models.registry import parse_config
from nanovllm.models.wrappers import WRAPPERS

VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4, "num_heads": 4,
    "depth": 1, "out_hidden_size": 48, "embed_dim": 32, "head_dim": 8, "image_size": 28, "patch_size": 14,
    "fullatt_block_indexes": [0], "layer_types": ["full_attention"], "deepstack_visual_indexes": [0],
    "vision_output_dim": 48,
}  # fmt: skip
"""Entries of the encoders, of which each class takes those that it has."""
TOKENS = {"image_token_id": 998, "image_token_index": 998, "video_token_id": 999, "video_token_index": 999}
"""Ids of tokens that are no text."""
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
PARTIAL = {**MROPE["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
WRAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral3": ("mistral", {**HEADS, "sliding_window": None}),
    "Mistral3 of Ministral 3": ("ministral3", {**HEADS, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.3}}),
    "Mistral3 of Mistral 4": ("mistral4", {**LATENT, **GROUPED, "n_group": 1, "topk_group": 1}),
    "Kimi_K25": ("deepseek_v3", {**LATENT, **GROUPED}),
    "Llava": ("llama", {}),
    "LlavaNext": ("mistral", HEADS),
    "LlavaOnevision": ("qwen2", {}),
    "InternVL": ("qwen3", HEADS),
    "InternVL of gpt-oss": ("gpt_oss", {**HEADS, "num_local_experts": 5, "num_experts_per_tok": 3}),
    "AyaVision": ("cohere2", {**ALTERNATING, "logit_scale": 1.0}),  # transformers' whole module leaves it out
    "Cohere2Vision": ("cohere2", {**ALTERNATING, "logit_scale": 1.0}),
    "Gemma3": ("gemma3_text", {**HEADS, **ALTERNATING, "rope_parameters": TWO_BASES}),
    "Gemma4": ("gemma4_text", {**HEADS, **GEMMA4_E, "pad_token_id": 0}),
    "Gemma4Unified": ("gemma4_unified_text", {**HEADS, **GEMMA4, "attention_k_eq_v": True, "pad_token_id": 0}),
    "Qwen2VL": ("qwen2_vl_text", {**MROPE, "hidden_size": 96}),
    "Qwen2_5_VL": ("qwen2_5_vl_text", {**MROPE, "hidden_size": 96}),
    "Qwen3VL": ("qwen3_vl_text", {**HEADS, **MROPE}),
    "Qwen3VLMoe": ("qwen3_vl_moe_text", {**HEADS, **MROPE, **EXPERTS}),
    "Qwen3_5": ("qwen3_5_text", DELTA),
    "Qwen3_5Moe": ("qwen3_5_moe_text", {**DELTA, **EXPERTS, **SHARED}),
    "Glm4v": ("glm4v_text", {"hidden_size": 96, "rope_parameters": PARTIAL}),
    "Glm46V": ("glm4v_text", {"hidden_size": 96, "rope_parameters": PARTIAL}),
    "Glm4vMoe": ("glm4v_moe_text", {**HEADS, **GROUPED, "rope_parameters": PARTIAL}),
    "Exaone4_5_": ("exaone4", {**ALTERNATING, "sliding_window_pattern": 4}),
    "MuseGlimmer": ("muse_glimmer_text", {**HEADS, "sliding_window": 7, "output_multiplier": 2.0}),
    "LightOnOcr": ("qwen3", HEADS),
    "Idefics3": ("llama", {}),
    "SmolVLM": ("llama", {"tie_word_embeddings": True}),
}
WITH_TEXT_OF_THEIR_OWN = ("Glm46V", "Glm4vMoe", "MuseGlimmer")
RANKS = ("Qwen3VLMoe", "Mistral3", "MuseGlimmer")
"""Experts that are held turned round, the prefix that most have, gates and normalised embeddings."""
OF_FOUR = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128}


def make_wrapped(name: str, seed: int = 0, **more: Any) -> Any:
    kind, entries = WRAPPED[name]
    made = getattr(transformers, f"{name.partition(' ')[0].removesuffix('_')}{'_' * name.endswith('_')}Config")
    default = made().to_dict()
    whole = default["vision_config"] or made.sub_configs["vision_config"]().to_dict()
    vision = {**whole, **{k: v for k, v in VISION.items() if k in whole}}
    outer = {name: value for name, value in TOKENS.items() if name in default}
    text = {**SHAPE, **entries, **more, "model_type": kind}
    tied = {"tie_word_embeddings": text.pop("tie_word_embeddings")}
    if name.startswith("LlavaOnevision"):
        outer["image_grid_pinpoints"] = [[28, 28]]
    torch.manual_seed(seed)
    config = made(text_config=text, vision_config=vision, **outer, **tied)
    return randomised(transformers.AutoModelForImageTextToText, config)


def save(model: Any, folder: Path) -> None:
    """Layers of Kimi-K2.5's text are "layers", as published; transformers writes them by the name of its encoder's."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    if type(model).__name__.startswith("Kimi"):
        named = ((name.replace("model.blocks.", "model.layers."), value) for name, value in load_file(file).items())
        save_file(dict(named), file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", WRAPPED)
def test_text_equals_transformers(name: str, tmp_path: Path) -> None:
    """In a crowd and in chunks; also cached and preempted where no family has such a text model for itself."""
    model = make_wrapped(name)
    save(model, tmp_path)
    if name in WITH_TEXT_OF_THEIR_OWN:
        expect_logits_of_transformers(model, tmp_path)
    else:
        with LLM(str(tmp_path), **OPTIONS) as llm:
            compare_logits(llm, model, once=True, greedy=replace(GREEDY, max_tokens=AGAIN))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in RANKS)) for n in WRAPPED])
def test_ranks_share_it(name: str, ranks: int, tmp_path: Path) -> None:
    more = {**OF_FOUR, "num_key_value_heads": 8} if "kv_lora_rank" in WRAPPED[name][1] else OF_FOUR
    model = make_wrapped(name, **(more if ranks == 4 else {}))
    save(model, tmp_path)
    with LLM(str(tmp_path), **OPTIONS, tensor_parallel_size=ranks) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expect_best_tokens(reference_logits(model, prompt, output.token_ids), output.token_ids)


@pytest.mark.parametrize("ranks", [1, 2])
def test_stacked_experts_may_be_turned(ranks: int, tmp_path: Path) -> None:
    """Published files have [experts, hidden, 2 I] and [experts, I, hidden]; transformers writes what its module has."""
    model = make_wrapped("Qwen3VLMoe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {name: value.mT.contiguous() if ".experts." in name else value for name, value in tensors.items()}
    save_file(turned, tmp_path / "model.safetensors")
    with LLM(str(tmp_path), **OPTIONS, tensor_parallel_size=ranks) as llm:
        [output] = llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
    assert output.token_ids == reference_logits(model, PROMPTS[2], output.token_ids).argmax(-1).tolist()


def test_every_wrapper_is_tried() -> None:
    tried = {f"{name.partition(' ')[0]}ForConditionalGeneration" for name in WRAPPED}
    assert tried == WRAPPERS.keys() - {"VoxtralForConditionalGeneration", "KimiK25ForConditionalGeneration"}


def test_both_nestings_and_new_weights_in_the_other_one(tmp_path: Path) -> None:
    """Published files have either; transformers reads both."""
    model, other = make_wrapped("Gemma3"), make_wrapped("Gemma3", seed=9)
    model.save_pretrained(tmp_path)
    older = load_file(tmp_path / "model.safetensors")
    newer = other.state_dict()
    assert not older.keys() & newer.keys()
    with LLM(str(tmp_path), **OPTIONS) as llm:
        for now in (model, other):
            if now is other:
                llm.load_weights(newer.items())
            [output] = llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
            best = reference_logits(now, PROMPTS[2], output.token_ids).argmax(-1)
            assert output.token_ids == best.tolist()


@pytest.mark.parametrize("is_older", [True, False])
def test_a_text_model_may_keep_the_names_of_the_model_around_it(is_older: bool, tmp_path: Path) -> None:
    """As merged ones are saved, with its encoder or without, in either nesting."""
    model = make_wrapped("Gemma3")
    model.save_pretrained(tmp_path)
    if not is_older:
        save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    text = {**raw["text_config"], "architectures": ["Gemma3ForCausalLM"]}
    text["tie_word_embeddings"] = model.config.tie_word_embeddings
    (tmp_path / "config.json").write_text(json.dumps(text), encoding="utf-8")
    expect_logits_of_transformers(model, tmp_path)


PATTERNS = {
    "re:.*language_model.*self_attn.*": [True, True, False] * 2,
    "re:^(?!.*language_model).*$": [False] * 6,
    r"re:model[.]language_model[.]layers[.]0[.]": [True] * 3 + [False] * 3,
    r"re:.*layers\.0\.": [True] * 3 + [False] * 3,
    "*language_model*self_attn*": [True, True, False] * 2,
    "language_model.model.layers.0*": [True] * 3 + [False] * 3,
    "model.language_model.layers.0.": [True] * 3 + [False] * 3,
    "re:.*visual.*": [False] * 6,
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("architecture", ["Qwen3VLForConditionalGeneration", "Qwen3ForCausalLM"])
def test_lists_of_what_is_not_quantised_may_name_the_whole_path(architecture: str, pattern: str) -> None:
    text = {**SHAPE, "num_hidden_layers": 2, "model_type": "qwen3_vl_text"}
    raw = {"text_config": text} if "VL" in architecture else text
    quantization = {"quant_method": "fp8", "modules_to_not_convert": [pattern]}
    layers = parse_config({**raw, "architectures": [architecture], "quantization_config": quantization}).layers
    wide = [layer.precision(part) is None for layer in layers for part in ("qkv", "o", "down")]
    assert wide == PATTERNS[pattern]


def test_the_heads_own_entry_wins_over_the_nested_one_and_a_nested_one_over_none(tmp_path: Path) -> None:
    make_wrapped("Mistral3").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    nested = {**raw["text_config"], "tie_word_embeddings": True}
    assert not parse_config({**raw, "text_config": nested, "tie_word_embeddings": False}).tie_word_embeddings
    assert parse_config({**raw, "text_config": nested, "tie_word_embeddings": None}).tie_word_embeddings


@pytest.mark.parametrize("nested", [{"eos_token_id": 1, "dtype": "float32"}, {"eos_token_id": None, "dtype": None}])
def test_what_is_said_of_the_whole_wins(nested: dict[str, Any]) -> None:
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "torch_dtype": "float16"}
    text = {**SHAPE, "model_type": "gemma3_text", **nested}
    found = parse_config({**whole, "text_config": text})
    made = transformers.AutoConfig.for_model("gemma3", **{**whole, "text_config": text})
    assert transformers.GenerationConfig.from_model_config(made).eos_token_id == [*found.eos_token_ids]
    assert (found.torch_dtype, made.dtype) == ("float16", torch.float16)
    inner = parse_config({**whole, "eos_token_id": None, "torch_dtype": None, "text_config": text})
    assert (inner.eos_token_ids, inner.torch_dtype) == (((1,), "float32") if nested["dtype"] else ((), "bfloat16"))


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Glm4v"])
def test_a_flat_configuration_of_before_is_read(name: str, tmp_path: Path) -> None:
    """Both were published with the language model's entries beside `vision_config`."""
    model = make_wrapped(name)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    text = {name: value for name, value in raw.pop("text_config").items() if name not in ("model_type", "dtype")}
    rope = text.pop("rope_parameters")
    older = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    rope = {"partial_rotary_factor": rope.get("partial_rotary_factor"), "rope_theta": 1e4, "rope_scaling": older}
    flat = {**text, **raw, **rope, "model_type": model.config.model_type}
    path.write_text(json.dumps(flat), encoding="utf-8")
    expect_logits_of_transformers(model, tmp_path)


SPARSE: dict[str, dict[str, Any]] = {
    "LLaVA-1.5-7B": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
    "LLaVA-1.6-Mistral": {
        "model_type": "mistral", "max_position_embeddings": 32768, "num_key_value_heads": 8, "sliding_window": None,
        "intermediate_size": 14336, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "vocab_size": 32064,
    },
    "Pixtral-12B": {
        "model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "num_hidden_layers": 40, "rope_theta": 1e9,
        "num_key_value_heads": 8, "max_position_embeddings": 1024000, "sliding_window": None, "vocab_size": 131072,
    },
    "LLaVA-OneVision-0.5B": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1e6, "vocab_size": 152000,
        "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 24, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""`text_config` of published files, which leave out sizes."""


@pytest.mark.parametrize("name", SPARSE)
def test_sizes_that_published_files_leave_out_are_those_of_transformers(name: str) -> None:
    raw = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {**SPARSE[name], "eos_token_id": 2}}
    theirs = transformers.LlavaConfig(text_config=dict(raw["text_config"])).to_dict()
    assert parse_config({**raw, "dtype": "bfloat16"}) == parse_config({**theirs, "architectures": raw["architectures"]})


def test_a_language_model_of_no_family_is_named(tmp_path: Path) -> None:
    make_wrapped("Llava").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    for entries, why in (({"kv_lora_rank": 64}, "has latent attention"), ({}, "is of no family that is here")):
        raw["text_config"] = {**raw["text_config"], "model_type": "longcat_flash", **entries}
        with pytest.raises(ValueError, match=rf"language model \(model_type='longcat_flash'\) {why}: not served"):
            parse_config(raw)
        raw["text_config"].pop("kv_lora_rank", None)


def test_sound_is_left_aside_as_images_are(tmp_path: Path) -> None:
    audio = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.VoxtralConfig(text_config={**SHAPE, **HEADS, "model_type": "llama"}, audio_config=audio)
    torch.manual_seed(0)
    model = randomised(transformers.AutoModelForSpeechSeq2Seq, config)
    model.save_pretrained(tmp_path)
    expect_logits_of_transformers(model, tmp_path)
