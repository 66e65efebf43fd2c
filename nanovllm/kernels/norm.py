"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), alone and with the residual addition before it.

Rounding is that of Hugging Face's Qwen3RMSNorm: statistics in float32, the normalised value rounded to the model's
dtype, and only then multiplied by the weight. One program reduces a whole row in a shape that depends on H alone, so a
row's result is the same bits whatever the number of rows.
"""

import torch

from nanovllm.kernels.triton_import import tl, triton


@triton.jit
def _rms_norm_kernel(
    X, RESIDUAL, WEIGHT, OUT, x_stride, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    """Row `program_id` of rms_norm, of add_rms_norm with ADD. RESIDUAL and OUT are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0)
    weight = tl.load(WEIGHT + cols, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(RESIDUAL + row * HIDDEN + cols, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(RESIDUAL + row * HIDDEN + cols, x, mask=mask)
    x32 = x.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x32 * x32, 0) / HIDDEN + eps)
    normed = (x32 * inverse_rms).to(x.dtype)
    # A product of two bfloat16 is exact in float32, so this rounds once, as a bfloat16 product does.
    product = (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    tl.store(OUT + row * HIDDEN + cols, product, mask=mask)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> torch.Tensor:
    num_rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    if num_rows:
        _rms_norm_kernel[(num_rows,)](
            x,
            x if residual is None else residual,
            weight,
            out,
            x.stride(0),
            eps,
            HIDDEN=hidden,
            BLOCK=block,
            ADD=residual is not None,
            num_warps=min(max(block // 1024, 1), 4),
        )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Triton version of rms_norm_reference; rows of x may be strided, `out` is contiguous and may be x."""
    return _launch(x, None, weight, eps, torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton version of add_rms_norm_reference; rows of x may be strided, residual is contiguous."""
    return _launch(x, residual, weight, eps, torch.empty_like(residual)), residual


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
