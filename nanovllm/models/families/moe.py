"""Families with mixtures of experts chosen by their scores alone: Qwen2-MoE and Qwen3-MoE (arXiv 2407.10671,
2505.09388), Mixtral (arXiv 2401.04088), Granite MoE, OLMoE (arXiv 2409.02060), Hunyuan-A13B and gpt-oss (arXiv
2508.10925)."""

from dataclasses import replace
from itertools import repeat
from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import FULL, SLIDING, MoEConfig
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.families.llama import HUNYUAN_NAMES, read_granite, read_hunyuan, windows_everywhere
from nanovllm.models.family import Family, Fields, full_every, read_decoder, with_layers
from nanovllm.models.names import CheckpointNames


def with_moe(fields: Fields, moe: MoEConfig, layers: set[int] | None = None) -> Fields:
    """`fields` of a model whose `layers` (None: all) have experts."""
    numbers = range(len(fields["layers"]))
    return with_layers(fields, ({"mlp": "moe"} if layers is None or i in layers else {} for i in numbers), moe=moe)


def read_experts(
    config: ConfigReader, name: str, size: str, top_k: str = "num_experts_per_tok", **more: Any
) -> MoEConfig:
    """Reads a mixture. Three arguments name entries of config.json: `name` the number of experts, `size` the width of
    one, `top_k` the number of experts of a token. more: other fields of MoEConfig."""
    config.choice("hidden_act", ("silu",), "silu")
    count, of_token = config.integer(name), config.integer(top_k)
    if of_token > count:
        refuse(top_k, of_token, f"at most {name}={count}")
    return MoEConfig(count, of_token, config.integer(size), **more)


def sparse_layers(config: ConfigReader) -> set[int]:
    """Every decoder_sparse_step-th layer, but those of mlp_only_layers."""
    step, dense = config.integer("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        refuse("mlp_only_layers", dense, "a list of layers")
    return {i for i in range(config.integer("num_hidden_layers")) if (i + 1) % step == 0 and i not in dense}


def read_qwen_experts(config: ConfigReader, **more: Any) -> MoEConfig:
    config.get("num_experts")
    name = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"  # as transformers 5 writes
    return read_experts(config, name, "moe_intermediate_size", renormalise=config.flag("norm_topk_prob"), **more)


def read_qwen3_moe(config: ConfigReader, generation: Fields) -> Fields:
    window = windows_everywhere(config) if config.flag("use_sliding_window") else {}
    config.get("sliding_window")
    fields = read_decoder(config, generation, qk_norm="head", biases="attention_bias", **window)
    return with_moe(fields, read_qwen_experts(config), sparse_layers(config))


def read_qwen3_vl_moe(config: ConfigReader, generation: Fields) -> Fields:
    fields = read_qwen3_moe(config.replaced(norm_topk_prob=True, use_sliding_window=False), generation)
    return {**fields, "moe": replace(fields["moe"], layout="turned")}


def read_qwen2_moe(config: ConfigReader, generation: Fields) -> Fields:
    """Every second of the first `max_window_layers` layers sees a window, where there are any."""
    first, uses = config.integer("max_window_layers", 28, low=0), config.flag("use_sliding_window")
    window = config.integer("sliding_window", 4096) if uses else config.get("sliding_window") and None
    count = config.integer("num_hidden_layers")
    kinds = [SLIDING if uses and i < first and i % 2 == 0 else FULL for i in range(count)]
    fields = read_decoder(config, generation, qkv_bias=config.flag("qkv_bias", True), kinds=kinds, window=window)
    shared = config.integer("shared_expert_intermediate_size")
    moe = read_qwen_experts(config, shared_size=shared, shared_name="shared_expert", shared_gate=True)
    return with_moe(fields, moe, sparse_layers(config))


def read_mixtral(config: ConfigReader, generation: Fields) -> Fields:
    fields = read_decoder(config, generation, **windows_everywhere(config))
    return with_moe(fields, read_experts(config, "num_local_experts", "intermediate_size"))


def read_granite_moe(config: ConfigReader, generation: Fields) -> Fields:
    moe = read_experts(config, "num_local_experts", "intermediate_size", layout="linears")
    return with_moe(read_granite(config, generation), moe)


def read_granite_moe_shared(config: ConfigReader, generation: Fields) -> Fields:
    fields = read_granite_moe(config, generation)
    return {**fields, "moe": replace(fields["moe"], shared_size=config.integer("shared_intermediate_size", 0, low=0))}


def read_olmoe(config: ConfigReader, generation: Fields) -> Fields:
    moe = read_experts(config, "num_experts", "intermediate_size", renormalise=config.flag("norm_topk_prob"))
    return with_moe(read_decoder(config, generation, biases="attention_bias", qk_norm="width"), moe)


def read_hunyuan_moe(config: ConfigReader, generation: Fields) -> Fields:
    """Reads HunYuan's mixtures, whose checkpoints list by layer what is one number for all layers."""
    for name in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
        numbers = config.get(name)
        if isinstance(numbers, list) and numbers and all(number == numbers[0] for number in numbers):
            config = config.replaced(**{name: numbers[0]})
    size = config.integer("intermediate_size")
    config.require(num_shared_expert=1, moe_intermediate_size=size)
    shared: Fields = {"shared_size": size, "shared_name": "shared_mlp"}
    moe = read_experts(config, "num_experts", "intermediate_size", top_k="moe_topk", **shared)
    return with_moe(read_hunyuan(config, generation), moe)


def read_gpt_oss(config: ConfigReader, generation: Fields) -> Fields:
    """Every second layer sees a window, and all have sinks."""
    windows: Fields = {"kinds": full_every(config, 2), "window": config.integer("sliding_window")}
    fields = read_decoder(config, generation, biases="attention_bias", norm_kind="rms_float32", **windows)
    fields = with_layers(fields, repeat({"has_sinks": True}, len(fields["layers"])))
    switches: Fields = {"activation_limit": config.positive("swiglu_limit", 7.0)}
    switches |= {"activation_alpha": config.positive("swiglu_alpha", 1.702), "layout": "transposed"}
    return with_moe(fields, read_experts(config, "num_local_experts", "intermediate_size", bias=True, **switches))


MIXTRAL_NAMES = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
_GRANITE_NAMES = CheckpointNames(
    {"mlp": "block_sparse_moe", "gate": "router.layer", "down_proj": "output_linear"},
    {"input_linear": ("gate_proj", "up_proj")}, paths={"mlp.shared_experts": "shared_mlp"},
)  # fmt: skip
_GRANITE = {"num_local_experts": 8, "num_experts_per_tok": 2}
_OLMOE = {"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5}
_HUNYUAN_NAMES = CheckpointNames({**HUNYUAN_NAMES.parts, "gate": "gate.wg"})
_HUNYUAN = {"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1}
_QWEN2 = {"num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632}
_QWEN3_VL = {"num_experts": 60, "num_experts_per_tok": 4, "rope_theta": 5e5}
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
    "Qwen3VLMoeTextModel": Family(read_qwen3_vl_moe, defaults=_QWEN3_VL),
    "MixtralForCausalLM": Family(read_mixtral, CheckpointNames(MIXTRAL_NAMES), _MIXTRAL),
    "GraniteMoeForCausalLM": Family(read_granite_moe, _GRANITE_NAMES, _GRANITE),
    "GraniteMoeSharedForCausalLM": Family(read_granite_moe_shared, _GRANITE_NAMES, _GRANITE),
    "OlmoeForCausalLM": Family(read_olmoe, defaults=_OLMOE),
    "HunYuanMoEV1ForCausalLM": Family(read_hunyuan_moe, _HUNYUAN_NAMES, _HUNYUAN),
    "GptOssForCausalLM": Family(read_gpt_oss, CheckpointNames({"gate": "router"}), _GPT_OSS),
}
