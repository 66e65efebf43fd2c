"""Qwen2 (arXiv 2407.10671; Qwen2.5 has its architecture) and Qwen3 (arXiv 2505.09388), dense."""

from nanovllm.model_config import FULL, SLIDING
from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.family import Family, Fields, read_decoder


def read_qwen2(config: ConfigReader, generation: Fields) -> Fields:
    return read_decoder(config, generation, qkv_bias=True, **_windows(config))


def read_qwen3(config: ConfigReader, generation: Fields) -> Fields:
    return read_decoder(config, generation, qk_norm="head", biases="attention_bias", **_windows(config))


def _windows(config: ConfigReader) -> Fields:
    """Fields of windows: with `use_sliding_window`, layers from `max_window_layers` on see one."""
    size, first = config.get("sliding_window", 4096), config.integer("max_window_layers", 28, low=0)
    window = size if config.flag("use_sliding_window") else None
    count = config.integer("num_hidden_layers")
    return {"kinds": [SLIDING if window and i >= first else FULL for i in range(count)], "window": window}


FAMILIES = {
    "Qwen2ForCausalLM": Family(read_qwen2),
    "Qwen3ForCausalLM": Family(read_qwen3, defaults={"head_dim": 128}),
}
