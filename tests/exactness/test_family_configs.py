"""config.json of every family: read as transformers reads it, or refused."""

from copy import deepcopy
from typing import Any

import pytest
import transformers
from test_families import FULL, SLIDING, TWO_BASES, WINDOW
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanovllm.models.config_reader import CHANGES_RESULT, ConfigReader
from nanovllm.models.registry import FAMILIES, override, parse_config

MODEL_TYPES = {name: model_type for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
CAUSAL = [name for name in FAMILIES if name in MODEL_TYPES]
COMMON = set(transformers.PreTrainedConfig().to_dict()) | {"vocab_size", "use_cache", "initializer_range"}
NO_DIFFERENCE = COMMON | {
    "attention_dropout", "embd_pdrop", "embedding_dropout", "resid_pdrop", "residual_dropout", "bos_token_id",
    "eod_token_id", "pad_token_id", "sep_token_id", "pretraining_tp", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "num_nextn_predict_layers",
}  # fmt: skip
"""What transformers' inference does not look at."""

OF_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "Glm4MoeForCausalLM": {"head_dim": 128},  # of the default, 42, half cannot be rotated
    "Dots1ForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "HunYuanMoEV1ForCausalLM": {"moe_intermediate_size": None},
}
"""What files say and transformers' defaults do not."""


@pytest.mark.parametrize("architecture", CAUSAL)
def test_no_entry_of_transformers_configuration_is_passed_over(architecture: str) -> None:
    """Every entry is read, or refused where it changes the result, or changes nothing."""
    model_type = MODEL_TYPES[architecture]
    config = transformers.AutoConfig.for_model(model_type).to_dict() | {"eos_token_id": 0}
    config |= OF_CHECKPOINTS.get(architecture, {})
    reader = ConfigReader({**FAMILIES[architecture].defaults, **config})
    FAMILIES[architecture].read(reader, {})
    config.pop("_sliding_window_pattern", None)  # a copy that is not in files
    passed_over = set(config) - reader.was_read - set(CHANGES_RESULT) - NO_DIFFERENCE
    assert not passed_over


MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "attn_type_list": [1] * 62,
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}, "dtype": "bfloat16", "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 204800,
    "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
    "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
    "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_cache": True, "use_mtp": True,
    "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
}  # fmt: skip
"""As it is published."""


def test_the_published_configuration_of_minimax_m2_is_served() -> None:
    model = parse_config(MINIMAX_M2)
    assert all(spec.quantization is not None and spec.quantization.method == "fp8" for spec in model.layers)
    for entry in ({"use_qk_norm": False}, {"scoring_func": "softmax"}, {"shared_intermediate_size": 512}):
        with pytest.raises(ValueError, match=rf"^{next(iter(entry))}=.*: must be"):
            parse_config({**MINIMAX_M2, **entry})


PLAIN: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 512, "moe_intermediate_size": 32,
    "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
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
        (FAMILIES, {"per_layer_config": {"1": {"num_key_value_heads": 4}}}),
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
