"""Rotary position embedding (Su et al., arXiv 2104.09864): the table of angles, with its scaled variants."""

import math
from dataclasses import dataclass

import torch

from nanovllm.layers.context import ModelContext
from nanovllm.model_config import RopeConfig


@dataclass(frozen=True)
class PositionTables:
    """Tables by position, shared by all layers; as long as the engine's longest context."""

    cos_sin: dict[tuple[str, int], torch.Tensor]
    """Tables of cos and sin by the name of the rope and head_dim; see cos_sin_table."""
    query_scale: torch.Tensor | None
    """float32 [max_position]: factor on queries."""

    @classmethod
    def of(cls, context: ModelContext) -> "PositionTables":
        config, length, device = context.config, context.max_model_len, context.device
        scale = None
        if config.query_scaling is not None:
            beta, original = config.query_scaling
            positions = torch.arange(length, dtype=torch.float32, device="cpu")
            scale = (1 + beta * torch.log1p(torch.floor(positions / original))).to(device)
        kinds = {(spec.rope, spec.head_dim) for spec in config.layers if spec.rope is not None}
        tables = {
            (name, head_dim): cos_sin_table(
                config.ropes[name], head_dim, length, config.max_position_embeddings, device
            )
            for name, head_dim in sorted(kinds)
        }
        return cls(tables, scale)


def cos_sin_table(
    rope: RopeConfig, head_dim: int, num_positions: int, max_position_embeddings: int, device: torch.device
) -> torch.Tensor:
    """float32 [num_positions, rotary_dim]: cosines of the rotary_dim / 2 angles, then their sines.

    num_positions: the engine's longest context, which decides between longrope's two lists once for all requests.
    """
    frequencies, scale = _inverse_frequencies(rope, head_dim, num_positions, max_position_embeddings)
    # float32 angles, as the checkpoints were trained with: a more exact angle would be a different model
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32, device="cpu"), frequencies.float())
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1).to(device)


def _inverse_frequencies(
    rope: RopeConfig, head_dim: int, num_positions: int, max_position_embeddings: int
) -> tuple[torch.Tensor, float]:
    """float64 [rotary_dim / 2] radians per position, and the factor on cos and sin."""
    dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    plain = rope.theta**-exponents
    original = rope.original_max_position_embeddings or max_position_embeddings
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, dim, original)
    if rope.kind == "llama3":
        return _llama3(rope, plain, original), 1.0
    if rope.kind == "longrope":
        return _longrope(rope, plain, num_positions, original)
    if rope.kind == "proportional":
        rotated = int(rope.partial_rotary_factor * head_dim // 2)
        plain[rotated:] = 0.0
        return plain / rope.factor, 1.0
    return plain, 1.0


def _yarn(rope: RopeConfig, plain: torch.Tensor, dim: int, original_length: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., arXiv 2309.00071, section 3.2): slow dimensions are interpolated, fast ones kept, and a ramp
    joins them between the dimensions that turn beta_slow and beta_fast times within the original length."""

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    positions = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
    ramp = ((positions - low) / (high - low or 0.001)).clamp(0, 1)
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return plain / rope.factor * ramp + plain * (1 - ramp), scale


def _llama3(rope: RopeConfig, plain: torch.Tensor, original_length: int) -> torch.Tensor:
    """Llama 3.1 (arXiv 2407.21783, section 3.4.2): waves longer than the original length / low_freq_factor are
    stretched, those shorter than original length / high_freq_factor kept, and a ramp joins them."""
    turns = original_length * plain / (2 * math.pi)
    ramp = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return plain / rope.factor * (1 - ramp) + plain * ramp


def _longrope(
    rope: RopeConfig, plain: torch.Tensor, num_positions: int, original_length: int
) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al., arXiv 2402.13753): a searched factor for each dimension, of two lists."""
    factors = rope.long_factor if num_positions > original_length else rope.short_factor
    if len(factors) != len(plain):
        raise ValueError(f"rope long_factor, short_factor: must have {len(plain)} numbers each, found {len(factors)}")
    scale = rope.attention_factor
    if scale is None:
        scale = math.sqrt(1 + math.log(rope.factor) / math.log(original_length)) if rope.factor > 1 else 1.0
    return plain / torch.tensor(factors, dtype=torch.float64, device="cpu"), scale
