"""Pointwise half of an MLP: an activation, gated (Shazeer, arXiv 2002.05202) or not, after the bias where there is one.

Rounding is that of Hugging Face's models: the biased projection, the activation and the product are each rounded.
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.base.activations import silu
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.fp8.quantize import empty_rows_for, store_rounded
from nanovllm.kernels.fp8.reference import GROUP, quantize_rows_reference

KINDS = ("silu", "gelu_tanh", "relu2")


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """float32 -> float32."""
    if KIND == "silu":
        y = silu(x)
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # sqrt(2 / pi)
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)
        y = 0.5 * x * (1.0 + tanh)
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


def activation(x: torch.Tensor, kind: str, gated: bool, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, 2I], gates first -> activated(gate) * up, [T, I]; not gated: x [T, I] -> activated(x). kind: one of KINDS.
    bias, of x's width, is added first. X is contiguous."""
    num_rows, width = x.shape
    size = width // 2 if gated else width
    return _launch(x, bias, torch.empty(num_rows, size, dtype=x.dtype, device=x.device), None, kind, gated)


def _launch(
    x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, scales: torch.Tensor | None, kind: str, gated: bool
) -> torch.Tensor:
    """Fills and returns `out`."""
    num_rows, size = out.shape
    block = min(1024, triton.next_power_of_2(size if scales is None else max(size, GROUP)))
    if num_rows:
        _activation_kernel[(num_rows, triton.cdiv(size, block))](
            x, bias, out, scales, 0 if scales is None else scales.stride(1),
            SIZE=size, BLOCK=block, KIND=kind, GATED=gated, num_warps=4,
        )  # fmt: skip
    return out


def silu_mul_fp8(gate_up: torch.Tensor) -> FP8Rows:
    """gate_up [T, 2 * size] -> rows [T, size] of activation(gate_up, "silu", True), rounded to e4m3 (kernels/fp8/)."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    found = empty_rows_for(rows, size, gate_up.dtype, gate_up.device)
    _launch(gate_up, None, found.values, found.scales, "silu", True)
    return found


def activation_reference(x: torch.Tensor, kind: str, gated: bool, bias: torch.Tensor | None = None) -> torch.Tensor:
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
    return y if up is None else y * up


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gates first -> silu(gate) * up, [T, I]."""
    return activation_reference(gate_up, "silu", gated=True)


def silu_mul_fp8_reference(gate_up: torch.Tensor) -> FP8Rows:
    """Plain twin of `silu_mul_fp8`."""
    return quantize_rows_reference(silu_mul_reference(gate_up))
