"""Families with latent attention (MLA): DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 and R1 (arXiv 2412.19437),
Kimi-K2 (arXiv 2507.20534), GLM-4.7-Flash and Mistral 4."""

from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import FULL, LatentSizes
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.families.corrected_moe import dense_first, read_grouped
from nanovllm.models.families.moe import with_moe
from nanovllm.models.family import Family, Fields, of_layers, read_decoder, with_layers
from nanovllm.models.names import CheckpointNames
from nanovllm.models.rope_reader import mscale_of, query_scaling, read_rope, rope_entries


def _read_latent(config: ConfigReader, generation: Fields, partial: bool = False, **more: Any) -> Fields:
    """Reads all but the experts. YaRN sharpens the scores of all keys, by `mscale_all_dim`. partial: config.json may
    have the rotated part's share of a head. more: fields of ModelConfig."""
    config.require(attention_bias=False, mlp_bias=False, moe_layer_freq=1, index_topk=0)
    heads, rotated = config.integer("num_attention_heads"), config.integer("qk_rope_head_dim", 64)
    nope = config.integer("qk_nope_head_dim", 128)
    rope, raw = read_rope(config, partial), rope_entries(config)
    if (share := rope.partial_rotary_factor) not in (1.0, rotated / (nope + rotated)):
        refuse("partial_rotary_factor", share, "1, or qk_rope_head_dim's share of a head")
    scale = (nope + rotated) ** -0.5
    if rope.kind == "yarn" and raw.get("mscale_all_dim"):
        scale *= mscale_of(rope.factor, raw["mscale_all_dim"]) ** 2
    options = LatentSizes(
        config.integer("q_lora_rank", 0, low=0), config.integer("kv_lora_rank", 512), nope,
        config.integer("v_head_dim", 128), config.flag("rope_interleave", True),
    )  # fmt: skip
    fields = read_decoder(
        config.replaced(head_dim=rotated, num_key_value_heads=heads), generation, attention_scale=scale,
        ropes={FULL: replace(rope, partial_rotary_factor=1.0)}, **more,
    )  # fmt: skip
    return with_layers(fields, repeat({"mixer": "latent", "options": options}, len(fields["layers"])))


def _with_experts(fields: Fields, config: ConfigReader, scoring: str, dense: int = 0) -> Fields:
    """dense: the default of `first_k_dense_replace`."""
    moe = read_grouped(config, "n_routed_experts", "n_shared_experts", scoring=scoring)
    return with_moe(fields, moe, dense_first(config, dense))


def read_deepseek_v3(config: ConfigReader, generation: Fields, dense: int = 3) -> Fields:
    config.require(scoring_func="sigmoid", topk_method="noaux_tc")
    return _with_experts(_read_latent(config, generation), config, "sigmoid", dense)


def read_deepseek_v2(config: ConfigReader, generation: Fields) -> Fields:
    """Experts are chosen of all, or of the groups that have the best ones."""
    config.require(scoring_func="softmax", norm_topk_prob=False)
    of_all = config.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "greedy"
    groups = {"n_group": None, "topk_group": None} if of_all else {}
    config = config.replaced(norm_topk_prob=False, **groups)
    return _with_experts(_read_latent(config, generation), config, "softmax")


def read_mistral4(config: ConfigReader, generation: Fields) -> Fields:
    """Queries grow with the position past the original context, as Ministral 3's do."""
    config.require(n_group=1)
    scaling = query_scaling(config, read_rope(config, partial=True))
    return _with_experts(_read_latent(config, generation, True, query_scaling=scaling), config, "softmax")


_NAMES = CheckpointNames(skips_next_layer=True)
_MIXERS = {"latent": of_layers("latent", "LatentAttention")}
_V2 = {"q_lora_rank": 1536, "n_routed_experts": 64, "n_shared_experts": 2}
_V3 = {
    "q_lora_rank": 1536, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
_GLM = {
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5,
}  # fmt: skip
_YARN128 = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_MISTRAL = {
    "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "n_routed_experts": 128,
    "num_experts_per_tok": 4, "rope_parameters": _YARN128,
}  # fmt: skip

FAMILIES = {
    "DeepseekV2ForCausalLM": Family(read_deepseek_v2, _NAMES, _V2, _MIXERS),
    "DeepseekV3ForCausalLM": Family(read_deepseek_v3, _NAMES, _V3, _MIXERS),
    "Glm4MoeLiteForCausalLM": Family(partial(read_deepseek_v3, dense=1), _NAMES, _GLM, _MIXERS),
    "Mistral4ForCausalLM": Family(read_mistral4, _NAMES, _MISTRAL, _MIXERS),
}
