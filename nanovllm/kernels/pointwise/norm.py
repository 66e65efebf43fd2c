"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467) and LayerNorm (Ba et al., arXiv 1607.06450), alone and with the
residual addition before it.

Rounding is that of Hugging Face's models, which differ in it (Norm.kind). One program reduces a whole row in a shape
that depends on H alone, so a row's result is the same bits whatever the number of rows.
"""

from typing import NamedTuple

import torch

from nanovllm.kernels.base.device import pdl_options, start_early
from nanovllm.kernels.base.padded_rows import empty_rows
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.fp8.quantize import empty_rows_for, store_rounded
from nanovllm.kernels.fp8.reference import GROUP, quantize_rows_reference
from nanovllm.kernels.plan.rules import norm_starts_early


class Norm(NamedTuple):
    """Norm of a row: its weight, epsilon, kind and bias. Statistics are in float32."""

    weight: torch.Tensor
    """[H], in the model's dtype, of kind "rms_float32" in float32: kernels that multiply tell the two by it."""
    eps: float
    kind: str = "rms"
    """"rms": the normalised row is rounded to the model's dtype, then times weight and rounded again; "rms_float32":
    times weight in float32, then rounded; "layer": LayerNorm, in float32, then rounded."""
    bias: torch.Tensor | None = None
    """[H], added before the rounding."""


_NONE = Norm(None, 0.0)  # type: ignore[arg-type]
MOST_PARTS = 16
"""Maximum sums over parts of K, or results of experts, that are added up here."""


@triton.jit
def in_pairs(parts, sum_dtype: tl.constexpr):
    """The sum of a tuple of up to MOST_PARTS float32 tiles: of neighbours, then of these sums, and so on, so that a
    group's sum is the same whether its members come one by one or added up already. Each sum of two is rounded to
    sum_dtype. Of an odd number the last one goes up a level as it is."""
    for _ in tl.static_range(4):
        sums = ()
        for i in tl.static_range((len(parts) + 1) // 2):
            if 2 * i + 1 < len(parts):
                sums = sums + ((parts[2 * i] + parts[2 * i + 1]).to(sum_dtype).to(tl.float32),)
            else:
                sums = sums + (parts[2 * i],)
        parts = sums
    return parts[0]


@triton.jit
def _load_row(POINTER, cols, mask):
    """A row of float32; where there is none, a number that is not used."""
    row = 0.0
    if POINTER is not None:
        row = tl.load(POINTER + cols, mask=mask, other=0.0).to(tl.float32)
    return row


@triton.jit
def load_sum(
    X, stride, cols, mask, PARTS: tl.constexpr, dtype: tl.constexpr, sum_dtype: tl.constexpr = tl.float32
):  # fmt: skip
    """A row of X; where it has PARTS, `stride` apart, their sum, rounded to dtype; see in_pairs."""
    x = tl.load(X + cols, mask=mask, other=0.0)
    if PARTS > 1:
        parts = (x.to(tl.float32),)
        for part in tl.static_range(1, PARTS):
            parts = parts + (tl.load(X + part * stride + cols, mask=mask, other=0.0).to(tl.float32),)
        x = in_pairs(parts, sum_dtype).to(dtype)
    return x


@triton.jit
def sum_in_pairs(x):
    """The sum of x [a power of two] of pairs, then of pairs of these sums, and so on: the same bits in every kernel,
    however many threads hold it. Neighbours, which are mostly one thread's, come first, then halves."""
    for level in tl.static_range(16):
        if x.shape[0] > 1:
            if level < 3:
                x = tl.sum(tl.reshape(x, [x.shape[0] // 2, 2]), 1)
            else:
                x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2]), 0)
    return tl.sum(x, 0)


@triton.jit
def norm_row(x, weight, bias, eps, mask, HIDDEN: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr):
    """One row x [BLOCK] normalised, in x's dtype; see Norm."""
    x32 = x.to(tl.float32)
    if KIND == "layer":
        x32 = tl.where(mask, x32 - sum_in_pairs(x32) / HIDDEN, 0.0)
    normed = x32 * tl.rsqrt(sum_in_pairs(x32 * x32) / HIDDEN + eps)
    if KIND == "rms":
        # A product of two bfloat16 is exact in float32, so this rounds once, as a bfloat16 product does.
        normed = normed.to(x.dtype).to(tl.float32)
    normed = normed * weight
    if HAS_BIAS:
        normed += bias
    return normed.to(x.dtype)


@triton.jit(do_not_specialize=["scale_stride"])
def _norm_kernel(
    X, RESIDUAL, WEIGHT, BIAS, OUT, SCALES, AFTER_WEIGHT, AFTER_BIAS, SCALAR, x_stride, scale_stride, eps, after_eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, KIND: tl.constexpr, AFTER_KIND: tl.constexpr,
    MULTIPLIER: tl.constexpr, PARTS: tl.constexpr, ROUND_SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row `program_id` of add_norms, without the addition where not ADD. X [rows, HIDDEN], rows x_stride apart, or
    PARTS contiguous matrices to add up; RESIDUAL and OUT [rows, HIDDEN], contiguous; weights and biases [HIDDEN]. What
    is None is not there: AFTER_WEIGHT, biases, SCALAR [1], and WEIGHT where OUT is not wanted. Where there are SCALES
    [groups of HIDDEN, scale_stride], OUT is rounded to e4m3 (kernels/fp8/)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    weight, bias = _load_row(WEIGHT, cols, mask), _load_row(BIAS, cols, mask)
    after_weight, after_bias = _load_row(AFTER_WEIGHT, cols, mask), _load_row(AFTER_BIAS, cols, mask)
    start_early(PDL)
    part_stride = tl.num_programs(0).to(tl.int64) * HIDDEN
    dtype: tl.constexpr = RESIDUAL.dtype.element_ty
    x = load_sum(X + row * x_stride, part_stride, cols, mask, PARTS, dtype, dtype if ROUND_SUMS else tl.float32)
    if AFTER_WEIGHT is not None:
        x = norm_row(x, after_weight, after_bias, after_eps, mask, HIDDEN, AFTER_KIND, AFTER_BIAS is not None)
    if ADD:
        if MULTIPLIER != 1.0:
            x = (x.to(tl.float32) * MULTIPLIER).to(x.dtype)
        residual = tl.load(RESIDUAL + row * HIDDEN + cols, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        if SCALAR is not None:
            x = (x.to(tl.float32) * tl.load(SCALAR).to(tl.float32)).to(x.dtype)
        tl.store(RESIDUAL + row * HIDDEN + cols, x, mask=mask)
    if WEIGHT is not None:
        normed = norm_row(x, weight, bias, eps, mask, HIDDEN, KIND, BIAS is not None)
        if SCALES is not None:
            store_rounded(tl.where(mask, normed.to(tl.float32), 0.0), OUT, SCALES, row, 0, scale_stride, HIDDEN, BLOCK)
        else:
            tl.store(OUT + row * HIDDEN + cols, normed, mask=mask)


def add_norms(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, after: Norm | None = None,
    multiplier: float = 1.0, round_sums: bool = False, rounds: bool = False, scalar: torch.Tensor | None = None,
) -> tuple[torch.Tensor | FP8Rows, torch.Tensor]:  # fmt: skip
    """(norm(new residual), new residual = scalar * (residual + multiplier * after(x))), each [T, H].

    The sum replaces `residual` in place. Without a residual x is the new one, as it is. Without `norm` both results are
    the new residual. x may also be [parts, T, H], a GEMM's sums over parts of its columns (kernels/gemm/dense.py) or
    the results of a token's experts, whose float32 sum is rounded to residual's dtype before it is added; with
    `round_sums` so is the sum of any two (kernels/gemm/fixed_order.py). Rows of x may be strided, parts of it are
    contiguous as residual is. rounds: the normalised rows are then rounded to e4m3 (kernels/fp8/). scalar: [1], of
    residual's dtype, by which its sum is multiplied when it is rounded.
    """
    new = x if residual is None else residual
    num_rows, hidden = new.shape
    if norm is None and residual is None:
        return new, new
    out: torch.Tensor | FP8Rows = new
    block, values, scales, stride = triton.next_power_of_2(hidden), new, None, 0
    if norm is not None and rounds:
        block = max(block, GROUP)
        out = empty_rows_for(num_rows, hidden, new.dtype, new.device)
        values, scales, stride = out.values, out.scales, out.scales.stride(1)
    elif norm is not None:
        out = values = empty_rows(num_rows, hidden, new.dtype, new.device)
    parts = x.shape[0] if x.dim() == 3 else 1
    norm, after = norm or _NONE, after or _NONE
    if num_rows:
        _norm_kernel[(num_rows,)](
            x, new, norm.weight, norm.bias, values, scales, after.weight, after.bias, scalar, x.stride(-2), stride,
            norm.eps, after.eps, HIDDEN=hidden, BLOCK=block, ADD=residual is not None, KIND=norm.kind,
            AFTER_KIND=after.kind, MULTIPLIER=multiplier, PARTS=parts, ROUND_SUMS=round_sums,
            num_warps=min(max(block // (1024 if parts == 1 else 512), 1), 4 if parts == 1 else 8),
            # A norm's result is rounded before it is added: no multiply-add in bfloat16 may join the two.
            enable_fp_fusion=after is _NONE and multiplier == 1.0,
            **pdl_options(x.device, norm_starts_early(num_rows, hidden)),
        )  # fmt: skip
    return out, new


def add_up(parts: torch.Tensor, dtype: torch.dtype, round_sums: bool = False) -> torch.Tensor:
    """[parts, T, hidden] -> their float32 sum, rounded once, or with `round_sums` the sum of any two to the parts'
    dtype, [T, hidden]; added in pairs, as in_pairs does."""
    sums = list(parts if round_sums else parts.float())
    while len(sums) > 1:
        sums = [sum(sums[i + 1 : i + 2], sums[i]) for i in range(0, len(sums), 2)]
    return sums[0].to(dtype)


def norm_reference(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """x [T, H] -> normalised [T, H] in x's dtype; see Norm."""
    x32 = x.float()
    if norm.kind == "layer":
        x32 = x32 - x32.mean(-1, keepdim=True)
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + norm.eps)
    if norm.kind == "rms":
        return norm.weight * normed.to(x.dtype)
    normed = normed * norm.weight.float()
    return (normed if norm.bias is None else normed + norm.bias.float()).to(x.dtype)


def add_norms_reference(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, after: Norm | None = None,
    multiplier: float = 1.0, round_sums: bool = False, rounds: bool = False, scalar: torch.Tensor | None = None,
) -> tuple[torch.Tensor | FP8Rows, torch.Tensor]:  # fmt: skip
    """Plain twin of `add_norms`."""
    if residual is None:
        residual = x
    else:
        if x.dim() == 3:
            x = add_up(x, residual.dtype, round_sums)
        y = x if after is None else norm_reference(x, after)
        residual.add_(y if multiplier == 1.0 else y * multiplier)
        if scalar is not None:
            residual.mul_(scalar)
    if norm is None:
        return residual, residual
    normed = norm_reference(residual, norm)
    return quantize_rows_reference(normed) if rounds else normed, residual
