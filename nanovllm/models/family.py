"""Families of models as the engine sees them, and the configuration entries that nearly all of them read alike. No
torch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from nanovllm.errors import refuse
from nanovllm.model_config import FULL, SLIDING, LayerSpec, RopeConfig
from nanovllm.models.config_reader import ConfigReader, end_of_text
from nanovllm.models.names import CheckpointNames
from nanovllm.models.rope_reader import longest_context, read_rope

Fields = dict[str, Any]
Builder = Callable[..., Any]

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
"""config.json's name -> ours."""


@dataclass(frozen=True)
class Family:
    """One architecture: how its config.json is read, how its checkpoint names tensors, and parts of its own."""

    read: Callable[[ConfigReader, Fields], Fields]
    """(config.json, generation_config.json) -> the fields of ModelConfig but `architecture`."""
    names: CheckpointNames = field(default_factory=CheckpointNames)
    defaults: Fields = field(default_factory=dict)
    """Entries of config.json that transformers fills in where a checkpoint leaves them out."""
    mixers: Mapping[str, Builder] = field(default_factory=dict)
    mlps: Mapping[str, Builder] = field(default_factory=dict)
    """Builders (mixers above, MLPs here) by the names that LayerSpec.mixer and .mlp may have beside those of all
    families; models/decoder.py says how they are called. Those of the package import torch when they are called."""


def read_decoder(
    config: ConfigReader, generation: Fields, *, eps: str = "rms_norm_eps", hidden_act: str = "hidden_act",
    biases: str | None = None, ropes: dict[str, RopeConfig] | None = None, partial_rope: bool = False,
    kinds: list[str] | None = None, window: int | None = None, nope: Iterable[int] = (), nope_full: bool = False,
    **switches: Any,
) -> Fields:  # fmt: skip
    """Reads the fields of ModelConfig that nearly all families have, and adds `switches`, which are some of the others.

    Names of entries: `eps` has the norms' epsilon, `hidden_act` the activation, and `biases`, where given, says whether
    attention's projections have a bias. `ropes` are the rotary tables, where one for all layers is not enough;
    `partial_rope` allows that a part of a head is rotated. `kinds` has FULL or SLIDING for each layer (None: all are
    FULL) and gives way to the entry `layer_types`; `window` is what sliding layers see. Layers in `nope`, and with
    `nope_full` the FULL ones, have no rotary embedding."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    head_dim = config.integer("head_dim", config.integer("hidden_size") // heads)
    if head_dim % 2:
        refuse("head_dim", head_dim, "even, for its halves are rotated")
    ropes = ropes or {FULL: read_rope(config, partial=partial_rope)}
    for rope in ropes.values():
        if rope.rotary_dim(head_dim) % 2:
            refuse("partial_rotary_factor", rope.partial_rotary_factor, f"an even share of head_dim={head_dim}")
    vocab_size = config.integer("vocab_size")
    dtype = config.get("dtype", config.get("torch_dtype", "bfloat16"))
    if dtype not in _DTYPES:
        refuse("config.json: dtype", dtype, "one of " + ", ".join(map(repr, _DTYPES)))
    common = {
        "vocab_size": vocab_size,
        "hidden_size": config.integer("hidden_size"),
        "intermediate_size": config.integer("intermediate_size"),
        "norm_eps": config.positive(eps, 1e-6),
        "tie_word_embeddings": config.flag("tie_word_embeddings"),
        "torch_dtype": dtype,
        "eos_token_ids": end_of_text(generation.get("eos_token_id"), config.get("eos_token_id"), vocab_size),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    count = config.integer("num_hidden_layers")
    kinds = [FULL] * count if kinds is None else config.by_layer("layer_types", kinds, (FULL, SLIDING))
    if SLIDING in kinds and window is None:
        refuse("sliding_window", None, f"an integer >= 1 where a layer is {SLIDING!r}")
    without = {*nope, *(i for i, kind in enumerate(kinds) if nope_full and kind == FULL)}
    tables = [None if i in without else kind if len(ropes) > 1 else FULL for i, kind in enumerate(kinds)]
    layers = (
        LayerSpec(head_dim, kv_heads, window if kind == SLIDING else None, table)
        for kind, table in zip(kinds, tables, strict=True)
    )
    if biases is not None:
        switches = {"qkv_bias": (bias := config.flag(biases)), "o_bias": bias, **switches}
    return {
        **common,
        "layers": tuple(layers),
        "ropes": ropes,
        "max_position_embeddings": longest_context(config, ropes),
        "activation": _ACTIVATIONS[config.choice(hidden_act, _ACTIVATIONS, "silu")],
        **switches,
    }


def of_layers(module: str, name: str) -> Builder:
    """Builder of a class in nanovllm/layers, which is imported when it is called."""
    return lambda *args: getattr(import_module(f"nanovllm.layers.{module}"), name)(*args)


def with_layers(fields: Fields, changes: Iterable[Fields], **more: Any) -> Fields:
    """`fields` with these changes, one for each layer. more: other fields."""
    layers = (replace(spec, **changed) for spec, changed in zip(fields["layers"], changes, strict=True))
    return {**fields, "layers": tuple(layers), **more}


def full_every(config: ConfigReader, period: int) -> list[str]:
    """Kinds of layers: the last of every `period` sees all keys, the others a window."""
    return [SLIDING if (i + 1) % period else FULL for i in range(config.integer("num_hidden_layers"))]
