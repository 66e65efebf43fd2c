"""Models with latent attention: what of their checkpoints is widened or skipped, what a token takes, and what is
refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import int4_checkpoints
import pytest
import torch
import transformers
from checkpoints import FILE, change_tensors, read_json, write_json
from family_cases import CASES, GREEDY, GROUPED, LATENT, OPTIONS, PROMPTS, SHAPE, YARN, make_model, save
from fp8_checkpoints import BLOCKS, CONFIGS, by_definition, quantize, quantized
from observing import LogitRecorder
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.models.registry import parse_config, read_model_config

WHOLE_BLOCKS = {
    **SHAPE, **LATENT, "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 64, "kv_lora_rank": 72, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 64,
    "first_k_dense_replace": 2, "num_hidden_layers": 2, "rope_parameters": YARN,
}  # fmt: skip
"""A model without experts. On two ranks the columns of an output projection are whole blocks; no other size is."""


def make(**entries: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**{**WHOLE_BLOCKS, **entries}, initializer_range=0.15)
    return transformers.DeepseekV3ForCausalLM(config).eval()


def tokens(folder: Path, **options: Any) -> list[list[int]]:
    with LLM(str(folder), **OPTIONS, **options) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("queries", [64, None])
@pytest.mark.parametrize("kind", ["blocks", "channels"])
def test_projections_of_latents_are_widened_of_e4m3(kind: str, queries: int | None, tmp_path: Path) -> None:
    """Others are in e4m3: logits are those of the definition in float64, but for roundings that go the other way."""
    model = make(q_lora_rank=queries)
    model.save_pretrained(tmp_path)
    quantize(tmp_path, CONFIGS[kind])
    wide, errors = by_definition(model.double(), CONFIGS[kind]), []
    with LLM(str(tmp_path), **OPTIONS) as llm:
        recorder = LogitRecorder(llm)
        outputs = llm.generate(PROMPTS, replace(GREEDY, max_tokens=6), use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            with torch.no_grad():
                theirs = wide(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
            ours = recorder.of(output.request_id, len(prompt), 6)
            errors.append((ours - theirs).abs().amax(1) / theirs.std(1))
        held = llm.engine.executor.runner.model.layers[0].self_attn
        assert held.kv_proj.dtype == torch.float32 and held.in_proj.matrix.type_name == "float8_e4m3fn"
    error = torch.cat(errors)
    assert error.median() < 1e-4 and error.max() < 0.1, error


def test_new_weights_of_e4m3_may_come_wide_or_with_their_scales(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    wide = load_file(tmp_path / FILE)
    narrow, names = dict(wide), [name for name in wide if "kv_b_proj" in name]
    for name in names:
        narrow[name], narrow[f"{name}_scale_inv"] = quantized(wide[name], BLOCKS)
    quantize(tmp_path, BLOCKS)
    with LLM(str(tmp_path), **OPTIONS, tensor_parallel_size=2) as llm:
        before = llm.checksum()
        llm.load_weights(wide.items())
        assert llm.checksum() != before
        llm.load_weights(narrow.items())
        assert llm.checksum() == before
        with pytest.raises(ValueError, match=f"weight '{names[0]}' has type .*e4m3fn: must come with its scales"):
            llm.load_weights({**wide, names[0]: narrow[names[0]]}.items())


@pytest.mark.parametrize(
    ("value", "message"),
    [(torch.zeros(4, 1), "holds 0.0: scales must be finite"), (torch.ones(3, 1), r"has shape \(3, 1\): must be one")],
)
def test_a_scale_that_is_none_is_refused(value: torch.Tensor, message: str, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.kv_b_proj.weight_scale"
    make(v_head_dim=96).save_pretrained(tmp_path)
    quantize(tmp_path, BLOCKS)
    change_tensors(tmp_path, lambda tensors: tensors.update({f"{name}_inv": value}))
    with pytest.raises(ValueError, match=f"weight '{name}' {message}"):
        LLM(str(tmp_path), **OPTIONS)


def test_experts_alone_may_be_packed_in_four_bits(tmp_path: Path) -> None:
    """As Kimi-K2-Thinking is published: the tokens are those of the wide checkpoint that it stands for."""
    case = replace(CASES["deepseek_v3"], entries={**CASES["deepseek_v3"].entries, "hidden_size": 64})
    case = replace(case, entries={**case.entries, "moe_intermediate_size": 64})
    wide, folder = save(make_model(case), case, tmp_path / "wide"), tmp_path / "packed"
    tensors = load_file(wide / FILE)
    packed = {name: value for name, value in tensors.items() if ".experts." not in name}
    for name in tensors.keys() - packed.keys():
        path = name.removesuffix(".weight")
        matrix = int4_checkpoints.quantized(tensors[name].numpy(), 32, symmetric=True)
        packed |= int4_checkpoints.tensors_of(path, matrix, "compressed-tensors", symmetric=True)
        tensors[name] = torch.from_numpy(matrix.widened())
    folder.mkdir()
    save_file({name: value.contiguous() for name, value in packed.items()}, folder / FILE)
    save_file(tensors, wide / FILE)
    others = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    config = {**int4_checkpoints.config_of("compressed-tensors", 32, symmetric=True), "ignore": others}
    write_json(folder / "config.json", {**read_json(wide / "config.json"), "quantization_config": config})
    assert tokens(folder) == tokens(wide)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe_lite"])
def test_a_layer_that_drafts_is_skipped(name: str, tmp_path: Path) -> None:
    """It is behind the last one, as GLM-4.5's."""
    folder = save(make_model(CASES[name]), CASES[name], tmp_path)
    expected = tokens(folder)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        last = [one for one in tensors if one.startswith("model.layers.3.")]
        tensors |= {one.replace(".3.", ".4.", 1): tensors[one].clone() for one in last}
        tensors |= {f"model.layers.4.{one}": torch.ones(48) for one in ("enorm.weight", "shared_head.norm.weight")}

    change_tensors(folder, add)
    assert tokens(folder) == expected


def test_a_token_takes_its_latent_and_its_key_on_every_rank(tmp_path: Path) -> None:
    folder = save(make_model(CASES["deepseek_v3"]), CASES["deepseek_v3"], tmp_path)
    for ranks in (1, 2):
        with LLM(str(folder), **OPTIONS, tensor_parallel_size=ranks) as llm:
            [group] = llm.engine_info()["kv_cache_groups"]
            assert group["token_bytes"] == 4 * (40 + 8) * 4


RAW: dict[str, Any] = {
    **SHAPE, **LATENT, **GROUPED, "eos_token_id": 1, "architectures": ["DeepseekV3ForCausalLM"],
}  # fmt: skip
INT4 = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"index_topk": 2048}, "index_topk=2048: must be 0 or absent"),
        ({"attention_bias": True}, "attention_bias=True: must be False or absent"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax': must be 'sigmoid' or absent"),
        ({"topk_method": "greedy"}, "topk_method='greedy': must be 'noaux_tc' or absent"),
        ({"n_group": 4}, "n_group=4: must be a divisor of n_routed_experts=6"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: must be 1"),
        ({"quantization_config": INT4}, "must be a list that has model.layers.0.self_attn.kv_b_proj too"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": True}, "norm_topk_prob=True: must be False"),
    ],
)
def test_entries_that_are_not_served_are_refused_by_name(entries: dict[str, Any], message: str) -> None:
    parse_config(RAW)
    with pytest.raises(ValueError, match=message):
        parse_config({**RAW, **entries})


OF_LATENTS = "for a model with latent attention"
DRAFTS = {"method": "mtp", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, f"kv_cache_dtype='fp8': must be 'auto' {OF_LATENTS}"),
        ({"attention_backend": "flex"}, f"='flex': must be 'auto' or 'torch' or 'triton' {OF_LATENTS}"),
        ({"attention_backend": "flash"}, f"attention_backend='flash': must be .* {OF_LATENTS}"),
        ({"exact_bits": "batch"}, "must be without mixers and MLPs that its family alone has with exact_bits='batch'"),
        ({"speculative_config": DRAFTS}, "no tensor in the checkpoint is one of a layer that drafts"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size=4: must be a divisor of num_attention_heads=6"),
        ({"num_state_lines": 4}, "num_state_lines=4: must be None for a model without recurrent states"),
        ({"model_impl": "transformers"}, "='transformers': must be 'auto' or 'native' .* has latent attention"),
    ],
)
def test_options_that_are_not_served_are_refused_by_name(
    options: dict[str, Any], message: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = save(make_model(CASES["deepseek_v3"]), CASES["deepseek_v3"], tmp_path_factory.mktemp("model"))
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), **{**OPTIONS, **options})


def test_kimi_k2_is_read_as_its_architecture(tmp_path: Path) -> None:
    """Whose model_type is its own, and which has no groups."""
    raw = {**RAW, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid"}
    found = parse_config(raw)
    assert found.moe is not None and (found.moe.num_groups, found.layers[0].mixer) == (1, "latent")
    wrapper = "KimiK25ForConditionalGeneration"
    whole = {"architectures": [wrapper], "tie_word_embeddings": False, "text_config": raw, "vision_config": {}}
    assert parse_config(whole) == replace(found, wrapper=wrapper)
    assert read_model_config(EngineConfig("GLM-4.7-Flash", load_format="dummy")).layers[0].options[:2] == (768, 512)
