"""The option speculative_config: vLLM's names, taken or refused. No torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nanovllm.errors import is_integer, is_number, near_miss, refuse, shown

METHODS = ("ngram",)
MAX_TOKENS = 15
"""Maximum tokens that are drafted at a time."""
MAX_MATCHED = 15
_MOST_PLACES = 256
_NAMES = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "synthetic_acceptance_rates")


class Speculation(NamedTuple):
    """Drafting, as the user asks for it."""

    num_tokens: int
    """Tokens drafted at a time."""
    lookup: tuple[int, int]
    """Minimum and maximum of a text's last tokens that are looked up earlier in it."""
    rates: tuple[float, ...] | None
    """Share of cases in which each drafted token counts as right, whatever it is; None: where it is."""


def most_places(max_num_seqs: int, tokens_per_step: int) -> int:
    """Maximum rows of one token on the device, in steps with several places a decode too: with more than so many,
    drafts cost more than they bring."""
    return max(max_num_seqs, min(max_num_seqs * tokens_per_step, _MOST_PLACES))


def parse_speculation(config: Mapping[str, Any]) -> Speculation:
    """Raises ValueError naming an entry of speculative_config that is not taken."""
    for name in config:
        if name not in _NAMES:
            raise ValueError(f"speculative_config: {shown(name)} is not taken{near_miss(str(name), _NAMES)}")
    if config.get("method") not in METHODS:
        refuse("speculative_config: method", config.get("method"), " or ".join(map(repr, METHODS)))
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
    return Speculation(count, (shortest, longest), rates)


def _integer(config: Mapping[str, Any], name: str, default: int | None, least: int, most: int) -> int:
    value = config.get(name, default)
    if not is_integer(value) or not least <= value <= most:
        refuse(f"speculative_config: {name}", value, f"an integer from {least} to {most}")
    return value
