"""Pointwise half of an MLP: an activation, gated (Shazeer, arXiv 2002.05202) or not, after the bias where there is one.

Rounding is that of Hugging Face's models: the biased projection, the activation and the product are each rounded.
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.base.triton_import import tl, triton

KINDS = ("silu", "gelu_tanh", "relu2")


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """float32 -> float32."""
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
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
def _activation_kernel(X, BIAS, OUT, SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr):
    """Columns `program_id(1)` * BLOCK and on of row `program_id(0)`."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < SIZE
    start = X + row * (2 * SIZE if GATED else SIZE)
    x = _load_biased(start, BIAS, cols, mask)
    y = _activated(x.to(tl.float32), KIND).to(x.dtype)
    if GATED:
        up = _load_biased(start, BIAS, SIZE + cols, mask)
        y = (y.to(tl.float32) * up.to(tl.float32)).to(x.dtype)
    tl.store(OUT + row * SIZE + cols, y, mask=mask)


def activation(x: torch.Tensor, kind: str, gated: bool, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, 2I], gates first -> activated(gate) * up, [T, I]; not gated: x [T, I] -> activated(x). kind: one of KINDS.
    bias, of x's width, is added first. X is contiguous."""
    num_rows, width = x.shape
    size = width // 2 if gated else width
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(size))
    if num_rows:
        grid = (num_rows, triton.cdiv(size, block))
        _activation_kernel[grid](x, bias, out, SIZE=size, BLOCK=block, KIND=kind, GATED=gated, num_warps=4)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gates first -> silu(gate) * up, [T, I]; silu(gate) is rounded to the dtype before that. Gate_up
    is contiguous."""
    return activation(gate_up, "silu", gated=True)


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
    """Plain twin of `silu_mul`."""
    return activation_reference(gate_up, "silu", gated=True)
