"""Parts that GEMM kernels share: which weight rows a program owns, RMSNorm, the epilogue, and a check of operands."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.kernels.base.activations import silu
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.plan.config import Gemm, GemmConfig
from nanovllm.kernels.plan.fits import why_not

# Columns that a warp covers with one load of 16 bytes a lane, of 16-bit numbers; a step has a whole number of them.
LANE_SPAN: tl.constexpr = tl.constexpr(256)
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""Types of results, for kernels that store them rounded further."""


@triton.jit
def weight_rows(lane, pid, n_out, BLOCK_N: tl.constexpr, PAIRED: tl.constexpr):
    """Weight row of each position `lane` of a tile, and whether it exists.

    PAIRED puts gate row j and up row n_out + j next to each other, so that one program holds both.
    """
    if PAIRED:
        out = pid * (BLOCK_N // 2) + lane // 2
        rows = out + (lane % 2) * n_out
    else:
        out = pid * BLOCK_N + lane
        rows = out
    return rows, out < n_out


@triton.jit
def normalise(x, gain, scale):
    """RMSNorm with Hugging Face's two roundings: the normalised value, then its product with the weight; of a weight in
    float32 the product alone (see Norm). Of gain (the weight) and scale (1 / rms) each broadcasts to x."""
    unit = x.to(tl.float32) * scale
    if gain.dtype != tl.float32:
        unit = unit.to(x.dtype).to(tl.float32)
    return (unit * gain.to(tl.float32)).to(x.dtype)


@triton.jit
def add_delta(y, DELTA, row, w_row, live, n):
    """y float32, a sum of each (row, w_row), and what adapters add to it: DELTA float32 [rows, n], or None."""
    if DELTA is not None:
        y += tl.load(DELTA + row * n + w_row, mask=live, other=0.0)
    return y


@triton.jit
def store_tile(y, residual, lane, row, out_ptr, rows, pid, n_out, BLOCK_N: tl.constexpr, PAIRED: tl.constexpr):
    """Epilogue on y float32 [A, B]: SiLU(gate) * up where PAIRED, plus the residual, one rounding to the dtype of out.

    `row` are output rows and `lane` tile positions; both broadcast to [A, B], or to [A, B / 2] where PAIRED.
    """
    if PAIRED:
        gate, up = tl.split(tl.reshape(y, [y.shape[0], y.shape[1] // 2, 2]))
        y = silu(gate) * up
        col = pid * (BLOCK_N // 2) + lane
    else:
        col = pid * BLOCK_N + lane
    live = (row < rows) & (col < n_out)
    tl.store(out_ptr + row * n_out + col, (y + residual).to(out_ptr.dtype.element_ty), mask=live)


def checked_width(
    config: GemmConfig, x: Sequence[int], weight: Sequence[int], residual: Tensor | None, *, gated: bool,
    norms: bool = False, dtype: str = "bfloat16",
) -> int:  # fmt: skip
    """Columns of the result of a kernel for few rows, by the shapes of x [M, K] and weight [N, K]: N, if gated N / 2.
    dtype: of the weight, FP8 or one of PACKED, or one for all others. Raises ValueError where `config` cannot multiply
    them so, or residual has another shape than the result."""
    (rows, k), (n, columns) = x, weight
    n_out = n // 2 if gated else n
    reason = why_not(Gemm("gate_up" if gated else "qkv", n, k, dtype, True), config, rows, normed_rows=rows * norms)
    if columns != k or not rows:
        reason = "one does not fit the other"
    if reason:
        raise ValueError(f"weight {list(weight)}, x {list(x)}: {reason}")
    if residual is not None and (residual.shape != (rows, n_out) or not residual.is_contiguous()):
        raise ValueError(f"residual is {list(residual.shape)}, expected {[rows, n_out]}, contiguous")
    return n_out
