"""The option speculative_config: vLLM's names, taken or refused. No torch."""

from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple

from nanovllm.errors import is_integer, is_number, near_miss, refuse, shown


class Method(NamedTuple):
    """A way to draft tokens."""

    entries: tuple[str, ...]
    """Entries of speculative_config that go with it, beside those of all."""
    looks_up: bool = False
    """Whether tokens are looked up in the text; else a model drafts."""
    reads_pairs: bool = False
    """Whether what a model keeps of a token, to draft, goes by the token behind it, too."""
    layers_by_pass: float = 0.0
    """Layers of Qwen3-8B that take as long to read as what drafts all tokens, with its output head, as published."""
    layers_by_token: float = 0.0
    """Likewise, what each token takes besides."""


METHODS = {
    "ngram": Method(("prompt_lookup_max", "prompt_lookup_min"), looks_up=True),
    "eagle3": Method(("model", "quantization"), reads_pairs=True, layers_by_token=1.7),
    "dflash": Method(("model", "quantization"), layers_by_pass=8.0),  # five layers, and a head of the whole vocabulary
    "dspark": Method(("model", "quantization"), layers_by_pass=11.0),
    "mtp": Method((), reads_pairs=True, layers_by_token=4.2),  # one layer, and a head of the whole vocabulary
}
_ALIASES = {f"{family}_mtp": "mtp" for family in ("deepseek", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5")}
MAX_TOKENS = 15
"""Maximum tokens that are drafted at a time."""
MAX_MATCHED = 15
_MOST_PLACES = 256
_NAMES = ("method", "num_speculative_tokens", "synthetic_acceptance_rates")


class Speculation(NamedTuple):
    """Drafting, as the user asks for it."""

    method: str
    num_tokens: int
    """Tokens drafted at a time."""
    lookup: tuple[int, int]
    """Minimum and maximum of a text's last tokens that are looked up earlier in it."""
    rates: tuple[float, ...] | None
    """Share of cases in which each drafted token counts as right, whatever it is; None: where it is."""
    model: str | None = None
    """Folder or hub id of the model that drafts; None: tokens are looked up, or layers of the model itself draft."""
    quantization: str | None = None
    """"fp8": its layers and an output head of its own are rounded to e4m3 while they load."""


def most_places(max_num_seqs: int, tokens_per_step: int) -> int:
    """Maximum rows of one token on the device, in steps with several places a decode too: with more than so many,
    drafts cost more than they bring."""
    return max(max_num_seqs, min(max_num_seqs * tokens_per_step, _MOST_PLACES))


def shared_lanes(head_dim: int, fp8: bool, fixed_order: bool) -> int:
    """Number of query heads, of several places of a row, that a tile of decode attention has beside its keys without
    spilled registers (measured by compiling for 9.0). fp8: of the keys; fixed_order: exact bits."""
    if fixed_order:
        return 16 if head_dim <= 128 else 1
    return 16 if fp8 or head_dim > 128 else 32


def parse_speculation(config: Mapping[str, Any]) -> Speculation:
    """Raises ValueError naming an entry of speculative_config that is not taken."""
    method = config.get("method")
    method = _ALIASES.get(method, method) if isinstance(method, str) else method
    if not isinstance(method, str) or method not in METHODS:
        refuse("speculative_config: method", method, " or ".join(map(repr, METHODS)))
    names = _NAMES + METHODS[method].entries
    for name in config:
        if name not in names:
            raise ValueError(f"speculative_config: {shown(name)} is not taken{near_miss(str(name), names)}")
    model = config.get("model")
    if "model" in names and not (isinstance(model, (str, PathLike)) and str(model)):
        refuse("speculative_config: model", model, "a path or hub id")
    if (quantization := config.get("quantization")) not in (None, "fp8"):
        refuse("speculative_config: quantization", quantization, "None or 'fp8'")
    count = _integer(config, "num_speculative_tokens", None, 1, MAX_TOKENS)
    longest = _integer(config, "prompt_lookup_max", 4, 1, MAX_MATCHED)
    shortest = _integer(config, "prompt_lookup_min", min(2, longest), 1, longest)
    rates = config.get("synthetic_acceptance_rates")
    if rates is not None:
        are_numbers = isinstance(rates, (list, tuple)) and len(rates) == count and all(map(is_number, rates))
        if not are_numbers or [1, *rates, 0] != sorted([1, *rates, 0], reverse=True):
            bound = f"{count} numbers from 1 to 0, none above the one before"
            refuse("speculative_config: synthetic_acceptance_rates", rates, bound)
        rates = tuple(map(float, rates))
    model = None if model is None else str(model)
    return Speculation(method, count, (shortest, longest), rates, model, quantization)


def _integer(config: Mapping[str, Any], name: str, default: int | None, least: int, most: int) -> int:
    value = config.get(name, default)
    if not is_integer(value) or not least <= value <= most:
        refuse(f"speculative_config: {name}", value, f"an integer from {least} to {most}")
    return value
