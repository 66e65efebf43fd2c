"""Gemma (arXiv 2403.08295), Gemma 2 (arXiv 2408.00118) and the language models of Gemma 3 (arXiv 2503.19786)."""

import math
from typing import Any

from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.family import Family, Fields, full_every, read_decoder
from nanovllm.models.names import SANDWICH_NORMS, CheckpointNames
from nanovllm.models.rope_reader import read_ropes


def _read(config: ConfigReader, generation: Fields, **switches: Any) -> Fields:
    """Norms multiply by 1 + weight in float32; embeddings are scaled by sqrt(hidden_size), rounded."""
    multiplier = math.sqrt(config.integer("hidden_size"))
    return read_decoder(
        config, generation, biases="attention_bias", norm_kind="rms_float32", norm_adds_one=True,
        embedding_multiplier=multiplier, rounds_embedding_multiplier=True, **switches,
    )  # fmt: skip


def read_gemma(config: ConfigReader, generation: Fields) -> Fields:
    if config.get("hidden_activation", config.get("hidden_act")) == "gelu":  # what the first release says and not means
        config = config.replaced(hidden_act="gelu_pytorch_tanh")
    return _read(config, generation)


def read_gemma2(config: ConfigReader, generation: Fields) -> Fields:
    cap = config.optional_positive("attn_logit_softcapping")
    return _read(config, generation, attention_softcap=cap, **_sandwich(config, 2))


def read_gemma3(config: ConfigReader, generation: Fields) -> Fields:
    pattern = config.integer("sliding_window_pattern", 6)
    ropes = read_ropes(config, 1e6, 1e4, scales_sliding=False)
    return _read(config, generation, qk_norm="head", ropes=ropes, **_sandwich(config, pattern))


def _sandwich(config: ConfigReader, pattern: int) -> Fields:
    """Fields of Gemma 2 and 3, where the last layer of every `pattern` sees all keys."""
    config.get("hidden_act")  # which files have too, and nothing uses
    return {
        "hidden_act": "hidden_activation",
        "norm_placement": "sandwich",
        "attention_scale": config.positive("query_pre_attn_scalar", 256) ** -0.5,
        "logits_softcap": config.optional_positive("final_logit_softcapping"),
        "kinds": full_every(config, pattern),
        "window": config.integer("sliding_window"),
    }


_SHARED = {"head_dim": 256, "tie_word_embeddings": True}
_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh"}
_GEMMA2 = {**_SHARED, **_ACTIVATION, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3 = {
    **_SHARED, **_ACTIVATION, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 131072, "sliding_window": 4096,
}  # fmt: skip
_NAMES = CheckpointNames(SANDWICH_NORMS)

FAMILIES = {
    "GemmaForCausalLM": Family(read_gemma, defaults={**_SHARED, "hidden_act": "gelu_pytorch_tanh"}),
    "Gemma2ForCausalLM": Family(read_gemma2, _NAMES, {**_GEMMA2, "sliding_window": 4096}),
    "Gemma3ForCausalLM": Family(read_gemma3, _NAMES, _GEMMA3),
}
