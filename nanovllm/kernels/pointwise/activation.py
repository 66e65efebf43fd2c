"""Pointwise half of an MLP: an activation, gated (Shazeer, arXiv 2002.05202) or not, after the bias where there is one.

Rounding is that of Hugging Face's models: the biased projection, the activation and the product are each rounded.
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.base.activations import gelu_tanh, silu
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.fp8.quantize import empty_rows_for, store_rounded
from nanovllm.kernels.fp8.reference import GROUP, quantize_rows_reference

ACTIVATIONS = ("silu", "gelu_tanh", "relu2")


@triton.jit
def activated(x, KIND: tl.constexpr):
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
def load_biased(ROW, BIAS, cols, mask):
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
    x = load_biased(start, BIAS, cols, mask)
    y = activated(x.to(tl.float32), KIND).to(x.dtype)
    if GATED:
        up = load_biased(start, BIAS, SIZE + cols, mask)
        y = (y.to(tl.float32) * up.to(tl.float32)).to(x.dtype)
    if SCALES is not None:
        y = tl.where(mask, y.to(tl.float32), 0.0)
        store_rounded(y, OUT, SCALES, row, tl.program_id(1) * BLOCK, scale_stride, SIZE, BLOCK)
    else:
        tl.store(OUT + row * SIZE + cols, y, mask=mask)


def activation(
    x: torch.Tensor, kind: str, gated: bool, bias: torch.Tensor | None = None, rounds: bool = False
) -> torch.Tensor | FP8Rows:
    """x [T, 2I], gates first -> activated(gate) * up, [T, I]; not gated: x [T, I] -> activated(x). kind: one of
    ACTIVATIONS. bias, of x's width, is added first. rounds: the result is then rounded to e4m3 (kernels/fp8/). X is
    contiguous."""
    num_rows, size = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
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
    x: torch.Tensor, kind: str, gated: bool, bias: torch.Tensor | None = None, rounds: bool = False
) -> torch.Tensor | FP8Rows:
    """Plain twin of `activation`."""
    if bias is not None:
        x = x + bias
    gate, up = x.chunk(2, dim=-1) if gated else (x, None)
    if kind == "silu":
        y = F.silu(gate)
    elif kind == "gelu_tanh":
        y = F.gelu(gate, approximate="tanh")
    else:
        y = F.relu(gate).square()
    y = y if up is None else y * up
    return quantize_rows_reference(y) if rounds else y
