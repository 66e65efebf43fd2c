"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783) and the families that differ from it by a switch or two, among them
Qwen2 (arXiv 2407.10671; Qwen2.5 has its architecture), Qwen3 (arXiv 2505.09388) and Phi-3 to Phi-4 (arXiv 2404.14219,
2412.08905, 2503.01743)."""

import math
from functools import partial
from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import FULL, SLIDING
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.family import Family, Fields, read_decoder
from nanovllm.models.names import GATE_UP, QKV, SANDWICH_NORMS, CheckpointNames
from nanovllm.models.rope_reader import query_scaling, read_rope, rope_entries


def read_llama(config: ConfigReader, generation: Fields, **switches: Any) -> Fields:
    return read_decoder(config, generation, biases="attention_bias", mlp_bias=config.flag("mlp_bias"), **switches)


def windows_everywhere(config: ConfigReader, mixed: bool = False) -> Fields:
    """Fields of a family whose layers all see a window where `sliding_window` is a number; mixed: unless `layer_types`
    says otherwise."""
    window = config.get("sliding_window")
    if window is None:
        return {}
    types = config.get("layer_types")
    if isinstance(types, list) and any(kind != SLIDING for kind in types) and not mixed:
        refuse("layer_types", types, f"{SLIDING!r} in all layers, or absent, beside a sliding_window")
    return {"kinds": [SLIDING] * config.integer("num_hidden_layers"), "window": config.integer("sliding_window")}


def read_mistral(config: ConfigReader, generation: Fields) -> Fields:
    return read_decoder(config, generation, **windows_everywhere(config, mixed=True))


def read_qwen2(config: ConfigReader, generation: Fields) -> Fields:
    return read_decoder(config, generation, qkv_bias=True, **_late_windows(config))


def read_qwen3(config: ConfigReader, generation: Fields) -> Fields:
    return read_decoder(config, generation, qk_norm="head", biases="attention_bias", **_late_windows(config))


def _late_windows(config: ConfigReader) -> Fields:
    """Fields of windows: with `use_sliding_window`, layers from `max_window_layers` on see one."""
    size, first = config.get("sliding_window", 4096), config.integer("max_window_layers", 28, low=0)
    window = size if config.flag("use_sliding_window") else None
    count = config.integer("num_hidden_layers")
    return {"kinds": [SLIDING if window and i >= first else FULL for i in range(count)], "window": window}


def read_phi3(config: ConfigReader, generation: Fields) -> Fields:
    """Reads Phi-3, whose older checkpoints call LongRoPE "su" or "yarn"."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.raw.get(name)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            config = config.replaced(**{name: {**rope, "rope_type": "longrope"}})
    return read_decoder(config, generation, partial_rope=True, **windows_everywhere(config))


def read_ministral3(config: ConfigReader, generation: Fields) -> Fields:
    """Queries grow with the position past the original context (as in Llama 4)."""
    scaling = query_scaling(config, read_rope(config))
    return read_decoder(config, generation, query_scaling=scaling, **windows_everywhere(config))


def read_cwm(config: ConfigReader, generation: Fields) -> Fields:
    kinds = [SLIDING if i % 4 else FULL for i in range(config.integer("num_hidden_layers"))]
    config.require(mlp_bias=False)
    return read_decoder(config, generation, kinds=kinds, window=config.integer("sliding_window"))


def read_smollm3(config: ConfigReader, generation: Fields) -> Fields:
    """Every fourth layer has no rotary embedding; these are the ones that may see a window."""
    count = config.integer("num_hidden_layers")
    interval = config.integer("no_rope_layer_interval", 4)
    has_rope = config.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(count)])
    if not isinstance(has_rope, list) or len(has_rope) < count:
        refuse("no_rope_layers", has_rope, f"a list of {count} numbers, 0 where a layer has no rope")
    window = config.get("sliding_window") if config.flag("use_sliding_window") else None
    nope = [i for i in range(count) if not has_rope[i]]
    kinds = [SLIDING if window and i in nope else FULL for i in range(count)]
    return read_llama(config, generation, nope=nope, kinds=kinds, window=window)


def read_granite(config: ConfigReader, generation: Fields, **more: Any) -> Fields:
    multipliers = {
        "embedding_multiplier": config.positive("embedding_multiplier", 1.0),
        "residual_multiplier": config.positive("residual_multiplier", 1.0),
        "attention_scale": config.positive("attention_multiplier", 1.0),
        "logits_multiplier": 1.0 / config.positive("logits_scaling", 1.0),
    }
    return read_llama(config, generation, **multipliers, **more)


def read_seed_oss(config: ConfigReader, generation: Fields) -> Fields:
    return read_llama(config, generation, o_bias=config.flag("attention_out_bias"))


def read_ernie4_5(config: ConfigReader, generation: Fields) -> Fields:
    switches: Fields = {"interleaved_rope": True, "float_rope": True, "mlp_bias": config.flag("use_bias")}
    return read_decoder(config, generation, biases="use_bias", **switches)


def read_hunyuan(config: ConfigReader, generation: Fields) -> Fields:
    """`alpha` stretches the base of the rotary embedding once and for all, whatever the text's length."""
    config.require(use_qk_norm=True, use_cla=False)
    raw = rope_entries(config)
    if raw.get("alpha") and raw.get("rope_type", raw.get("type")) == "dynamic":
        dim = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))
        rope = ConfigReader({"rope_theta": config.get("rope_theta"), **raw})
        theta = rope.positive("rope_theta", 1e4) * math.pow(rope.positive("alpha", 1.0), dim / (dim - 2))
        plain = {"rope_type": "default", "rope_theta": theta}
        ropes = {FULL: read_rope(config.replaced(rope_parameters=plain, rope_scaling=None))}
    else:
        ropes = {FULL: read_rope(config)}
    return read_llama(config, generation, ropes=ropes, qk_norm="head", qk_norm_after_rope=True)


def read_muse_glimmer(config: ConfigReader, generation: Fields) -> Fields:
    """Reads Muse Glimmer: attention's output is gated; queries, keys and embeddings are normalised without weights;
    layers whose `layer_rope_theta` is 0 have no rotary embedding: every fourth, from the last one back."""
    count, theta = config.integer("num_hidden_layers"), config.get("layer_rope_theta")
    fourth = [(count - 1 - i) % 4 == 0 for i in range(count)]
    if theta is not None and (not isinstance(theta, list) or len(theta) < count):
        refuse("layer_rope_theta", theta, f"a list of {count} numbers, 0 where a layer has no rope")
    nope = [i for i in range(count) if (fourth[i] if theta is None else not theta[i])]
    return read_decoder(
        config, generation, hidden_act="hidden_activation", biases="attention_bias", nope=nope, qk_norm="head",
        attention_gate="sigmoid", norm_kind="rms_float32", norm_adds_one=True, norm_placement="sandwich",
        kinds=[FULL if each else SLIDING for each in fourth], window=config.integer("sliding_window"),
        qk_norm_scale=config.positive("qk_scale_factor", 3.87), embedding_norm=True, last_norm_is_whole=True,
        out_norm_eps=config.positive("post_norm_eps", 1e-8),
        logits_multiplier=config.positive("output_multiplier", 0.19611613513818404),
        logits_softcap=config.optional_positive("final_logit_softcapping"),
    )  # fmt: skip


_YARN16 = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_MINISTRAL3 = {"head_dim": 128, "rope_parameters": _YARN16, "rms_norm_eps": 1e-5}
_CWM_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_CWM = {
    "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": 8192, "rope_theta": 1e6,
    "rope_parameters": _CWM_ROPE, "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
_ARCEE = {"hidden_act": "relu2", "rms_norm_eps": 1e-5}
_ERNIE4_5 = {"head_dim": 128, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
_MUSE_NAMES = CheckpointNames(SANDWICH_NORMS, paths={"self_attn.g_proj": "self_attn.gate_proj"})
_MUSE = {
    "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
}  # fmt: skip
HUNYUAN_NAMES = CheckpointNames({"q_norm": "query_layernorm", "k_norm": "key_layernorm"})

FAMILIES = {
    "LlamaForCausalLM": Family(read_llama),
    "MistralForCausalLM": Family(read_mistral, defaults={"sliding_window": 4096, "num_key_value_heads": 8}),
    "Qwen2ForCausalLM": Family(read_qwen2),
    "Qwen3ForCausalLM": Family(read_qwen3, defaults={"head_dim": 128}),
    "Phi3ForCausalLM": Family(read_phi3, CheckpointNames(fused={**QKV, **GATE_UP}), {"rms_norm_eps": 1e-5}),
    "MinistralForCausalLM": Family(read_mistral, defaults={"sliding_window": 4096, "num_key_value_heads": 8}),
    "CwmForCausalLM": Family(read_cwm, defaults=_CWM),
    "Ministral3ForCausalLM": Family(read_ministral3, defaults=_MINISTRAL3),
    "SmolLM3ForCausalLM": Family(read_smollm3, defaults={"rope_theta": 2e6, "tie_word_embeddings": True}),
    "GraniteForCausalLM": Family(read_granite),
    "SeedOssForCausalLM": Family(read_seed_oss, defaults={"head_dim": 128, "attention_bias": True}),
    "ArceeForCausalLM": Family(partial(read_llama, gated_mlp=False), defaults=_ARCEE),
    "Ernie4_5ForCausalLM": Family(read_ernie4_5, defaults=_ERNIE4_5),
    "MuseGlimmerTextModel": Family(read_muse_glimmer, _MUSE_NAMES, _MUSE),
    "HunYuanDenseV1ForCausalLM": Family(read_hunyuan, HUNYUAN_NAMES, {"rms_norm_eps": 1e-5}),
}
