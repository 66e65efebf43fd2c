"""config.json of published models: with load_format="dummy" their names need no file, and bench.py knows them."""

from typing import Any


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    }


PUBLISHED_SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, True),
    "Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, True),
    "Qwen3-4B": _qwen3(36, 2560, 9728, 32, True),
    "Qwen3-8B": _qwen3(36, 4096, 12288, 32, False),
    "Qwen3-14B": _qwen3(40, 5120, 17408, 40, False),
    "Qwen3-32B": _qwen3(64, 5120, 25600, 64, False),
}
"""By name."""
