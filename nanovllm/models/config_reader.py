"""Reading config.json: values checked by name, and a refusal of every entry that matters and that no one has read."""

from collections.abc import Iterable
from typing import Any

from nanovllm.errors import is_integer, is_number, near_miss, refuse
from nanovllm.model_config import FULL

_FLAGS = (
    "alibi", "attention_bias", "attention_out_bias", "attn_output_gate", "gating", "mlp_bias", "use_bias",
    "use_bidirectional_attention", "use_qk_norm", "use_sliding_window",
)  # fmt: skip
_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
_FACTORS = ("embedding_multiplier", "logit_scale", "logits_scaling", "partial_rotary_factor", "residual_multiplier")
_OTHERS = (
    "attention_multiplier", "attn_logit_softcapping", "clip_qkv", "final_logit_softcapping", "hidden_activation",
    "layer_types", "no_rope_layers", "per_layer_config", "query_pre_attn_scalar", "quantization_config",
    "rope_local_base_freq", "rope_scaling", "sliding_window", "sliding_window_pattern",
)  # fmt: skip
CHANGES_RESULT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_FLAGS, (False,)), **dict.fromkeys(_COUNTS, (0,)), **dict.fromkeys(_FACTORS, (1.0,)),
    **dict.fromkeys(_OTHERS, ()), "hidden_act": ("silu",), "is_causal": (True,),
}  # fmt: skip
"""Entries that change what a model computes -> the values with which they do not, besides null. A family that does not
read such an entry does not serve it."""


class ConfigReader:
    """One config.json, or one dict in it. A null counts as absent, as transformers has it."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.was_read: set[str] = set()
        """Entries that a family has asked for."""

    def replaced(self, **entries: Any) -> "ConfigReader":
        """Reader of the same config.json with other values, where an entry means something else than it says."""
        other = ConfigReader({**self.raw, **entries})
        other.was_read = self.was_read
        return other

    def get(self, name: str, default: Any = None) -> Any:
        self.was_read.add(name)
        value = self.raw.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, low: int = 1) -> int:
        value = self.get(name, default)
        if value is None:
            raise ValueError(f"config.json: {name!r} is missing")
        if not is_integer(value) or value < low:
            refuse(name, value, f"an integer >= {low}")
        return value

    def positive(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not is_number(value) or value <= 0:
            refuse(name, value, "a finite number > 0")
        return float(value)

    def optional_positive(self, name: str) -> float | None:
        return None if self.get(name) is None else self.positive(name, 0.0)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            refuse(name, value, "True or False")
        return value

    def choice(self, name: str, choices: Iterable[str], default: str | None = None) -> str:
        value, known = self.get(name, default), list(choices)
        if value not in known:
            refuse(name, value, ("one of " if len(known) > 1 else "") + ", ".join(map(repr, known)))
        return value

    def by_layer(self, name: str, default: list[str], known: Iterable[str]) -> list[str]:
        """Returns one of `known` for each layer; the entry may have more, where fewer layers were asked for."""
        count, found, known = self.integer("num_hidden_layers"), self.get(name, default), list(known)
        if not isinstance(found, list) or len(found) < count or any(kind not in known for kind in found):
            refuse(name, found, f"{count} of {' and '.join(map(repr, known))}, one for each layer")
        return found[:count]

    def require(self, **entries: Any) -> None:
        """Raises ValueError where one of these entries is there with another value."""
        for name, value in entries.items():
            if (found := self.get(name, value)) != value:
                refuse(name, found, f"{value!r} or absent")

    def finish(self) -> None:
        """Raises ValueError for an entry that changes the result and was not read."""
        for name, neutral in CHANGES_RESULT.items():
            value = self.raw.get(name)
            if name == "layer_types" and isinstance(value, list) and value == [FULL] * max(1, len(value)):
                continue
            if name not in self.was_read and value is not None and value not in neutral:
                bounds = [*map(repr, neutral), "absent"]
                refuse(name, value, " or ".join(bounds) + " (others are not supported)")


def check_overrides(names: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for one of the `names` in hf_overrides that would change nothing."""
    known = {*known, "architectures", "model_type", "text_config"}
    for name in names:
        if name not in known:
            hint = near_miss(str(name), known)
            raise ValueError(f"hf_overrides: {name!r} is no entry of this model's config.json{hint}")


def end_of_text(generation: Any, config: Any, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a text: those of generation_config.json where it has any, else config.json's; each may be one
    number or a list. Raises ValueError for what is no id of the vocabulary."""
    found = config if generation is None else generation
    ids = () if found is None else tuple(found) if isinstance(found, (list, tuple)) else (found,)
    for token_id in ids:
        if not is_integer(token_id) or not 0 <= token_id < vocab_size:
            refuse("eos_token_id", token_id, f"an integer in 0..{vocab_size - 1}")
    return ids
