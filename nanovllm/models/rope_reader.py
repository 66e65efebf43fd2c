"""Rotary embeddings in config.json: `rope_parameters` (transformers 5; of the model, or of each kind of layer), or
`rope_theta` + `rope_scaling` (before)."""

import math
from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import FULL, SLIDING, RopeConfig
from nanovllm.models.config_reader import ConfigReader

KINDS = ("default", "linear", "yarn", "llama3", "longrope", "proportional")
_NUMBERS = ("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor")


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
    rope = ConfigReader(raw)
    kind = rope.choice("rope_type", (*KINDS, "mrope"), rope.get("type", "default"))
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
        mscale, all_dim = rope.optional_positive("mscale"), rope.optional_positive("mscale_all_dim")
        if mscale and all_dim and "attention_factor" not in given:
            given["attention_factor"] = _mscale(given["factor"], mscale) / _mscale(given["factor"], all_dim)
    if kind == "longrope":
        given["short_factor"], given["long_factor"] = _factors(rope, "short_factor"), _factors(rope, "long_factor")
        given.setdefault("original_max_position_embeddings", config.integer("max_position_embeddings"))
        longest = config.integer("max_position_embeddings") / given["original_max_position_embeddings"]
        given["factor"] = given.get("factor", longest)
    share = rope.positive("partial_rotary_factor", 1.0)
    if share > 1 or (share < 1 and not partial and kind != "proportional"):
        refuse("partial_rotary_factor", share, "at most 1" if partial else "1 or absent in this architecture")
    return RopeConfig(rope.positive("rope_theta", 0.0), kind, partial_rotary_factor=share, **given)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factors(rope: ConfigReader, name: str) -> tuple[float, ...]:
    found = rope.get(name)
    numbers = isinstance(found, list) and all(isinstance(x, (int, float)) and x > 0 for x in found)
    if not numbers:
        refuse(f"rope {name}", found, "a list of numbers > 0")
    return tuple(map(float, found))


def longest_context(config: ConfigReader, ropes: dict[str, RopeConfig]) -> int:
    """max_position_embeddings, or what YaRN extends it to."""
    longest = config.integer("max_position_embeddings")
    for rope in ropes.values():
        if rope.kind == "yarn" and rope.original_max_position_embeddings:
            longest = max(longest, int(rope.original_max_position_embeddings * rope.factor))
    return longest
