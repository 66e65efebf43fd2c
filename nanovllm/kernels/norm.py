"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), alone and with the residual addition before it.

Rounding is that of Hugging Face's Qwen3RMSNorm: statistics in float32, the normalised value rounded to the model's dtype,
and only then multiplied by the weight.
"""

import torch


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, H], weight [H] -> x / sqrt(mean(x ** 2) + eps) * weight, [T, H] in x's dtype; x is left alone."""
    x32 = x.float()
    inverse_rms = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    normed = weight * (x32 * inverse_rms).to(x.dtype)
    return normed if out is None else out.copy_(normed)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(residual + x), residual + x), each [T, H]. The sum replaces `residual` in place; x is left alone."""
    residual.add_(x)
    return rms_norm_reference(residual, weight, eps), residual
