"""Families with recurrent layers beside attention: Qwen3-Next, and Qwen3.5 and 3.6, dense and with experts."""

from dataclasses import replace
from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import FULL
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.families.moe import read_qwen_experts, sparse_layers, with_moe
from nanovllm.models.family import Family, Fields, read_decoder
from nanovllm.models.names import CheckpointNames

LINEAR = "linear_attention"


def _gated_delta_net(*args: Any) -> Any:
    from nanovllm.layers.delta import GatedDeltaNet

    return GatedDeltaNet(*args)


def _read_hybrid(config: ConfigReader, generation: Fields, by_key_head: bool = False) -> Fields:
    """Every fourth layer has attention, whose output is gated by a part of the query's projection."""
    count, period = config.integer("num_hidden_layers"), config.integer("full_attention_interval", 4)
    kinds = config.get("layer_types") or [FULL if (i + 1) % period == 0 else LINEAR for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) < count or any(kind not in (FULL, LINEAR) for kind in kinds):
        refuse("layer_types", kinds, f"{count} of {FULL!r} and {LINEAR!r}, one for each layer")
    config.require("attn_output_gate", True)
    key_heads, value_heads = config.integer("linear_num_key_heads", 16), config.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        refuse("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads={key_heads}")
    net = (
        key_heads, value_heads, config.integer("linear_key_head_dim", 128),
        config.integer("linear_value_head_dim", 128),
        config.integer("linear_conv_kernel_dim", 4, low=2), by_key_head,
    )  # fmt: skip
    fields = read_decoder(
        config, generation, biases="attention_bias", qk_norm="head", partial_rope=True, norm_kind="rms_float32",
        norm_adds_one=True, attention_gate="sigmoid", gate_in_queries=True,
    )  # fmt: skip
    layers = (
        spec if kind == FULL else replace(spec, mixer="delta", options=net)
        for spec, kind in zip(fields["layers"], kinds, strict=False)
    )
    return {**fields, "layers": tuple(layers)}


def read_qwen3_5(config: ConfigReader, generation: Fields) -> Fields:
    return _read_hybrid(config, generation)


def _with_experts(fields: Fields, config: ConfigReader) -> Fields:
    shared = config.integer("shared_expert_intermediate_size", 512)
    config = config.replaced(norm_topk_prob=config.flag("norm_topk_prob", True))
    moe = read_qwen_experts(config, shared_size=shared, shared_name="shared_expert", shared_gate=True)
    return with_moe(fields, moe, sparse_layers(config))


def read_qwen3_5_moe(config: ConfigReader, generation: Fields) -> Fields:
    size = config.get("intermediate_size") or config.get("moe_intermediate_size")
    return _with_experts(_read_hybrid(config.replaced(intermediate_size=size), generation), config)


def read_qwen3_next(config: ConfigReader, generation: Fields) -> Fields:
    return _with_experts(_read_hybrid(config, generation, by_key_head=True), config)


_NAMES = CheckpointNames(skipped=("mtp.",))
_MIXERS = {"delta": _gated_delta_net}
_ROPE = {"partial_rotary_factor": 0.25}
_NEXT = {**_ROPE, "num_experts": 512, "num_experts_per_tok": 10}
_MOE = {**_ROPE, "num_experts": 256, "num_experts_per_tok": 8}

FAMILIES = {
    "Qwen3NextForCausalLM": Family(read_qwen3_next, _NAMES, _NEXT, _MIXERS),
    "Qwen3_5ForCausalLM": Family(read_qwen3_5, _NAMES, _ROPE, _MIXERS),
    "Qwen3_5MoeForCausalLM": Family(read_qwen3_5_moe, _NAMES, _MOE, _MIXERS),
}
