"""Activations to e4m3, a scale for each token and 128 columns; reference.py says what is computed."""

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options, start_early
from nanovllm.kernels.base.float_order import magnitude
from nanovllm.kernels.base.padded_rows import padded_rows
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.fp8.reference import FP8, GROUP, LARGEST, SMALLEST_MAXIMUM
from nanovllm.kernels.plan.config import TILE_ROWS

_LARGEST: tl.constexpr = tl.constexpr(LARGEST)
_SMALLEST_BITS: tl.constexpr = tl.constexpr(int(torch.tensor(SMALLEST_MAXIMUM).view(torch.int32)))
ROWS_MULTIPLE = 16
"""Multiple of rows for which memory of a group's scales is allocated, so that they may be copied by 16 bytes (4 would
do) and no kernel is compiled once more for rows whose stride is no multiple of 16."""


@triton.jit
def scales_of(magnitudes):
    """int32 [..., n], of `magnitude` -> the scales of groups of n numbers, float32 [...]; NaN where a group has one."""
    largest = tl.maximum(tl.max(magnitudes, axis=-1), _SMALLEST_BITS).to(tl.float32, bitcast=True)
    return tl.div_rn(largest, _LARGEST)


@triton.jit
def group_scales(x):
    """float32 [..., 128] -> the scales of groups [...]."""
    return scales_of(magnitude(x))


@triton.jit
def rounded(x, scale):
    """float32 / scale as e4m3, within its range; NaN stays NaN. The product with the inverse, corrected by its
    remainder, is what div_rn gives (Markstein, IBM J. Res. Dev. 34, 1990), with one division for a group."""
    inverse = tl.div_rn(1.0, scale)
    y = x * inverse
    y = tl.fma(tl.fma(-y, scale, x), inverse, y)
    y = tl.maximum(y, -_LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(y, _LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def store_rounded(y, OUT, SCALES, row, first_col, scale_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Columns from first_col on of row `row`, float32 [BLOCK], to OUT e4m3 [rows, SIZE] and SCALES [groups,
    scale_stride]."""
    GROUPS: tl.constexpr = BLOCK // 128
    group = first_col // 128 + tl.arange(0, GROUPS)
    cols = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    y = tl.reshape(y, [GROUPS, 128])
    scale = group_scales(y)
    tl.store(OUT + row * SIZE + cols, rounded(y, scale[:, None]), mask=cols < SIZE)
    tl.store(SCALES + group * scale_stride + row, scale, mask=group * 128 < SIZE)


@triton.jit
def static_scale(INPUT_SCALE, COUNT: tl.constexpr):
    """The largest of COUNT scales."""
    scale = tl.load(INPUT_SCALE)
    for index in tl.static_range(1, COUNT):
        scale = tl.maximum(scale, tl.load(INPUT_SCALE + index), propagate_nan=tl.PropagateNan.ALL)
    return scale


@triton.jit(do_not_specialize=["scale_stride"])
def _quantize_kernel(
    X, INPUT_SCALE, OUT, SCALES, x_stride, scale_stride,
    K: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Columns `program_id(1)` * BLOCK and on of row `program_id(0)`. SCALES [groups, scale_stride], rows first."""
    row = tl.program_id(0).to(tl.int64)
    GROUPS: tl.constexpr = BLOCK // 128
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    cols = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    start_early(PDL)
    x = tl.load(X + row * x_stride + cols, mask=cols < K, other=0.0).to(tl.float32)
    if COUNT > 0:
        scale = tl.zeros([GROUPS], dtype=tl.float32) + static_scale(INPUT_SCALE, COUNT)
    else:
        scale = group_scales(x)
    tl.store(OUT + row * K + cols, rounded(x, scale[:, None]), mask=cols < K)
    tl.store(SCALES + group * scale_stride + row, scale, mask=group * 128 < K)


def empty_rows_for(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> FP8Rows:
    """Room for activations that a kernel rounds, a group's scales side by side in memory, and for more rows after them.
    """
    padded = -(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE
    scales = torch.empty(-(-columns // GROUP), padded, dtype=torch.float32, device=device)
    whole_tiles = padded_rows(rows, tile=128 if rows > 64 else 64)
    values = torch.empty(max(padded, whole_tiles), columns, dtype=FP8, device=device)
    return FP8Rows(values[:rows], scales[:, :rows].t(), dtype)


def in_groups(x: FP8Rows) -> FP8Rows:
    """Activations with a group's scales side by side in memory, as kernels read them; a copy where a twin made x."""
    if x.scales.stride(0) == 1 and x.scales.stride(1) % ROWS_MULTIPLE == 0:
        return x
    rows = empty_rows_for(x.shape[0], x.shape[1], x.dtype, x.values.device)
    rows.values.copy_(x.values)
    rows.scales.copy_(x.scales)
    return rows


def quantize_rows(x: Tensor, input_scale: Tensor | None = None) -> FP8Rows:
    """Rounds x [T, K], whose rows may be strided. input_scale float32 [count]: the largest is the scale of every group.
    """
    rows, columns = x.shape
    found = empty_rows_for(rows, columns, x.dtype, x.device)
    block = min(1024, triton.next_power_of_2(max(columns, GROUP)))
    count = 0 if input_scale is None else input_scale.numel()
    if rows:
        _quantize_kernel[(rows, triton.cdiv(columns, block))](
            x, x if input_scale is None else input_scale, found.values, found.scales, x.stride(0),
            found.scales.stride(1), K=columns, BLOCK=block, COUNT=count, num_warps=4,
            **pdl_options(x.device, rows <= TILE_ROWS),
        )  # fmt: skip
    return found
