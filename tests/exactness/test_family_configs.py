"""config.json of every family: read as transformers reads it, or refused."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from family_cases import FULL, SLIDING, TWO_BASES, WINDOW
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanovllm.models import registry
from nanovllm.models.config_reader import CHANGES_RESULT, ConfigReader
from nanovllm.models.registry import override, parse_config

FAMILIES = {
    name: family for name, family in registry.FAMILIES.items() if family.read.__module__.startswith("nanovllm.")
}
"""Families without those that other tests register."""

MODEL_TYPES = {name: model_type for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
CAUSAL = [name for name in FAMILIES if name in MODEL_TYPES]
COMMON = set(transformers.PreTrainedConfig().to_dict()) | {"vocab_size", "use_cache", "initializer_range"}
NO_DIFFERENCE = COMMON | {
    "attention_dropout", "embd_pdrop", "embedding_dropout", "resid_pdrop", "residual_dropout", "bos_token_id",
    "eod_token_id", "pad_token_id", "sep_token_id", "pretraining_tp", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "num_nextn_predict_layers", "mtp_layers_block_type", "chunk_size", "expand",
    "hidden_dropout", "moe_shared_expert_overlap", "num_logits_to_keep", "rescale_prenorm_residual",
    "qk_head_dim", "use_mamba_kernels",
}  # fmt: skip
"""Entries that transformers' inference does not look at."""

OF_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "Glm4MoeForCausalLM": {"head_dim": 128},  # of the default, 42, half cannot be rotated
    "Dots1ForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "HunYuanMoEV1ForCausalLM": {"moe_intermediate_size": None},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "GraniteMoeHybridForCausalLM": {"layer_types": [FULL] * 6, "num_hidden_layers": 6, "num_local_experts": 0},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-*M-*"},
}
"""Entries that files have and transformers' defaults do not."""


@pytest.mark.parametrize("architecture", CAUSAL)
def test_no_entry_of_transformers_configuration_is_passed_over(architecture: str) -> None:
    """Every entry is read, or refused where it changes the result, or changes nothing."""
    model_type = MODEL_TYPES[architecture]
    config = transformers.AutoConfig.for_model(model_type).to_dict() | {"eos_token_id": 0}
    config |= OF_CHECKPOINTS.get(architecture, {})
    reader = ConfigReader({**FAMILIES[architecture].defaults, **config})
    FAMILIES[architecture].read(reader, {})
    config.pop("_sliding_window_pattern", None)  # a copy that is not in files
    of_training = ("mamba_", "time_step_", "linear_a_log_", "linear_dt_")
    config = {name: value for name, value in config.items() if not name.startswith(of_training)}
    passed_over = set(config) - reader.was_read - set(CHANGES_RESULT) - NO_DIFFERENCE
    assert not passed_over


PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "published_configs.json").read_text(encoding="utf-8"))
"""config.json of checkpoints as their makers have published it, for the most part by older versions of transformers; of
MiniMax-M2's and Hunyuan-A13B's lists by layer the first two entries."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_as_transformers_reads_it(name: str) -> None:
    raw = {**PUBLISHED[name], "dtype": "bfloat16"}
    given = {key: value for key, value in raw.items() if key != "quantization_config"}
    filled_in = transformers.AutoConfig.for_model(**deepcopy(given)).to_dict()
    ours, theirs = (parse_config(*override(one, {}, {})) for one in (given, filled_in))
    if "eos_token_id" not in raw:  # generation_config.json has it
        theirs = replace(theirs, eos_token_ids=())
    assert ours == theirs
    assert (len(ours.layers), ours.vocab_size) == (raw["num_hidden_layers"], raw["vocab_size"])
    method = raw.get("quantization_config", {}).get("quant_method")
    held = {spec.quantization and spec.quantization.method for spec in parse_config(raw).layers}
    assert held == {{"awq": "int4"}.get(method, method)}


def test_what_minimax_m2_alone_could_say_is_refused() -> None:
    for entry in ({"use_qk_norm": False}, {"scoring_func": "softmax"}, {"shared_intermediate_size": 512}):
        with pytest.raises(ValueError, match=rf"^{next(iter(entry))}=.*: must be"):
            parse_config({**PUBLISHED["MiniMax-M2"], **entry})


PLAIN: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 512, "moe_intermediate_size": 32,
    "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def test_factors_of_yarn_that_are_zero_count_as_absent() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    raw = {**PLAIN, "architectures": ["Qwen3ForCausalLM"]}
    given = [{**yarn, "mscale": 1.0, "mscale_all_dim": 0.0}, {**yarn, "mscale": 0, "mscale_all_dim": 1}, yarn]
    read = [parse_config({**raw, "rope_scaling": one}) for one in given]
    assert read[0] == read[1] == read[2]


SPARSE = [name for name, family in FAMILIES.items() if family.read.__module__.endswith("moe")]


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": {"rope_type": "default"}}], ids=["silent", "no theta"])
@pytest.mark.parametrize("architecture", CAUSAL)
def test_what_a_configuration_leaves_out_is_what_transformers_fills_in(architecture: str, rope: dict[str, Any]) -> None:
    model_type = MODEL_TYPES[architecture]
    raw = {**PLAIN, **rope, **OF_CHECKPOINTS.get(architecture, {}), "architectures": [architecture]}
    filled_in = transformers.AutoConfig.for_model(model_type, **deepcopy(raw)).to_dict() | {"dtype": None}
    ours, theirs = (parse_config(*override(one, {}, {})) for one in (raw, filled_in))
    assert ours == theirs


@pytest.mark.parametrize(
    ("architectures", "entries"),
    [
        (FAMILIES, {"is_causal": False}),
        ([n for n in FAMILIES if "Gemma4" not in n], {"per_layer_config": {"1": {"num_key_value_heads": 4}}}),
        (["Gemma4ForCausalLM"], {"per_layer_config": {"1": {"num_attention_heads": 4}}}),
        (["Gemma4ForCausalLM"], {"use_bidirectional_attention": "all"}),
        (SPARSE, {"hidden_act": "relu2"}),
        (["LlamaForCausalLM", "GptOssForCausalLM"], {"partial_rotary_factor": 0.5}),
        (["LlamaForCausalLM", "MixtralForCausalLM"], {"rope_parameters": TWO_BASES}),
        (["Glm4ForCausalLM", "NemotronForCausalLM"], {"partial_rotary_factor": 0.4, "head_dim": 18}),
        (["Gemma3ForCausalLM"], {"attn_logit_softcapping": 2.0}),
        (
            ["Phi3ForCausalLM", "Starcoder2ForCausalLM", "MixtralForCausalLM", "Ministral3ForCausalLM"],
            {"layer_types": [SLIDING, FULL] * 3, "sliding_window": WINDOW},
        ),
    ],
)
def test_what_transformers_computes_otherwise_is_refused(architectures: list[str], entries: dict[str, Any]) -> None:
    for architecture in architectures:
        with pytest.raises(ValueError, match=rf"^{next(iter(entries))}=.*: must be"):
            raw = {**PLAIN, **OF_CHECKPOINTS.get(architecture, {}), "architectures": [architecture], **entries}
            parse_config(*override(raw, {}, {}))


@pytest.mark.parametrize(
    ("architecture", "entries", "name"),
    [
        ("Exaone4ForCausalLM", {"sliding_window": WINDOW, "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("Exaone4ForCausalLM", {"sliding_window": WINDOW, "sliding_window_pattern": [1]}, "sliding_window_pattern"),
        ("Gemma3ForCausalLM", {"rope_parameters": {FULL: 3}}, "rope_scaling"),
        ("Olmo3ForCausalLM", {"rope_parameters": {FULL: {"rope_type": "default"}, SLIDING: [1]}}, "rope_scaling"),
        ("HunYuanDenseV1ForCausalLM", {"rope_scaling": {"rope_type": "dynamic", "alpha": "x"}}, "alpha"),
        ("HunYuanDenseV1ForCausalLM", {"rope_scaling": {"type": "dynamic", "alpha": 2, "rope_theta": 0}}, "rope_theta"),
        (
            "GptOssForCausalLM", {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": 3}},
            "quantization_config: modules that are not converted",
        ),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        (
            "Gemma4ForCausalLM", {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["x"]}},
            "quantization_config: modules that are not converted",
        ),
        ("LlamaForCausalLM", {"layer_types": [FULL, {}]}, "layer_types"),
        ("Qwen3ForCausalLM", {"layer_types": [FULL, {}]}, "layer_types"),
        ("Starcoder2ForCausalLM", {"sliding_window": WINDOW, "layer_types": [[SLIDING]]}, "layer_types"),
        ("LlamaForCausalLM", {"architectures": 3}, "architectures"),
        ("LlamaForCausalLM", {"architectures": [["LlamaForCausalLM"]]}, "architectures"),
    ],
)  # fmt: skip
def test_an_entry_of_another_kind_is_refused_by_name(architecture: str, entries: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}=.*: must be"):
        parse_config({**PLAIN, "architectures": [architecture], **entries})
