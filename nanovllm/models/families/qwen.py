"""Qwen3, dense (Qwen3 Technical Report, arXiv 2505.09388, section 2): grouped-query attention with QK-norm, SwiGLU,
RMSNorm before each block, embeddings tied to the head in the small sizes."""

from typing import Any

from nanovllm.model_config import FULL, SLIDING
from nanovllm.models.config_reader import ConfigReader, read_common, read_heads, read_layers
from nanovllm.models.family import Family
from nanovllm.models.rope_reader import longest_context, read_rope


def read_qwen3(config: ConfigReader, generation: dict[str, Any]) -> dict[str, Any]:
    heads, kv_heads, head_dim = read_heads(config, 128)
    ropes = {FULL: read_rope(config)}
    return {
        **read_common(config, generation),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "layers": read_layers(config, head_dim, kv_heads, **_windows(config)),
        "ropes": ropes,
        "max_position_embeddings": longest_context(config, ropes),
        "qk_norm": "head",
    }


def _windows(config: ConfigReader) -> dict[str, Any]:
    """Where `use_sliding_window` says so, the layers from `max_window_layers` on see a window."""
    size, first = config.get("sliding_window", 4096), config.integer("max_window_layers", 28, low=0)
    window = size if config.flag("use_sliding_window") else None
    count = config.integer("num_hidden_layers")
    return {"kinds": [SLIDING if window and i >= first else FULL for i in range(count)], "window": window}


FAMILIES = {"Qwen3ForCausalLM": Family(read_qwen3)}
