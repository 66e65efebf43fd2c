"""Rotary embeddings in config.json: `rope_parameters` (transformers 5; of the model, or of each kind of layer), or
`rope_theta` + `rope_scaling` (before)."""

import math
from typing import Any

from nanovllm.errors import near_miss, refuse
from nanovllm.model_config import FULL, SLIDING, RopeConfig
from nanovllm.models.config_reader import ConfigReader

ROPE_TYPES = ("default", "linear", "yarn", "llama3", "longrope", "proportional")
_NUMBERS = ("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor")
_TYPELESS = {"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "finetuned"}
"""Entries that need no type: the first two hold for every one, the others change nothing in text."""
_KNOWN = {
    *_NUMBERS, *_TYPELESS, "rope_type", "type", "original_max_position_embeddings", "truncate", "mscale",
    "mscale_all_dim", "short_factor", "long_factor", "alpha", "llama_4_scaling_beta", "max_position_embeddings",
}  # fmt: skip
"""All entries that are read, here or by a family. As in transformers, a type may come with those of another one."""


def rope_entries(config: ConfigReader) -> dict[str, Any]:
    """Rope entries of the model's one table; the older spelling wins, as in transformers."""
    newer, older = config.get("rope_parameters", {}), config.get("rope_scaling", {})
    found = older or newer
    _require_dict(found)
    if {FULL, SLIDING} & found.keys():
        refuse("rope_parameters", found, "one table for all layers")
    return found


def read_rope(config: ConfigReader, partial: bool = False) -> RopeConfig:
    """Reads the model's one table. `partial`: the family may rotate a part of each head; others refuse that."""
    plain = {"rope_theta": config.get("rope_theta", 1e4), "partial_rotary_factor": config.get("partial_rotary_factor")}
    return _table({**plain, **rope_entries(config)}, config, partial)


def read_ropes(
    config: ConfigReader, theta: float, sliding_theta: float, scales_sliding: bool, partial: bool = False
) -> dict[str, RopeConfig]:
    """A table for each kind of layer. In the older spelling `rope_scaling` is for the full layers alone, and the
    sliding ones have `rope_local_base_freq`."""
    nested, scaling = config.get("rope_parameters", {}), config.get("rope_scaling", {})
    _require_dict(nested)
    if nested.get("rope_type") == "default":  # as transformers fills it in, which says nothing
        nested = {kind: table for kind, table in nested.items() if kind != "rope_type"}
    if nested.keys() - {FULL, SLIDING}:
        refuse("rope_parameters", nested, f"a table for each of {FULL!r} and {SLIDING!r}")
    full, sliding = (nested.get(kind) or {} for kind in (FULL, SLIDING))
    for table in (scaling, full, sliding):
        _require_dict(table)
    full = {"rope_theta": config.get("rope_theta", theta), **full, **scaling}
    local = config.get("rope_local_base_freq", config.get("rope_theta", theta) if scales_sliding else sliding_theta)
    local_table = _table({"rope_theta": local, **sliding}, config, partial)
    return {FULL: _table(full, config, partial), SLIDING: local_table}


def _require_dict(scaling: Any) -> None:
    if not isinstance(scaling, dict):
        refuse("rope_scaling", scaling, "a dict")


def _table(raw: dict[str, Any], config: ConfigReader, partial: bool = False) -> RopeConfig:
    rope = ConfigReader({name: value for name, value in raw.items() if value is not None})
    if unknown := sorted(rope.raw.keys() - _KNOWN):
        hint = near_miss(unknown[0], _KNOWN)
        raise ValueError(f"rope_scaling: {unknown[0]!r} is no entry of a rotary embedding here{hint}")
    default = None if rope.raw.keys() - _TYPELESS else "default"
    kind = rope.choice("rope_type", (*ROPE_TYPES, "mrope"), rope.get("type", default))
    if kind == "mrope":  # three positions a token, which are one in text
        kind = "default"
    if kind in ("linear", "yarn", "llama3") and rope.get("factor") is None:
        refuse("rope_scaling", raw, f"given a 'factor' for rope type {kind!r}")
    given: dict[str, Any] = {name: rope.positive(name, 0.0) for name in _NUMBERS if rope.get(name) is not None}
    original = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if original is not None and kind != "default":
        rope.positive("original_max_position_embeddings", original)
        given["original_max_position_embeddings"] = original
    if kind == "yarn":
        given["truncate"] = rope.flag("truncate", True)
        mscale, all_dim = (rope.get(name) and rope.positive(name, 0.0) for name in ("mscale", "mscale_all_dim"))
        if mscale and all_dim and "attention_factor" not in given:
            given["attention_factor"] = mscale_of(given["factor"], mscale) / mscale_of(given["factor"], all_dim)
    if kind == "longrope":
        given["short_factor"], given["long_factor"] = _factors(rope, "short_factor"), _factors(rope, "long_factor")
        given.setdefault("original_max_position_embeddings", config.integer("max_position_embeddings"))
        longest = config.integer("max_position_embeddings") / given["original_max_position_embeddings"]
        given["factor"] = given.get("factor", longest)
    share = rope.positive("partial_rotary_factor", 1.0)
    if share > 1 or (share < 1 and not partial and kind != "proportional"):
        refuse("partial_rotary_factor", share, "at most 1" if partial else "1 or absent in this architecture")
    return RopeConfig(rope.positive("rope_theta", 0.0), kind, partial_rotary_factor=share, **given)


def mscale_of(factor: float, mscale: float) -> float:
    """YaRN's factor on what is rotated, of a context that is extended by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factors(rope: ConfigReader, name: str) -> tuple[float, ...]:
    found = rope.get(name)
    numbers = isinstance(found, list) and all(isinstance(x, (int, float)) and x > 0 for x in found)
    if not numbers:
        refuse(f"rope {name}", found, "a list of numbers > 0")
    return tuple(map(float, found))


def query_scaling(config: ConfigReader, rope: RopeConfig) -> tuple[float, int | None] | None:
    """ModelConfig.query_scaling of a model whose queries grow past the original context, as Llama 4's do."""
    beta = rope_entries(config).get("llama_4_scaling_beta")
    return (beta, rope.original_max_position_embeddings) if beta else None


def longest_context(config: ConfigReader, ropes: dict[str, RopeConfig]) -> int:
    """max_position_embeddings, or what YaRN or linear scaling extends it to. With a table for each kind of layer (Gemma
    3) it has been multiplied by the linear factor already."""
    longest = config.integer("max_position_embeddings")
    for rope in ropes.values():
        if rope.kind == "yarn" and rope.original_max_position_embeddings:
            longest = max(longest, int(rope.original_max_position_embeddings * rope.factor))
        if rope.kind == "linear" and len(ropes) == 1:
            longest = max(longest, int(longest * rope.factor))
    return longest
