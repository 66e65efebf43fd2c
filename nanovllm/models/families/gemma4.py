"""Gemma 4 and the text of Gemma 4 Unified: layers that see all keys have wider heads, and fewer of them for keys."""

import math
from dataclasses import replace
from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import FULL, SLIDING, LayerSpec
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.families.moe import read_experts
from nanovllm.models.family import Family, Fields, full_every, read_decoder
from nanovllm.models.names import SANDWICH_NORMS, CheckpointNames
from nanovllm.models.rope_reader import read_ropes


def read_gemma4(config: ConfigReader, generation: Fields) -> Fields:
    kinds = config.get("layer_types", full_every(config, 6))
    if isinstance(kinds, list):
        kinds = [*kinds[:-1], FULL]  # as transformers has it
    config.get("hidden_act")  # which nothing uses
    config = config.replaced(hidden_act=None, layer_types=kinds, rope_parameters=config.get("rope_parameters", _ROPES))
    if config.get("use_bidirectional_attention", "vision") != "vision":  # which says nothing of text
        refuse("use_bidirectional_attention", config.get("use_bidirectional_attention"), "'vision' or absent")
    fields = read_decoder(
        config, generation, biases="attention_bias", hidden_act="hidden_activation", qk_norm="head", value_norm=True,
        norm_kind="rms_float32", norm_placement="sandwich", attention_scale=1.0, layer_scalars=True,
        embedding_multiplier=math.sqrt(config.integer("hidden_size")), rounds_embedding_multiplier=True,
        logits_softcap=config.optional_positive("final_logit_softcapping"), kinds=kinds,
        window=config.integer("sliding_window"), ropes=read_ropes(config, 1e4, 1e4, scales_sliding=False),
    )  # fmt: skip
    fields = {**fields, "layers": _sharing_keys(config, fields, _with_heads(config, fields))}
    width, vocab = (config.integer(name, 0, low=0) for name in ("hidden_size_per_layer_input", _OWN_VOCABULARY))
    if width and vocab < fields["vocab_size"]:
        refuse(_OWN_VOCABULARY, vocab, f"at least vocab_size={fields['vocab_size']}")
    if width:
        fields["layer_inputs"] = (len(fields["layers"]), width, vocab)
    for entry in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        config.get(entry)
    return _with_experts(config, fields) if config.flag("enable_moe_block") else fields


def _sharing_keys(config: ConfigReader, fields: Fields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """The last `num_kv_shared_layers` have no keys of their own, and wider MLPs where `use_double_wide_mlp`."""
    count, is_wide = config.integer("num_kv_shared_layers", 0, low=0), config.flag("use_double_wide_mlp")
    first = len(layers) - count
    width = 2 * fields["intermediate_size"] if is_wide else None
    keepers, sharers = layers[: max(0, first)], layers[max(0, first) :]
    if not {(spec.window, spec.head_dim) for spec in sharers} <= {(spec.window, spec.head_dim) for spec in keepers}:
        refuse("num_kv_shared_layers", count, "fewer, for layers of each kind must have keys to share")
    return (*keepers, *(replace(spec, shares_keys=True, intermediate_size=width) for spec in sharers))


def _with_experts(config: ConfigReader, fields: Fields) -> Fields:
    """Every layer has experts beside its MLP."""
    if any(spec.intermediate_size for spec in fields["layers"]):
        refuse("use_double_wide_mlp", True, "False beside experts")
    moe = read_experts(
        config, "num_experts", "moe_intermediate_size", "top_k_experts", activation=fields["activation"],
        logits_scale=fields["hidden_size"] ** -0.5, expert_scales=True, layout="parameters",
    )  # fmt: skip
    return {**fields, "layers": tuple(replace(spec, mlp="dense and moe") for spec in fields["layers"]), "moe": moe}


def _with_heads(config: ConfigReader, fields: Fields) -> tuple[LayerSpec, ...]:
    """`layers` with their heads: `global_head_dim` and `num_global_key_value_heads` (where values are keys) of those
    that see all keys, or what `per_layer_config`, which transformers writes instead, says of some layers."""
    are_keys = config.flag("attention_k_eq_v")
    full = {"head_dim": config.integer("global_head_dim", 512)}
    if are_keys:
        full["num_kv_heads"] = config.integer("num_global_key_value_heads", fields["num_key_value_heads"])
    by_layer = _by_layer(config.get("per_layer_config"))
    layers = []
    for index, spec in enumerate(fields["layers"]):
        if spec.window is None:
            spec = replace(spec, values_are_keys=are_keys, **(full if by_layer is None else {}))
        spec = replace(spec, **(by_layer or {}).get(index, {}))
        if spec.head_dim % 2 or fields["num_attention_heads"] % spec.num_kv_heads:
            heads = f"{spec.num_kv_heads} heads of {spec.head_dim}"
            refuse("per_layer_config", heads, f"even, and divide num_attention_heads={fields['num_attention_heads']}")
        layers.append(spec)
    return tuple(layers)


def _by_layer(given: Any) -> dict[int, dict[str, int]] | None:
    """Fields of LayerSpec by layer."""
    if given is None:
        return None
    names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    found: dict[int, dict[str, int]] = {}
    for index, entries in given.items() if isinstance(given, dict) else [("", given)]:
        if not isinstance(entries, dict) or entries.keys() - names or not str(index).isdecimal():
            refuse("per_layer_config", given, f"by layer an object of {' and '.join(map(repr, names))}")
        reader = ConfigReader(entries)
        found[int(index)] = {names[name]: reader.integer(name) for name in entries}
    return found


_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_OWN_VOCABULARY = "vocab_size_per_layer_input"
_DEFAULTS = {
    "vocab_size": 262144, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 131072, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "sliding_window": 512,
}  # fmt: skip
_NORMS = {
    "mlp.norm": "pre_feedforward_layernorm", "mlp.experts_norm": "pre_feedforward_layernorm_2",
    "mlp.out_norm": "post_feedforward_layernorm_1", "mlp.experts_out_norm": "post_feedforward_layernorm_2",
}
_ROUTER = {
    "mlp.router_norm.weight": "router.scale", "mlp.gate.weight": "router.proj.weight",
    "mlp.gate.per_expert_scale": "router.per_expert_scale", "mlp.experts": "experts",
}
_NAMES = CheckpointNames(SANDWICH_NORMS, paths={**_NORMS, **_ROUTER})
FAMILIES = {
    "Gemma4ForCausalLM": Family(
        read_gemma4, _NAMES, {**_DEFAULTS, "hidden_size_per_layer_input": 256, _OWN_VOCABULARY: 262144}
    ),
    "Gemma4UnifiedForCausalLM": Family(
        read_gemma4, _NAMES, {**_DEFAULTS, "sliding_window": 1024, "max_position_embeddings": 262144}
    ),
}
