"""OLMo 2 (arXiv 2501.00656) and OLMo 3: norms after each block, and one over all queries and one over all keys."""

from typing import Any

from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.family import Family, Fields, full_every, read_decoder
from nanovllm.models.names import POST_NORMS, CheckpointNames
from nanovllm.models.rope_reader import read_ropes


def read_olmo2(config: ConfigReader, generation: Fields, **more: Any) -> Fields:
    switches: Fields = {"norm_kind": "rms_float32", "norm_placement": "post", "qk_norm": "width", "float_rope": True}
    return read_decoder(config, generation, biases="attention_bias", **switches, **more)


def read_olmo3(config: ConfigReader, generation: Fields) -> Fields:
    """Three of four layers see a window; only the others' rotary embedding is scaled."""
    ropes, window = read_ropes(config, 5e5, 5e5, scales_sliding=True), config.integer("sliding_window")
    return read_olmo2(config, generation, ropes=ropes, kinds=full_every(config, 4), window=window)


_NAMES = CheckpointNames(POST_NORMS)
FAMILIES = {
    "Olmo2ForCausalLM": Family(read_olmo2, _NAMES, {"rms_norm_eps": 1e-5}),
    "Olmo3ForCausalLM": Family(read_olmo3, _NAMES, {"rms_norm_eps": 1e-5, "sliding_window": 4096}),
}
