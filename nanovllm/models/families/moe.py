"""Families with mixtures of experts: Qwen2-MoE and Qwen3-MoE (arXiv 2407.10671, 2505.09388), Mixtral (arXiv
2401.04088), Granite MoE, GLM-4.5 (arXiv 2508.06471) and gpt-oss (arXiv 2508.10925)."""

from dataclasses import replace
from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import FULL, SLIDING, MoEConfig
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.families.llama import read_granite, windows_everywhere
from nanovllm.models.family import Family, Fields, full_every, read_decoder
from nanovllm.models.names import PRE_NORMS, CheckpointNames


def _with_moe(fields: Fields, moe: MoEConfig, layers: set[int] | None = None) -> Fields:
    """`fields` of a model whose `layers` (None: all) have experts."""
    specs = enumerate(fields["layers"])
    kinds = (replace(spec, mlp="moe") if layers is None or index in layers else spec for index, spec in specs)
    return {**fields, "layers": tuple(kinds), "moe": moe}


def _experts(config: ConfigReader, name: str, size: str, **more: Any) -> MoEConfig:
    """name, size: of the entries with the number of experts and the width of one."""
    config.choice("hidden_act", ("silu",), "silu")
    count, top_k = config.integer(name), config.integer("num_experts_per_tok")
    if top_k > count:
        refuse("num_experts_per_tok", top_k, f"at most {name}={count}")
    return MoEConfig(count, top_k, config.integer(size), **more)


def _sparse_layers(config: ConfigReader) -> set[int]:
    """Every decoder_sparse_step-th layer, but those of mlp_only_layers."""
    step, dense = config.integer("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        refuse("mlp_only_layers", dense, "a list of layers")
    return {i for i in range(config.integer("num_hidden_layers")) if (i + 1) % step == 0 and i not in dense}


def _qwen_experts(config: ConfigReader, **more: Any) -> MoEConfig:
    config.get("num_experts")
    name = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"  # as transformers 5 writes
    return _experts(config, name, "moe_intermediate_size", renormalise=config.flag("norm_topk_prob"), **more)


def read_qwen3_moe(config: ConfigReader, generation: Fields) -> Fields:
    window = windows_everywhere(config) if config.flag("use_sliding_window") else {}
    config.get("sliding_window")
    fields = read_decoder(config, generation, qk_norm="head", biases="attention_bias", **window)
    return _with_moe(fields, _qwen_experts(config), _sparse_layers(config))


def read_qwen2_moe(config: ConfigReader, generation: Fields) -> Fields:
    """Every second of the first `max_window_layers` layers sees a window, where there are any."""
    first, uses = config.integer("max_window_layers", 28, low=0), config.flag("use_sliding_window")
    window = config.integer("sliding_window", 4096) if uses else config.get("sliding_window") and None
    count = config.integer("num_hidden_layers")
    kinds = [SLIDING if uses and i < first and i % 2 == 0 else FULL for i in range(count)]
    fields = read_decoder(config, generation, qkv_bias=config.flag("qkv_bias", True), kinds=kinds, window=window)
    shared = config.integer("shared_expert_intermediate_size")
    moe = _qwen_experts(config, shared_size=shared, shared_name="shared_expert", shared_gate=True)
    return _with_moe(fields, moe, _sparse_layers(config))


def read_mixtral(config: ConfigReader, generation: Fields) -> Fields:
    fields = read_decoder(config, generation, **windows_everywhere(config))
    return _with_moe(fields, _experts(config, "num_local_experts", "intermediate_size"))


def read_granite_moe(config: ConfigReader, generation: Fields) -> Fields:
    moe = _experts(config, "num_local_experts", "intermediate_size", layout="linears")
    return _with_moe(read_granite(config, generation), moe)


def read_glm4_moe(config: ConfigReader, generation: Fields) -> Fields:
    """The first layers are dense."""
    qk_norm = "head" if config.flag("use_qk_norm") else None
    bias = config.flag("attention_bias")
    fields = read_decoder(config, generation, qkv_bias=bias, qk_norm=qk_norm, partial_rope=True)
    moe = _experts(
        config, "n_routed_experts", "moe_intermediate_size", scoring="sigmoid",
        renormalise=config.flag("norm_topk_prob", True), num_groups=config.integer("n_group", 1),
        top_groups=config.integer("topk_group", 1), scale=config.positive("routed_scaling_factor", 1.0),
        shared_size=config.integer("n_shared_experts", 1) * config.integer("moe_intermediate_size"),
    )  # fmt: skip
    if moe.num_experts % moe.num_groups or moe.num_experts // moe.num_groups * moe.top_groups < moe.top_k:
        bound = f"a divisor of n_routed_experts={moe.num_experts} whose topk_group groups hold {moe.top_k} experts"
        refuse("n_group", moe.num_groups, bound)
    dense = config.integer("first_k_dense_replace", 1, low=0)
    return _with_moe(fields, moe, set(range(dense, len(fields["layers"]))))


def read_gpt_oss(config: ConfigReader, generation: Fields) -> Fields:
    """Every second layer sees a window, and all have sinks."""
    quantization = config.get("quantization_config", {})
    if not isinstance(quantization, dict) or quantization.get("quant_method", "mxfp4") != "mxfp4":
        refuse("quantization_config", quantization, "absent, or with quant_method 'mxfp4'")
    windows: Fields = {"kinds": full_every(config, 2), "window": config.integer("sliding_window")}
    fields = read_decoder(config, generation, biases="attention_bias", norm_kind="rms_float32", **windows)
    fields["layers"] = tuple(replace(layer, has_sinks=True) for layer in fields["layers"])
    switches: Fields = {"activation_limit": config.positive("swiglu_limit", 7.0)}
    switches |= {"activation_alpha": config.positive("swiglu_alpha", 1.702), "layout": "transposed"}
    return _with_moe(fields, _experts(config, "num_local_experts", "intermediate_size", bias=True, **switches))


_MIXTRAL_NAMES = CheckpointNames(
    {**PRE_NORMS, "mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
)
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
_GRANITE_NAMES = CheckpointNames({**PRE_NORMS, "mlp": "block_sparse_moe", "gate": "router.layer"})
_QWEN2 = {"num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632}
_GLM4_NAMES = CheckpointNames(PRE_NORMS, skipped=("model.layers.46.", "model.layers.92."))
"""Of GLM-4.5-Air and GLM-4.5 the layers after the last one are left out: they draft tokens (multi-token prediction)."""
_GLM4 = {
    "n_routed_experts": 128, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
}  # fmt: skip
_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
_GPT_OSS = {
    "num_local_experts": 128, "num_experts_per_tok": 4, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0, "rope_parameters": _GPT_OSS_ROPE, "attention_bias": True,
}  # fmt: skip

FAMILIES = {
    "Qwen2MoeForCausalLM": Family(read_qwen2_moe, defaults=_QWEN2),
    "Qwen3MoeForCausalLM": Family(read_qwen3_moe, defaults={"num_experts": 128, "num_experts_per_tok": 8}),
    "MixtralForCausalLM": Family(read_mixtral, _MIXTRAL_NAMES, _MIXTRAL),
    "GraniteMoeForCausalLM": Family(
        read_granite_moe, _GRANITE_NAMES, {"num_local_experts": 8, "num_experts_per_tok": 2}
    ),
    "Glm4MoeForCausalLM": Family(read_glm4_moe, _GLM4_NAMES, _GLM4),
    "GptOssForCausalLM": Family(read_gpt_oss, CheckpointNames({**PRE_NORMS, "gate": "router"}), _GPT_OSS),
}
