"""What a family of models is to the engine. No torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.names import CheckpointNames


@dataclass(frozen=True)
class Family:
    """One architecture: how its config.json is read, how its checkpoint names tensors, and who computes it."""

    read: Callable[[ConfigReader, dict[str, Any]], dict[str, Any]]
    """(config.json, generation_config.json) -> the fields of ModelConfig but `architecture`."""
    names: CheckpointNames = field(default_factory=CheckpointNames)
    defaults: dict[str, Any] = field(default_factory=dict)
    """Entries of config.json that transformers fills in where a checkpoint leaves them out."""
    decoder: str = "nanovllm.models.decoder.DecoderForCausalLM"
