"""How one request is sampled. Frozen and checked when made; no torch."""

from dataclasses import dataclass
from typing import Any

MAX_FLOAT32 = 3.4e38


def _refuse(name: str, value: Any, bound: str) -> None:
    raise ValueError(f"SamplingParams.{name}={value!r}: must be {bound}")


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request; their meaning follows vLLM's, so that they carry over."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy (ties go to the lowest token id)."""
    max_tokens: int = 16
    """Most tokens to generate; fewer where max_model_len or the KV cache ends first."""
    ignore_eos: bool = False
    """True: end-of-text tokens do not end the output."""
    seed: int | None = None
    """Keys this request's draws; default: derived from the engine's seed and the request's number."""

    def __post_init__(self) -> None:
        is_number = isinstance(self.temperature, (int, float)) and not isinstance(self.temperature, bool)
        if not is_number or not 0 <= self.temperature <= MAX_FLOAT32:
            _refuse("temperature", self.temperature, "a finite number >= 0 (of float32's range)")
        if not isinstance(self.max_tokens, int) or isinstance(self.max_tokens, bool) or self.max_tokens < 1:
            _refuse("max_tokens", self.max_tokens, "an integer >= 1")
        is_int = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if self.seed is not None and (not is_int or not -(2**63) <= self.seed < 2**63):
            _refuse("seed", self.seed, "None or a 64-bit integer")
        if not isinstance(self.ignore_eos, bool):
            _refuse("ignore_eos", self.ignore_eos, "True or False")
