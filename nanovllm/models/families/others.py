"""Families with a combination of switches of their own: GLM-4, EXAONE 4, Cohere 2, StarCoder 2, Nemotron."""

from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.families.llama import windows_everywhere
from nanovllm.models.family import Family, Fields, full_every, read_decoder
from nanovllm.models.names import GATE_UP, POST_NORMS, PRE_NORMS, SANDWICH_NORMS, CheckpointNames


def read_glm4(config: ConfigReader, generation: Fields) -> Fields:
    switches: Fields = {"norm_placement": "sandwich", "interleaved_rope": True, "partial_rope": True}
    return read_decoder(config, generation, qkv_bias=config.flag("attention_bias"), **switches)


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


def read_cohere2(config: ConfigReader, generation: Fields) -> Fields:
    """Attention and MLP side by side (arXiv 2504.00698); full layers have no rotary embedding."""
    switches: Fields = {"norm_kind": "layer", "norm_placement": "parallel", "interleaved_rope": True}
    return read_decoder(
        config, generation, eps="layer_norm_eps", biases="attention_bias", float_rope=True,
        kinds=full_every(config, config.integer("sliding_window_pattern", 4)),
        window=config.integer("sliding_window"), nope_full=True,
        logits_multiplier=config.positive("logit_scale", 0.0625), **switches,
    )  # fmt: skip


def read_starcoder2(config: ConfigReader, generation: Fields) -> Fields:
    switches: Fields = {"norm_kind": "layer", "norm_bias": True, "gated_mlp": False, **windows_everywhere(config)}
    bias = config.flag("use_bias")
    return read_decoder(config, generation, eps="norm_epsilon", biases="use_bias", mlp_bias=bias, **switches)


def read_nemotron(config: ConfigReader, generation: Fields) -> Fields:
    """Nemotron-4 (arXiv 2402.16819)."""
    switches: Fields = {"norm_kind": "layer", "norm_adds_one": True, "norm_bias": True, "gated_mlp": False}
    switches |= {"biases": "attention_bias", "mlp_bias": config.flag("mlp_bias")}
    return read_decoder(config, generation, eps="norm_eps", partial_rope=True, **switches)


_GLM4_NORMS = {
    **SANDWICH_NORMS,
    "attention_out_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}
_GLM4 = {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07}
_STARCODER2_NAMES = CheckpointNames({**PRE_NORMS, "up_proj": "c_fc", "down_proj": "c_proj"})
_STARCODER2 = {
    "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "norm_epsilon": 1e-5, "use_bias": True,
}  # fmt: skip
_COHERE2 = {"layer_norm_eps": 1e-5, "sliding_window": 4096, "tie_word_embeddings": True}
_EXAONE4 = {"rms_norm_eps": 1e-5, "sliding_window": 4096}
_NEMOTRON = {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5}

FAMILIES = {
    "Glm4ForCausalLM": Family(read_glm4, CheckpointNames(_GLM4_NORMS, GATE_UP), _GLM4),
    "Exaone4ForCausalLM": Family(read_exaone4, CheckpointNames(POST_NORMS), _EXAONE4),
    "Cohere2ForCausalLM": Family(read_cohere2, defaults=_COHERE2),
    "Starcoder2ForCausalLM": Family(read_starcoder2, _STARCODER2_NAMES, _STARCODER2),
    "NemotronForCausalLM": Family(read_nemotron, defaults=_NEMOTRON),
}
