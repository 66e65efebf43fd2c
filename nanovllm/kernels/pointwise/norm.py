"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), alone and with the residual addition before it.

Rounding is that of Hugging Face's Qwen3RMSNorm: statistics in float32, the normalised value rounded to the model's
dtype, and only then multiplied by the weight. One program reduces a whole row in a shape that depends on H alone, so a
row's result is the same bits whatever the number of rows.
"""

import torch

from nanovllm.kernels.base.padded_rows import empty_rows
from nanovllm.kernels.base.pdl import pdl_options
from nanovllm.kernels.base.triton_import import tl, triton

PDL_ROWS = 128
PDL_ROWS_SMALL = 256
"""Up to so many rows, or so many where the hidden size is at most 2048, this kernel is launched dependently. A
compromise over 8B and 0.6B: it starts early behind a product of our own, but behind one of cuBLAS, which lets nothing
start early, a dependent launch is 0.5 us slower than an ordinary one, and which of the two comes before depends on
projection and rows (decode_rule.py). On 0.6B nearly all are our own."""


@triton.jit
def _rms_norm_kernel(
    X, RESIDUAL, WEIGHT, OUT, x_stride, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row `program_id` of rms_norm, of add_rms_norm with ADD. RESIDUAL and OUT are contiguous, and so is X where it is
    PARTS float32 matrices to add up."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    weight = tl.load(WEIGHT + cols, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(X + row * x_stride + cols, mask=mask, other=0.0)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            at = X + (part * tl.num_programs(0) + row) * HIDDEN + cols
            x += tl.load(at, mask=mask, other=0.0)
        x = x.to(OUT.dtype.element_ty)
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
    num_rows, hidden = x.shape[-2:]
    block = triton.next_power_of_2(hidden)
    parts = x.shape[0] if x.dim() == 3 else 1
    most_pdl_rows = PDL_ROWS if hidden > 2048 else PDL_ROWS_SMALL
    if num_rows:
        _rms_norm_kernel[(num_rows,)](
            x,
            x if residual is None else residual,
            weight,
            out,
            x.stride(-2),
            eps,
            HIDDEN=hidden,
            BLOCK=block,
            ADD=residual is not None,
            PARTS=parts,
            num_warps=min(max(block // (1024 if parts == 1 else 512), 1), 4 if parts == 1 else 8),
            **pdl_options(x.device, num_rows <= most_pdl_rows),
        )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Triton version of rms_norm_reference; rows of x may be strided, `out` is contiguous and may be x."""
    if out is None:
        out = empty_rows(x.shape[0], x.shape[1], x.dtype, x.device)
    return _launch(x, None, weight, eps, out)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton version of add_rms_norm_reference; rows of x may be strided, parts of it are contiguous as residual is."""
    out = empty_rows(residual.shape[0], residual.shape[1], residual.dtype, residual.device)
    return _launch(x, residual, weight, eps, out), residual


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, H], weight [H] -> x / sqrt(mean(x ** 2) + eps) * weight, [T, H] in x's dtype; x is left alone."""
    x32 = x.float()
    inverse_rms = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    normed = weight * (x32 * inverse_rms).to(x.dtype)
    return normed if out is None else out.copy_(normed)


def add_up(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 [parts, T, hidden] -> their sum, rounded once, [T, hidden]; parts are added in order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(residual + x), residual + x), each [T, H]. The sum replaces `residual` in place; x is left alone.

    x may also be float32 [parts, T, H]: a product of which each part summed some columns (decode.py); their sum is
    rounded to residual's dtype before it is added.
    """
    if x.dim() == 3:
        x = add_up(x, residual.dtype)
    residual.add_(x)
    return rms_norm_reference(residual, weight, eps), residual
