"""Families with Mamba-2 beside attention: Nemotron-H and Nemotron 3 (arXiv 2504.03624, 2512.20848), whose layers have
one part, and Granite 4."""

from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import MoEConfig
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.families.llama import read_granite
from nanovllm.models.families.moe import read_experts, with_moe
from nanovllm.models.family import Family, Fields, of_layers, read_decoder, with_layers
from nanovllm.models.names import CheckpointNames

MAMBA, ATTENTION = "mamba", "attention"
_SPELT = {"linear_attention": MAMBA, "full_attention": ATTENTION}
_LETTERS = {"M": MAMBA, "*": ATTENTION, "-": "mlp", "E": "moe"}
"""Kinds of layers in `hybrid_override_pattern`."""


def _kinds(name: str, found: Any, count: int, known: tuple[str, ...]) -> list[str]:
    """Kinds of `count` layers in our spelling, of `known` ones; `found`: the entry `name`."""
    kinds = [_SPELT.get(kind, kind) if isinstance(kind, str) else kind for kind in found] if found else []
    if len(kinds) < count or any(kind not in known for kind in kinds):
        refuse(name, found, f"{count} of {', '.join(map(repr, known))}, one for each layer")
    return kinds[:count]


def _options(heads: int, groups: int, dim: int, state: int, width: int, least: float) -> tuple[Any, ...]:
    """Options of layers/mamba.py."""
    if heads % groups:
        refuse("mamba groups", groups, f"a divisor of {heads} heads")
    if dim % 16 or state < 16 or state & (state - 1):
        refuse("mamba state", [state, dim], "a power of two from 16 on, and heads of a multiple of 16")
    return heads, groups, dim, state, width, least


def _read_nemotron_experts(config: ConfigReader) -> MoEConfig:
    latent_size = config.integer("moe_latent_size", 0, low=0)
    if latent_size:
        config.require(mlp_bias=False)
    config.require(n_group=1, topk_group=1, n_shared_experts=1)
    return read_experts(
        config, "n_routed_experts", "moe_intermediate_size", scoring="sigmoid", gated=False,
        renormalise=config.flag("norm_topk_prob", True), scale=config.positive("routed_scaling_factor", 1.0),
        shared_size=config.integer("moe_shared_expert_intermediate_size"), latent_size=latent_size,
    )  # fmt: skip


def read_nemotron_h(config: ConfigReader, generation: Fields) -> Fields:
    """Each layer is Mamba-2, attention without rotary embedding, an MLP or experts, alone."""
    names = ("layers_block_type", "hybrid_override_pattern")
    by_name = {name: config.get(name) for name in names}
    name = names[0] if by_name[names[0]] else names[1]
    found = by_name[name]
    spelt = [_LETTERS.get(kind, kind) for kind in found] if isinstance(found, str) else found
    count = config.integer("num_hidden_layers", len(spelt or ()))
    kinds = _kinds(name, spelt, count, (*_LETTERS.values(),))
    config.require(
        use_conv_bias=True, mamba_proj_bias=False, attention_bias=False, mamba_hidden_act="silu", residual_in_fp32=False
    )
    config.get("n_routed_experts")  # of layers that may not be there
    moe = _read_nemotron_experts(config) if "moe" in kinds else None
    config = config.replaced(num_hidden_layers=count, hidden_act=config.choice("mlp_hidden_act", ("relu2",), "relu2"))
    fields = read_decoder(
        config, generation, eps="layer_norm_epsilon", norm_kind="rms_float32", gated_mlp=False,
        mlp_bias=config.flag("mlp_bias"), nope=range(count),
    )  # fmt: skip
    options = _options(
        config.integer("mamba_num_heads"), config.integer("n_groups", 8), config.integer("mamba_head_dim"),
        config.integer("ssm_state_size"), config.integer("conv_kernel", 4, low=2),
        config.positive("time_step_min", 0.001),
    )  # fmt: skip
    parts: dict[str, Fields] = {
        MAMBA: {"mixer": "mamba", "mlp": "none", "options": options}, ATTENTION: {"mlp": "none"},
        "mlp": {"mixer": "none"}, "moe": {"mixer": "none", "mlp": "moe"},
    }  # fmt: skip
    return with_layers(fields, (parts[kind] for kind in kinds), moe=moe)


def read_granite4(config: ConfigReader, generation: Fields) -> Fields:
    """Every layer has an MLP, beside experts where there are any."""
    count = config.integer("num_hidden_layers")
    found = config.get("layer_types") or config.get("layers_block_type") or [MAMBA] * count
    kinds = _kinds("layer_types", found, count, (MAMBA, ATTENTION))
    has_rope = config.get("position_embedding_type", "nope")
    if has_rope not in ("rope", "nope"):
        refuse("position_embedding_type", has_rope, "'rope', 'nope' or absent")
    config.get("num_experts_per_tok")  # of those that may not be there
    shared, moe = config.integer("shared_intermediate_size", 1024), None
    if config.integer("num_local_experts", 8, low=0):
        moe = read_experts(config, "num_local_experts", "intermediate_size", layout="linears", shared_size=shared)
    else:
        config = config.replaced(intermediate_size=shared)
    fields = read_granite(config, generation, nope=range(0 if has_rope == "rope" else count))
    fields = fields if moe is None else with_moe(fields, moe)
    if MAMBA not in kinds:
        return fields
    changed = {"mixer": "mamba", "options": _read_granite_mamba(config)}
    return with_layers(fields, (changed if kind == MAMBA else {} for kind in kinds))


def _read_granite_mamba(config: ConfigReader) -> tuple[Any, ...]:
    """Options of layers/mamba.py."""
    config.require(mamba_conv_bias=True, mamba_proj_bias=False)
    limits = config.get("time_step_limit", [0.0, float("inf")])
    if not isinstance(limits, list) or len(limits) != 2 or limits[1] != float("inf"):
        refuse("time_step_limit", limits, "a number and Infinity")
    heads = config.integer("mamba_n_heads", 128)
    inner, dim = config.integer("mamba_expand", 2) * config.integer("hidden_size"), config.get("mamba_d_head", "auto")
    dim = inner // heads if dim == "auto" else config.integer("mamba_d_head")
    if heads * dim != inner:
        refuse("mamba_d_head", dim, f"such that {heads} heads are {inner} wide")
    return _options(
        heads, config.integer("mamba_n_groups", 1), dim, config.integer("mamba_d_state", 256),
        config.integer("mamba_d_conv", 4, low=2), float(limits[0]),
    )  # fmt: skip


_MIXERS = {"mamba": of_layers("mamba", "Mamba2")}
_NEMOTRON_NAMES = CheckpointNames(
    {
        "model": "backbone", "attention_norm": "norm", "mlp_norm": "norm", "self_attn": "mixer", "mlp": "mixer",
        "mamba": "mixer",
    },
    paths={"model.embed_tokens": "model.embeddings", "model.norm": "model.norm_f"}, skipped=("mtp.",),
)  # fmt: skip
_NEMOTRON = {
    "layer_norm_epsilon": 1e-5, "head_dim": 128, "num_key_value_heads": 8, "num_experts_per_tok": 2,
    "n_routed_experts": 8, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
}  # fmt: skip
_GRANITE_NAMES = CheckpointNames(
    {"mlp": "block_sparse_moe", "down_proj": "output_linear"}, {"input_linear": ("gate_proj", "up_proj")},
    paths={
        "mlp.shared_experts": "shared_mlp", "mlp.gate": "mlp.router.layer",
        **{f"mlp.{name}": f"shared_mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    },
)  # fmt: skip
_GRANITE = {"num_local_experts": 8, "num_experts_per_tok": 2}

FAMILIES = {
    "NemotronHForCausalLM": Family(read_nemotron_h, _NEMOTRON_NAMES, _NEMOTRON, _MIXERS),
    "GraniteMoeHybridForCausalLM": Family(read_granite4, _GRANITE_NAMES, _GRANITE, _MIXERS),
}
