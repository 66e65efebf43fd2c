"""Families with recurrent layers beside attention: Qwen3-Next, Qwen3.5 and 3.6, and OLMo Hybrid (gated delta nets), and
LFM2 (short convolutions, arXiv 2511.23404), dense and with experts."""

from collections.abc import Hashable
from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import FULL
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.families.moe import read_experts, read_qwen_experts, sparse_layers, with_moe
from nanovllm.models.families.others import read_olmo2
from nanovllm.models.family import Family, Fields, of_layers, read_decoder, with_layers
from nanovllm.models.names import POST_NORMS, CheckpointNames
from nanovllm.models.rope_reader import rope_entries

LINEAR = "linear_attention"


def _read_kinds(config: ConfigReader, kinds: list[str], recurrent: str) -> list[str]:
    """Kinds of the layers, FULL or `recurrent`: `layer_types`, else `kinds`."""
    config = config.replaced(layer_types=config.get("layer_types") or kinds)
    return config.by_layer("layer_types", kinds, (FULL, recurrent))


def _with_mixers(fields: Fields, kinds: list[str], mixer: str, options: Hashable, **more: Any) -> Fields:
    """`fields` with this mixer in the layers that have no attention. more: fields of theirs."""
    changed = {"mixer": mixer, "options": options, **more}
    return with_layers(fields, ({} if kind == FULL else changed for kind in kinds))


def _read_net(config: ConfigReader, key_heads: int, value_heads: int, dims: tuple[int, int], *more: Any) -> Hashable:
    """Options of layers/delta.py; sizes are defaults. more: what follows the convolution's width."""
    key_heads = config.integer("linear_num_key_heads", key_heads)
    value_heads = config.integer("linear_num_value_heads", value_heads)
    if value_heads % key_heads:
        refuse("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads={key_heads}")
    names = ("linear_key_head_dim", "linear_value_head_dim")
    found = {name: config.integer(name, default) for name, default in zip(names, dims, strict=True)}
    for name, dim in found.items():
        if dim % 16 or dim > 256:
            refuse(name, dim, "a multiple of 16, at most 256")
    return key_heads, value_heads, *found.values(), config.integer("linear_conv_kernel_dim", 4, low=2), *more


def read_qwen3_5(config: ConfigReader, generation: Fields, layout: str = "joint") -> Fields:
    """Every fourth layer has attention, whose output is gated by a part of the query's projection."""
    count, period = config.integer("num_hidden_layers"), config.integer("full_attention_interval", 4)
    kinds = _read_kinds(config, [FULL if (i + 1) % period == 0 else LINEAR for i in range(count)], LINEAR)
    config.require(attn_output_gate=True)
    fields = read_decoder(
        config, generation, biases="attention_bias", qk_norm="head", partial_rope=True, norm_kind="rms_float32",
        norm_adds_one=True, attention_gate="sigmoid", gate_in_queries=True,
    )  # fmt: skip
    return _with_mixers(fields, kinds, "delta", _read_net(config, 16, 32, (128, 128), layout))


def _with_experts(fields: Fields, config: ConfigReader) -> Fields:
    shared = config.integer("shared_expert_intermediate_size", 512)
    config = config.replaced(norm_topk_prob=config.flag("norm_topk_prob", True))
    moe = read_qwen_experts(config, shared_size=shared, shared_name="shared_expert", shared_gate=True)
    return with_moe(fields, moe, sparse_layers(config))


def read_qwen3_5_moe(config: ConfigReader, generation: Fields) -> Fields:
    size = config.get("intermediate_size") or config.get("moe_intermediate_size")
    return _with_experts(read_qwen3_5(config.replaced(intermediate_size=size), generation), config)


def read_qwen3_next(config: ConfigReader, generation: Fields) -> Fields:
    return _with_experts(read_qwen3_5(config, generation, "by key head"), config)


def read_olmo_hybrid(config: ConfigReader, generation: Fields) -> Fields:
    """Every fourth layer is one of OLMo 2, with norms behind its blocks; the others have norms before them. A
    `rope_theta` that is null stands for no rotary embedding. The epsilon of the nets' norms is no entry."""
    count, heads = config.integer("num_hidden_layers"), config.integer("num_attention_heads")
    kinds = [FULL if i % 4 == 3 or i == count - 1 < 3 else LINEAR for i in range(count)]
    kinds = _read_kinds(config, kinds, LINEAR)
    has_rope = {**config.raw, **rope_entries(config)}.get("rope_theta", 0) is not None
    if not has_rope:
        config = config.replaced(rope_parameters=None)
    fields = read_olmo2(config, generation, nope=range(0 if has_rope else count))
    dim = 3 * fields["hidden_size"] // (4 * config.integer("linear_num_key_heads", heads))
    dims = (dim, 2 * config.integer("linear_key_head_dim", dim))
    most = 2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0
    net = _read_net(config, heads, heads, dims, "apart", most, 1e-5)
    return _with_mixers(fields, kinds, "delta", net, norm_placement="pre")


def _read_lfm2(config: ConfigReader, generation: Fields) -> Fields:
    config.require(conv_bias=False)
    count, full = config.integer("num_hidden_layers"), config.get("full_attn_idxs")
    kinds = [FULL if full is None or i in full else "conv" for i in range(count)]
    kinds = _read_kinds(config, kinds, "conv")
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
    config = config.replaced(tie_word_embeddings=tied)
    fields = read_decoder(config, generation, eps="norm_eps", qk_norm="head")
    return _with_mixers(fields, kinds, "conv", config.integer("conv_L_cache", 3, low=2))


def read_lfm2(config: ConfigReader, generation: Fields) -> Fields:
    """The MLPs are narrower than `intermediate_size` says, by a rule."""
    width = config.integer("block_ff_dim", config.get("intermediate_size", 12288))
    if config.flag("block_auto_adjust_ff_dim", True):
        multiple = config.integer("block_multiple_of", 256)
        width = -(-int(config.positive("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3)) // multiple) * multiple
    return _read_lfm2(config.replaced(intermediate_size=width), generation)


def read_lfm2_moe(config: ConfigReader, generation: Fields) -> Fields:
    """The first `num_dense_layers` have no experts. (transformers adds 1e-6 to the sum that scores are divided by.)"""
    config.require(use_expert_bias=True)
    dense = config.integer("num_dense_layers", 2, low=0)
    moe = read_experts(
        config, "num_experts", "moe_intermediate_size", scoring="sigmoid",
        renormalise=config.flag("norm_topk_prob", True), scale=config.positive("routed_scaling_factor", 1.0),
    )  # fmt: skip
    return with_moe(_read_lfm2(config, generation), moe, set(range(dense, config.integer("num_hidden_layers"))))


def _in_proj(parts: str, name: str) -> dict[str, str]:
    """Paths of checkpoints that have projections to these parts in modules of this name ("{}": the part)."""
    return {f"linear_attn.in_proj_{part}": f"linear_attn.{name.format(part)}" for part in parts}


_NAMES = CheckpointNames(skipped=("mtp.",), paths=_in_proj("qkv", "in_proj_qkv"))
_NEXT_NAMES = CheckpointNames(skipped=("mtp.",), paths=_in_proj("qkvz", "in_proj_qkvz"))
_OLMO_NAMES = CheckpointNames(
    POST_NORMS,
    paths={
        **_in_proj("qkvba", "{}_proj"), **_in_proj("z", "g_proj"), "linear_attn.out_proj": "linear_attn.o_proj",
        "linear_attn.norm": "linear_attn.o_norm",
    },
    read_as={"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"},
)  # fmt: skip
_MIXERS = {"delta": of_layers("delta", "GatedDeltaNet")}
_LFM2_NAMES = CheckpointNames(
    {
        "attention_norm": "operator_norm", "mlp_norm": "ffn_norm", "mlp": "feed_forward", "gate_proj": "w1",
        "up_proj": "w3", "down_proj": "w2", "q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj",
    },
    paths={"model.norm": "model.embedding_norm", "mlp.gate.e_score_correction_bias": "feed_forward.expert_bias"},
)  # fmt: skip
_CONV = {"conv": of_layers("short_conv", "ShortConv")}
_LFM2 = {"norm_eps": 1e-5, "rope_theta": 1e6}
_LFM2_MOE = {**_LFM2, "num_experts": 32, "num_experts_per_tok": 4}
_ROPE = {"partial_rotary_factor": 0.25, "head_dim": 256}
_NEXT = {**_ROPE, "num_experts": 512, "num_experts_per_tok": 10}
_MOE = {**_ROPE, "num_experts": 256, "num_experts_per_tok": 8}

FAMILIES = {
    "Qwen3NextForCausalLM": Family(read_qwen3_next, _NEXT_NAMES, _NEXT, _MIXERS),
    "Qwen3_5ForCausalLM": Family(read_qwen3_5, _NAMES, _ROPE, _MIXERS),
    "Qwen3_5MoeForCausalLM": Family(read_qwen3_5_moe, _NAMES, _MOE, _MIXERS),
    "OlmoHybridForCausalLM": Family(read_olmo_hybrid, _OLMO_NAMES, mixers=_MIXERS),
    "Lfm2ForCausalLM": Family(read_lfm2, _LFM2_NAMES, _LFM2, _CONV),
    "Lfm2MoeForCausalLM": Family(read_lfm2_moe, _LFM2_NAMES, _LFM2_MOE, _CONV),
}
