"""Phi-3, Phi-3.5 and Phi-4 (arXiv 2404.14219, 2412.08905, 2503.01743): Llama with fused projections and LongRoPE."""

from nanovllm.models.config_reader import ConfigReader
from nanovllm.models.families.llama import windows_everywhere
from nanovllm.models.family import Family, Fields, read_decoder
from nanovllm.models.names import GATE_UP, PRE_NORMS, QKV, CheckpointNames


def read_phi3(config: ConfigReader, generation: Fields) -> Fields:
    """Older checkpoints call LongRoPE "su" or "yarn"."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.raw.get(name)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            config = config.replaced(**{name: {**rope, "rope_type": "longrope"}})
    return read_decoder(config, generation, partial_rope=True, **windows_everywhere(config))


FAMILIES = {
    "Phi3ForCausalLM": Family(read_phi3, CheckpointNames(PRE_NORMS, {**QKV, **GATE_UP}), {"rms_norm_eps": 1e-5})
}
