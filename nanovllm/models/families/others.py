"""Families with a combination of switches of their own: GLM-4, EXAONE 4, Cohere, OLMo, StarCoder 2, Nemotron."""

from functools import partial
from typing import Any

from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.families.llama import windows_everywhere
from nanovllm.models.family import Family, Fields, full_every, read_decoder
from nanovllm.models.names import GATE_UP, POST_NORMS, CheckpointNames
from nanovllm.models.rope_reader import read_ropes


def read_glm(config: ConfigReader, generation: Fields, **more: Any) -> Fields:
    bias = config.flag("attention_bias")
    return read_decoder(config, generation, qkv_bias=bias, interleaved_rope=True, partial_rope=True, **more)


def exaone_layers(config: ConfigReader) -> Fields:
    """Fields of EXAONE: if some layers see a window, the others have no rotary embedding."""
    pattern = config.get("sliding_window_pattern")  # "LLLG" or 4
    if config.get("sliding_window") is None:
        config.get("layer_types")
        return {}
    period = len(pattern) if isinstance(pattern, str) and pattern else config.integer("sliding_window_pattern", 4)
    return {"kinds": full_every(config, period), "window": config.integer("sliding_window"), "nope_full": True}


def read_exaone4(config: ConfigReader, generation: Fields) -> Fields:
    return read_decoder(config, generation, norm_placement="post", qk_norm="head", **exaone_layers(config))


def read_cohere(config: ConfigReader, generation: Fields, **more: Any) -> Fields:
    """Reads Cohere's models, with attention and MLP side by side (arXiv 2504.00698)."""
    return read_decoder(
        config, generation, eps="layer_norm_eps", biases="attention_bias", float_rope=True, interleaved_rope=True,
        norm_kind="layer", norm_placement="parallel", logits_multiplier=config.positive("logit_scale", 0.0625), **more,
    )  # fmt: skip


def read_cohere2(config: ConfigReader, generation: Fields) -> Fields:
    """Full layers have no rotary embedding."""
    kinds = full_every(config, config.integer("sliding_window_pattern", 4))
    return read_cohere(config, generation, kinds=kinds, window=config.integer("sliding_window"), nope_full=True)


def read_olmo2(config: ConfigReader, generation: Fields, **more: Any) -> Fields:
    """Reads OLMo 2 (arXiv 2501.00656): norms after each block, and one over all queries and one over all keys."""
    switches: Fields = {"norm_kind": "rms_float32", "norm_placement": "post", "qk_norm": "width", "float_rope": True}
    return read_decoder(config, generation, biases="attention_bias", **switches, **more)


def read_olmo3(config: ConfigReader, generation: Fields) -> Fields:
    """Three of four layers see a window; only the others' rotary embedding is scaled."""
    ropes, window = read_ropes(config, 5e5, 5e5, scales_sliding=True), config.integer("sliding_window")
    return read_olmo2(config, generation, ropes=ropes, kinds=full_every(config, 4), window=window)


def read_starcoder2(config: ConfigReader, generation: Fields) -> Fields:
    switches: Fields = {"norm_kind": "layer", "norm_bias": True, "gated_mlp": False, **windows_everywhere(config)}
    bias = config.flag("use_bias")
    return read_decoder(config, generation, eps="norm_epsilon", biases="use_bias", mlp_bias=bias, **switches)


def read_nemotron(config: ConfigReader, generation: Fields) -> Fields:
    """Nemotron-4 (arXiv 2402.16819)."""
    switches: Fields = {"norm_kind": "layer", "norm_adds_one": True, "norm_bias": True, "gated_mlp": False}
    switches |= {"biases": "attention_bias", "mlp_bias": config.flag("mlp_bias")}
    return read_decoder(config, generation, eps="norm_eps", partial_rope=True, **switches)


_GLM4_NAMES = CheckpointNames(
    {
        "attention_out_norm": "post_self_attn_layernorm", "mlp_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    },
    GATE_UP,
)  # fmt: skip
_GLM4 = {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07}
_GLM = {**_GLM4, "num_key_value_heads": 2, "eos_token_id": [151329, 151336, 151338]}
_STARCODER2_NAMES = CheckpointNames({"up_proj": "c_fc", "down_proj": "c_proj"})
_STARCODER2 = {
    "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "norm_epsilon": 1e-5, "use_bias": True,
}  # fmt: skip
_COHERE = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True}
_EXAONE4 = {"rms_norm_eps": 1e-5, "sliding_window": 4096}
_OLMO3 = {"rms_norm_eps": 1e-5, "sliding_window": 4096}
_NEMOTRON = {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5}

FAMILIES = {
    "GlmForCausalLM": Family(read_glm, CheckpointNames(fused=GATE_UP), _GLM),
    "Glm4ForCausalLM": Family(partial(read_glm, norm_placement="sandwich"), _GLM4_NAMES, _GLM4),
    "Exaone4ForCausalLM": Family(read_exaone4, CheckpointNames(POST_NORMS), _EXAONE4),
    "CohereForCausalLM": Family(read_cohere, defaults={**_COHERE, "rope_theta": 5e5}),
    "Cohere2ForCausalLM": Family(read_cohere2, defaults={**_COHERE, "sliding_window": 4096}),
    "Olmo2ForCausalLM": Family(read_olmo2, CheckpointNames(POST_NORMS), {"rms_norm_eps": 1e-5}),
    "Olmo3ForCausalLM": Family(read_olmo3, CheckpointNames(POST_NORMS), _OLMO3),
    "Starcoder2ForCausalLM": Family(read_starcoder2, _STARCODER2_NAMES, _STARCODER2),
    "NemotronForCausalLM": Family(read_nemotron, defaults=_NEMOTRON),
}
