"""Families with a combination of switches of their own: GLM-4, EXAONE 4, Cohere 2, StarCoder 2, Nemotron."""

from typing import Any

from nanovllm.model_config import FULL, SLIDING
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.families.llama import windows_everywhere
from nanovllm.models.family import Family, read_decoder
from nanovllm.models.names import GATE_UP, POST_NORMS, PRE_NORMS, SANDWICH_NORMS, CheckpointNames

Fields = dict[str, Any]


def read_glm4(config: ConfigReader, generation: Fields) -> Fields:
    bias = config.flag("attention_bias")
    return read_decoder(
        config, generation, norm_placement="sandwich", interleaved_rope=True, partial_rope=True, qkv_bias=bias
    )


def read_exaone4(config: ConfigReader, generation: Fields) -> Fields:
    """Where some layers see a window, the others have no rotary embedding."""
    switches: Fields = {"norm_placement": "post", "qk_norm": "head"}
    window, pattern = config.get("sliding_window"), config.get("sliding_window_pattern", 4)
    count = config.integer("num_hidden_layers")
    if window is None:
        config.get("layer_types")
        return read_decoder(config, generation, **switches)
    period = len(pattern) if isinstance(pattern, str) else pattern  # "LLLG" or 4
    kinds = config.get("layer_types", [SLIDING if (i + 1) % period else FULL for i in range(count)])
    nope = [i for i, kind in enumerate(kinds) if kind == FULL]
    window = config.integer("sliding_window")
    return read_decoder(config, generation, kinds=kinds, window=window, nope=nope, **switches)


def read_cohere2(config: ConfigReader, generation: Fields) -> Fields:
    """Attention and MLP side by side (arXiv 2504.00698); full layers have no rotary embedding."""
    bias, pattern = config.flag("attention_bias"), config.integer("sliding_window_pattern", 4)
    count = config.integer("num_hidden_layers")
    kinds = config.get("layer_types", [SLIDING if (i + 1) % pattern else FULL for i in range(count)])
    return read_decoder(
        config,
        generation,
        eps="layer_norm_eps",
        kinds=kinds,
        window=config.integer("sliding_window"),
        nope=[i for i, kind in enumerate(kinds) if kind == FULL],
        norm_kind="layer",
        norm_placement="parallel",
        interleaved_rope=True,
        float_rope=True,
        logits_multiplier=config.positive("logit_scale", 0.0625),
        qkv_bias=bias,
        o_bias=bias,
    )


def read_starcoder2(config: ConfigReader, generation: Fields) -> Fields:
    bias = config.flag("use_bias", True)
    biases: Fields = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias}
    switches: Fields = {"norm_kind": "layer", "norm_bias": True, "gated_mlp": False, **windows_everywhere(config)}
    return read_decoder(config, generation, eps="norm_epsilon", **switches, **biases)


def read_nemotron(config: ConfigReader, generation: Fields) -> Fields:
    """Nemotron-4 (arXiv 2402.16819)."""
    bias = config.flag("attention_bias")
    biases: Fields = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": config.flag("mlp_bias")}
    switches: Fields = {"norm_kind": "layer", "norm_adds_one": True, "norm_bias": True, "gated_mlp": False}
    return read_decoder(config, generation, eps="norm_eps", partial_rope=True, **switches, **biases)


_GLM4_NORMS = {
    **SANDWICH_NORMS,
    "attention_out_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_mlp_layernorm",
}
_STARCODER2_NAMES = CheckpointNames({**PRE_NORMS, "up_proj": "c_fc", "down_proj": "c_proj"})
_COHERE2 = {"layer_norm_eps": 1e-5, "sliding_window": 4096, "tie_word_embeddings": True}
_GELU = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}

FAMILIES = {
    "Glm4ForCausalLM": Family(
        read_glm4,
        CheckpointNames(_GLM4_NORMS, GATE_UP),
        {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07},
    ),
    "Exaone4ForCausalLM": Family(
        read_exaone4, CheckpointNames(POST_NORMS), {"rms_norm_eps": 1e-5, "sliding_window": 4096}
    ),
    "Cohere2ForCausalLM": Family(read_cohere2, defaults=_COHERE2),
    "Starcoder2ForCausalLM": Family(read_starcoder2, _STARCODER2_NAMES, {**_GELU, "norm_epsilon": 1e-5}),
    "NemotronForCausalLM": Family(
        read_nemotron, defaults={"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5}
    ),
}
