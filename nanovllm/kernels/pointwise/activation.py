"""Pointwise half of an MLP: an activation, gated (Shazeer, arXiv 2002.05202) or not, after the bias where there is one.

Rounding is that of Hugging Face's models: the biased projection, the activation and the product are each rounded.
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.base.activations import gelu_tanh, silu
from nanovllm.kernels.base.device import pdl_options, start_early
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.fp8.quantize import empty_rows_for, store_rounded
from nanovllm.kernels.fp8.reference import GROUP, quantize_rows_reference
from nanovllm.kernels.gemm.expand import (
    FIELDS,
    NONE,
    Shrunk,
    column_groups,
    delta_reference,
    next_adapter,
    product_of_slot,
    slots_of,
    sums_of_part,
)

ACTIVATIONS = ("silu", "gelu_tanh", "relu2")


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """float32 -> float32."""
    if KIND == "silu":
        y = silu(x)
    elif KIND == "gelu_tanh":
        y = gelu_tanh(x)
    else:
        positive = tl.maximum(x, 0.0)
        y = positive * positive
    return y


@triton.jit
def _load_biased(ROW, BIAS, cols, mask):
    x = tl.load(ROW + cols, mask=mask, other=0.0)
    if BIAS is not None:
        x = (x.to(tl.float32) + tl.load(BIAS + cols, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _activation_kernel(
    X, BIAS, OUT, SCALES, scale_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """OUT [rows, SIZE]: the activation of X [rows, SIZE], or of [rows, 2 SIZE], gates first, where GATED; BIAS, of X's
    width or None, is added first. Where there are SCALES [groups of SIZE, scale_stride], OUT is rounded to e4m3. A
    program has columns `program_id(1)` * BLOCK and on of row `program_id(0)`."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < SIZE
    start = X + row * (2 * SIZE if GATED else SIZE)
    x = _load_biased(start, BIAS, cols, mask)
    y = _activated(x.to(tl.float32), KIND).to(x.dtype)
    if GATED:
        up = _load_biased(start, BIAS, SIZE + cols, mask)
        y = (y.to(tl.float32) * up.to(tl.float32)).to(x.dtype)
    if SCALES is not None:
        y = tl.where(mask, y.to(tl.float32), 0.0)
        store_rounded(y, OUT, SCALES, row, tl.program_id(1) * BLOCK, scale_stride, SIZE, BLOCK)
    else:
        tl.store(OUT + row * SIZE + cols, y, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _adapted_activation_kernel(
    X, BIAS, ADAPTER, OUT, rows, SIZE: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, EACH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, groups of EACH tiles of SIZE). OUT [rows, SIZE] and other operands as of _activation_kernel;
    X and BIAS have sums by ADAPTER added to them (gemm/expand.py)."""
    row, first = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * EACH * BLOCK_N
    WIDTH: tl.constexpr = 2 * SIZE if GATED else SIZE
    slots, start, out = slots_of(ADAPTER, row, rows), X + row.to(tl.int64)[:, None] * WIDTH, row.to(tl.int64) * SIZE
    start_early(PDL)
    slot = tl.min(slots, 0)
    while slot < NONE:
        mine = (slots == slot) & (row < rows)
        h = sums_of_part(ADAPTER, mine & (slots >= 0), row, rows, 0)
        of_up = sums_of_part(ADAPTER, mine & (slots >= 0), row, rows, 1) if len(ADAPTER) > FIELDS else h
        for begin in tl.range(first, tl.minimum(first + EACH * BLOCK_N, SIZE), BLOCK_N, num_stages=STAGES):
            col = begin + tl.arange(0, BLOCK_N)
            cols, mask = col[None, :], mine[:, None] & (col < SIZE)[None, :]
            x = _load_biased(start, BIAS, cols, mask)
            if GATED:
                up = _load_biased(start, BIAS, SIZE + cols, mask).to(tl.float32)
                up += product_of_slot(ADAPTER, of_up, slot, slots, SIZE + col, WIDTH, WIDTH)
            y = x.to(tl.float32) + product_of_slot(ADAPTER, h, slot, slots, col, SIZE, WIDTH)
            y = _activated(y, KIND).to(x.dtype)
            if GATED:
                y = (y.to(tl.float32) * up).to(x.dtype)
            tl.store(OUT + out[:, None] + cols, y, mask=mask)
        slot = next_adapter(slots, slot)


def activation(
    x: torch.Tensor, kind: str, gated: bool, bias: torch.Tensor | None = None, rounds: bool = False,
    delta: Shrunk | None = None,
) -> torch.Tensor | FP8Rows:  # fmt: skip
    """x [T, 2I], gates first -> activated(gate) * up, [T, I]; not gated: x [T, I] -> activated(x). kind: one of
    ACTIVATIONS. bias, of x's width, is added first. rounds: the result is then rounded to e4m3 (kernels/fp8/). X is
    contiguous. delta: of adapters, added in float32 behind the bias; the sum is not rounded, and then neither is the
    result to e4m3."""
    num_rows, size = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    if delta is not None:
        assert not rounds
        wide = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
        tiles, groups, options = column_groups(num_rows, size, 1, delta.b.shape[2])
        _adapted_activation_kernel[(tiles, groups)](
            x, bias, delta.operands, wide, num_rows, SIZE=size, KIND=kind, GATED=gated, **options,
            **pdl_options(x.device),
        )  # fmt: skip
        return wide
    block = min(1024, triton.next_power_of_2(size))
    if rounds:
        block = max(block, GROUP)
        out = empty_rows_for(num_rows, size, x.dtype, x.device)
        values, scales, stride = out.values, out.scales, out.scales.stride(1)
    else:
        out = values = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
        scales, stride = None, 0
    if num_rows:
        _activation_kernel[(num_rows, triton.cdiv(size, block))](
            x, bias, values, scales, stride, SIZE=size, BLOCK=block, KIND=kind, GATED=gated, num_warps=4
        )
    return out


def activation_reference(
    x: torch.Tensor, kind: str, gated: bool, bias: torch.Tensor | None = None, rounds: bool = False,
    delta: Shrunk | None = None,
) -> torch.Tensor | FP8Rows:  # fmt: skip
    """Plain twin of `activation`."""
    dtype = x.dtype
    if bias is not None:
        x = x + bias
    if delta is not None:
        x = x.float() + delta_reference(delta)
    gate, up = x.chunk(2, dim=-1) if gated else (x, None)
    if kind == "silu":
        y = F.silu(gate)
    elif kind == "gelu_tanh":
        y = F.gelu(gate, approximate="tanh")
    else:
        y = F.relu(gate).square()
    y = y.to(dtype) if up is None else (y.to(dtype) * up).to(dtype)
    return quantize_rows_reference(y) if rounds else y
