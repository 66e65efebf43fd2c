"""What a family of models is to the engine, and what nearly all of them read alike. No torch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import FULL, RopeConfig
from nanovllm.models.config_reader import ACTIVATIONS, ConfigReader, read_common, read_heads, read_layers
from nanovllm.models.names import CheckpointNames
from nanovllm.models.rope_reader import longest_context, read_rope


@dataclass(frozen=True)
class Family:
    """One architecture: how its config.json is read, how its checkpoint names tensors, and who computes it."""

    read: Callable[[ConfigReader, dict[str, Any]], dict[str, Any]]
    """(config.json, generation_config.json) -> the fields of ModelConfig but `architecture`."""
    names: CheckpointNames = field(default_factory=CheckpointNames)
    defaults: dict[str, Any] = field(default_factory=dict)
    """Entries of config.json that transformers fills in where a checkpoint leaves them out."""
    decoder: str = "nanovllm.models.decoder.DecoderForCausalLM"


def read_decoder(
    config: ConfigReader,
    generation: dict[str, Any],
    *,
    eps: str = "rms_norm_eps",
    hidden_act: str = "hidden_act",
    ropes: dict[str, RopeConfig] | None = None,
    kinds: list[str] | None = None,
    window: int | None = None,
    nope: Iterable[int] = (),
    partial_rope: bool = False,
    **switches: Any,
) -> dict[str, Any]:
    """The fields of ModelConfig, of which `switches` are some. eps, hidden_act: names of entries. ropes: the tables,
    where there is not one for all layers. kinds, window, nope: see read_layers; partial_rope: read_rope."""
    heads, kv_heads, head_dim = read_heads(config)
    tables = ropes or {FULL: read_rope(config, partial=partial_rope)}
    own_tables = len(tables) > 1
    for rope in tables.values():
        if rope.rotary_dim(head_dim) % 2:
            refuse("partial_rotary_factor", rope.partial_rotary_factor, f"an even share of head_dim={head_dim}")
    return {
        **read_common(config, generation, eps),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "layers": read_layers(
            config, head_dim, kv_heads, kinds=kinds, window=window, nope=nope, own_tables=own_tables
        ),
        "ropes": tables,
        "max_position_embeddings": longest_context(config, tables),
        "activation": ACTIVATIONS[config.choice(hidden_act, ACTIVATIONS, "silu")],
        **switches,
    }
