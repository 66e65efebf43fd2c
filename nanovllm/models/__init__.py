"""Architectures by the name in the checkpoint's `architectures`."""

from nanovllm.models.qwen3 import Qwen3ForCausalLM

ARCHITECTURES: dict[str, type[Qwen3ForCausalLM]] = {"Qwen3ForCausalLM": Qwen3ForCausalLM}


def model_class(architecture: str) -> type[Qwen3ForCausalLM]:
    """Raises ValueError for an architecture that is not here."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architectures={architecture!r}: must be one of {', '.join(map(repr, ARCHITECTURES))}")
    return ARCHITECTURES[architecture]
