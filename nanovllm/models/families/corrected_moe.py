"""Families whose experts are chosen by score + a correction (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): GLM-4.5
(arXiv 2508.06471), MiniMax-M2, dots.1 (arXiv 2506.05767), Solar Open, Hy3, K-EXAONE, Laguna, Trinity, and Ernie 4.5."""

import math

from nanovllm.errors import is_integer, refuse
from nanovllm.model_config import FULL, SLIDING, MoEConfig
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.families.llama import read_ernie4_5, read_llama
from nanovllm.models.families.moe import MIXTRAL_NAMES, read_experts, with_moe
from nanovllm.models.families.others import exaone_layers
from nanovllm.models.family import Family, Fields, full_every, read_decoder, with_layers
from nanovllm.models.names import POST_NORMS, CheckpointNames
from nanovllm.models.rope_reader import read_ropes


def read_grouped(
    config: ConfigReader, name: str, shared: str, scale: str = "routed_scaling_factor", scoring: str = "sigmoid"
) -> MoEConfig:  # fmt: skip
    """Reads a mixture whose experts may be chosen by groups. The arguments but `scoring` name entries of config.json:
    `name` the number of experts, `shared` the number of experts that every token goes to, `scale` the factor on the
    weights of the chosen ones."""
    width = config.integer("moe_intermediate_size")
    moe = read_experts(
        config, name, "moe_intermediate_size", scoring=scoring, renormalise=config.flag("norm_topk_prob", True),
        num_groups=config.integer("n_group", 1), top_groups=config.integer("topk_group", 1),
        scale=config.positive(scale, 1.0), shared_size=config.integer(shared, 1) * width,
    )  # fmt: skip
    if moe.num_experts % moe.num_groups or moe.num_experts // moe.num_groups * moe.top_groups < moe.top_k:
        bound = f"a divisor of {name}={moe.num_experts} whose topk_group groups hold {moe.top_k} experts"
        refuse("n_group", moe.num_groups, bound)
    return moe


def dense_first(config: ConfigReader, default: int) -> set[int]:
    """Indices of the layers with experts: all but the first `first_k_dense_replace` (of which `default` is the number
    where config.json has none), unless `mlp_layer_types` says otherwise."""
    count, dense = config.integer("num_hidden_layers"), config.integer("first_k_dense_replace", default, low=0)
    kinds = ["dense"] * dense + ["sparse"] * (count - dense)
    kinds = config.by_layer("mlp_layer_types", kinds, ("dense", "sparse"))
    return {index for index, kind in enumerate(kinds) if kind == "sparse"}


def read_glm4_moe(config: ConfigReader, generation: Fields) -> Fields:
    qk_norm = "head" if config.flag("use_qk_norm") else None
    bias = config.flag("attention_bias")
    fields = read_decoder(config, generation, qkv_bias=bias, qk_norm=qk_norm, partial_rope=True)
    return with_moe(fields, read_grouped(config, "n_routed_experts", "n_shared_experts"), dense_first(config, 1))


def read_minimax_m2(config: ConfigReader, generation: Fields) -> Fields:
    """Reads MiniMax-M2, whose checkpoints give a head's rotated dimensions as a number, and name what transformers
    always does."""
    config.require(
        use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True,
        shared_intermediate_size=0,
    )  # fmt: skip
    rotated = config.get("rotary_dim")
    if rotated is not None:
        share = config.integer("rotary_dim") / config.integer("head_dim")
        config = config.replaced(partial_rotary_factor=share)
    moe = read_experts(config, "num_local_experts", "intermediate_size", scoring="sigmoid")
    return with_moe(read_decoder(config, generation, qk_norm="width", partial_rope=True), moe)


def read_dots1(config: ConfigReader, generation: Fields) -> Fields:
    """The layers from `max_window_layers` on see a window."""
    window, first = config.get("sliding_window"), config.integer("max_window_layers", 62, low=0)
    kinds = [SLIDING if window and i >= first else FULL for i in range(config.integer("num_hidden_layers"))]
    switches: Fields = {"kinds": kinds, "window": window, "qk_norm": "head", "biases": "attention_bias"}
    config = config.replaced(norm_topk_prob=config.flag("norm_topk_prob"))
    moe = read_grouped(config, "n_routed_experts", "n_shared_experts")
    return with_moe(read_decoder(config, generation, **switches), moe, dense_first(config, 0))


def read_solar_open(config: ConfigReader, generation: Fields) -> Fields:
    """No layer is dense, so a file may leave the width of one out."""
    width = config.get("intermediate_size", config.integer("moe_intermediate_size"))
    config = config.replaced(intermediate_size=width)
    fields = read_decoder(config, generation, qkv_bias=config.flag("attention_bias"), partial_rope=True)
    return with_moe(fields, read_grouped(config, "n_routed_experts", "n_shared_experts"))


def read_hy_v3(config: ConfigReader, generation: Fields) -> Fields:
    config.get("enable_moe_fp32_combine")  # sums are float32 here in any case
    config.require(mlp_bias=False)
    moe = read_grouped(config, "num_experts", "num_shared_experts", "router_scaling_factor")
    return with_moe(read_llama(config, generation, qk_norm="head"), moe, dense_first(config, 1))


def read_exaone_moe(config: ConfigReader, generation: Fields) -> Fields:
    fields = read_decoder(config, generation, qk_norm="head", **exaone_layers(config))
    return with_moe(fields, read_grouped(config, "num_experts", "num_shared_experts"), dense_first(config, 1))


def read_laguna(config: ConfigReader, generation: Fields) -> Fields:
    """Reads Laguna: attention's output is gated by head or by element; layers may differ in their number of query
    heads."""
    count, of_all = config.integer("num_hidden_layers"), config.integer("num_attention_heads")
    gating = config.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        refuse("gating", gating, "True, 'per-head' or 'per-element'")
    heads = config.get("num_attention_heads_per_layer", [of_all] * count)
    kv_heads = config.integer("num_key_value_heads")
    if not isinstance(heads, list) or len(heads) < count or not all(is_integer(n) and n % kv_heads == 0 for n in heads):
        refuse("num_attention_heads_per_layer", heads, f"{count} multiples of num_key_value_heads={kv_heads}")
    config.require(moe_apply_router_weight_on_input=False, moe_router_logit_softcapping=0.0)
    fields = read_decoder(
        config, generation, qk_norm="head", biases="attention_bias", kinds=[FULL] * count, attention_gate="softplus",
        gate_per_head=gating != "per-element", window=config.integer("sliding_window"),
        ropes=read_ropes(config, 5e5, 1e4, scales_sliding=False, partial=True),
    )  # fmt: skip
    fields = with_layers(fields, ({"num_heads": None if n == of_all else n} for n in heads[:count]))
    moe = read_experts(
        config, "num_experts", "moe_intermediate_size", scoring="sigmoid", shared_name="shared_expert",
        scale=config.positive("moe_routed_scaling_factor", 1.0),
        shared_size=config.integer("shared_expert_intermediate_size"),
    )  # fmt: skip
    return with_moe(fields, moe, dense_first(config, 1))


def read_afmoe(config: ConfigReader, generation: Fields) -> Fields:
    """Reads Trinity: attention's output is gated by element, layers that see all keys have no rotary embedding, and
    the first `num_dense_layers` have no experts."""
    config.require(score_func="sigmoid", route_norm=True, n_group=1)
    dense, hidden = config.integer("num_dense_layers", 1, low=0), config.integer("hidden_size")
    fields = read_decoder(
        config, generation, biases="attention_bias", attention_gate="sigmoid", nope_full=True, qk_norm="head",
        norm_kind="rms_float32", norm_placement="sandwich", window=config.integer("sliding_window"),
        kinds=full_every(config, config.integer("global_attn_every_n_layers", 4)),
        embedding_multiplier=math.sqrt(hidden) if config.flag("mup_enabled") else 1.0,
    )  # fmt: skip
    moe = read_grouped(config, "num_experts", "num_shared_experts", "route_scale")
    return with_moe(fields, moe, set(range(dense, config.integer("num_hidden_layers"))))


def read_ernie4_5_moe(config: ConfigReader, generation: Fields) -> Fields:
    """Softmax scores; every `moe_layer_interval`-th layer of a range has experts."""
    count, width = config.integer("num_hidden_layers"), config.integer("moe_intermediate_size")
    moe = read_experts(
        config, "moe_num_experts", "moe_intermediate_size", top_k="moe_k", scoring="corrected_softmax",
        shared_size=config.integer("moe_num_shared_experts", 2, low=0) * width,
    )  # fmt: skip
    first, last = config.integer("moe_layer_start_index", 1, low=0), config.integer("moe_layer_end_index", -1, low=-1)
    step = config.integer("moe_layer_interval", 1)
    layers = {i for i in range(first, count if last == -1 else last + 1) if (i + 1) % step == 0}
    config.require(use_bias=False)
    config.get("moe_norm_min")  # 1e-12, which no sum of the best scores comes near
    return with_moe(read_ernie4_5(config, generation), moe, layers)


_CORRECTION = "mlp.gate.e_score_correction_bias"
_GLM4_NAMES = CheckpointNames(skips_next_layer=True)
_GLM4 = {
    "n_routed_experts": 128, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
}  # fmt: skip
_MINIMAX_NAMES = CheckpointNames(MIXTRAL_NAMES, paths={_CORRECTION: "block_sparse_moe.e_score_correction_bias"})
_MINIMAX = {
    "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8, "rope_theta": 5e6, "num_key_value_heads": 8,
}  # fmt: skip
_DOTS1 = {"sliding_window": 4096}
_SOLAR = {
    "head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
}  # fmt: skip
_HY3_NAMES = CheckpointNames(
    {"gate": "router.gate", "shared_experts": "shared_mlp"}, skips_next_layer=True,
    paths={_CORRECTION: "mlp.expert_bias"}, read_as={"shared_experts": "shared_mlp"},
)  # fmt: skip
_HY3 = {
    "head_dim": 128, "num_experts": 192, "num_experts_per_tok": 8, "rope_theta": 11158840.0, "rms_norm_eps": 1e-5,
    "router_scaling_factor": 2.826, "num_key_value_heads": 8,
}  # fmt: skip
_LAGUNA_NAMES = CheckpointNames(
    paths={_CORRECTION: "mlp.experts.e_score_correction_bias"}, read_as={"shared_experts": "shared_expert"},
)  # fmt: skip
_LAGUNA = {
    "head_dim": 128, "num_key_value_heads": 8, "num_experts": 256, "num_experts_per_tok": 8, "sliding_window": 512,
    "shared_expert_intermediate_size": 512,
    "rope_parameters": {FULL: {"rope_theta": 5e5, "partial_rotary_factor": 0.5}, SLIDING: {"rope_theta": 1e4}},
}  # fmt: skip
_AFMOE_NAMES = CheckpointNames(
    {**POST_NORMS, "mlp_norm": "pre_mlp_layernorm", "mlp_out_norm": "post_mlp_layernorm", "gate": "router.gate"},
    paths={_CORRECTION: "mlp.expert_bias", "self_attn.g_proj": "self_attn.gate_proj"},
)
_AFMOE = {
    "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2, "rms_norm_eps": 1e-5,
    "sliding_window": 1024,
}  # fmt: skip
_EXAONE_NAMES = CheckpointNames(paths={_CORRECTION: "mlp.e_score_correction_bias"}, skipped=("mtp.",))
_EXAONE = {
    "rms_norm_eps": 1e-5, "sliding_window": 4096, "num_experts": 64, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024, "routed_scaling_factor": 2.5, "num_key_value_heads": 32,
}  # fmt: skip
_ERNIE_NAMES = CheckpointNames(paths={_CORRECTION: "mlp.moe_statics.e_score_correction_bias"}, skipped=("model.mtp_",))
_ERNIE = {
    "rope_theta": 5e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "moe_num_experts": 64, "moe_k": 6,
    "moe_intermediate_size": 1536, "num_key_value_heads": 4,
}  # fmt: skip

FAMILIES = {
    "Glm4MoeForCausalLM": Family(read_glm4_moe, _GLM4_NAMES, _GLM4),
    "MiniMaxM2ForCausalLM": Family(read_minimax_m2, _MINIMAX_NAMES, _MINIMAX),
    "Dots1ForCausalLM": Family(read_dots1, defaults=_DOTS1),
    "SolarOpenForCausalLM": Family(read_solar_open, defaults=_SOLAR),
    "HYV3ForCausalLM": Family(read_hy_v3, _HY3_NAMES, _HY3),
    "ExaoneMoeForCausalLM": Family(read_exaone_moe, _EXAONE_NAMES, _EXAONE),
    "AfmoeForCausalLM": Family(read_afmoe, _AFMOE_NAMES, _AFMOE),
    "LagunaForCausalLM": Family(read_laguna, _LAGUNA_NAMES, _LAGUNA),
    "Ernie4_5_MoeForCausalLM": Family(read_ernie4_5_moe, _ERNIE_NAMES, _ERNIE),
}
