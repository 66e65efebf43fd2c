"""Rotary position embedding (Su et al., arXiv 2104.09864): the table of angles, with its scaled variants."""

import math

import torch

from nanovllm.config import RopeConfig


def _inverse_frequencies(rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> tuple[torch.Tensor, float]:
    """float64 [head_dim / 2] radians per position, and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    plain = rope.theta**-exponents
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    return _yarn(rope, plain, head_dim, rope.original_max_position_embeddings or max_position_embeddings)


def _yarn(rope: RopeConfig, plain: torch.Tensor, head_dim: int, original_length: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., arXiv 2309.00071, section 3.2): slow dimensions are interpolated, fast ones kept, and a ramp
    joins them between the dimensions that turn beta_slow and beta_fast times within the original length."""

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    positions = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
    ramp = ((positions - low) / max(high - low, 0.001)).clamp(0, 1)
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return plain / rope.factor * ramp + plain * (1 - ramp), scale


def cos_sin_table(
    rope: RopeConfig, head_dim: int, num_positions: int, max_position_embeddings: int, device: torch.device
) -> torch.Tensor:
    """float32 [num_positions, head_dim]: cosines of the head_dim / 2 angles, then their sines."""
    frequencies, scale = _inverse_frequencies(rope, head_dim, max_position_embeddings)
    # float32 angles, as the checkpoints were trained with: a more exact angle would be a different model
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32, device="cpu"), frequencies.float())
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1).to(device)
