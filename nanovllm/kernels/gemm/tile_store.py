"""Stores of the sums of a tile of weights and rows of x, for tile.py."""

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.quantize import group_scales, rounded


@triton.jit
def store_sums(
    acc, out_ptr, first_row, first_col, rows, n_out, X_LEFT: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """acc, transposed where not X_LEFT, into out [rows, n_out] from (first_row, first_col) on; with PARTS into the
    split's matrix of [splits, rows, n_out]."""
    if not X_LEFT:
        acc = tl.trans(acc)
    row = tl.arange(0, acc.shape[0])[:, None]
    col = first_col + tl.arange(0, acc.shape[1])[None, :]
    out_ptr += first_row.to(tl.int64) * n_out
    if PARTS:
        out_ptr += tl.program_id(2).to(tl.int64) * rows * n_out
    live = (row < rows - first_row) & (col < n_out)
    tl.store(out_ptr + row * n_out + col, acc.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def store_by_choice(
    acc, OUT, WEIGHTS, position, live, choice, col, tokens, n_out,
    TOP_K: tl.constexpr, GATED: tl.constexpr, X_LEFT: tl.constexpr, OUT_SCALES=None, stride=0,
    DTYPE: tl.constexpr = None,
):  # fmt: skip
    """acc, transposed where not X_LEFT, into columns `col` of OUT: GATED by position, else by slot, times WEIGHTS.
    OUT_SCALES: None, or float32 [groups of n_out, stride]: rounded to DTYPE, then to e4m3; `col` are one group."""
    if not X_LEFT:
        acc = tl.trans(acc)
    row = position
    if OUT_SCALES is not None:
        acc = tl.where((col < n_out)[None, :], acc.to(DTYPE).to(tl.float32), 0.0)
        scale = group_scales(acc)
        tl.store(OUT_SCALES + tl.program_id(0) * stride + position, scale, mask=live)
        acc = rounded(acc, scale[:, None])
    elif not GATED:
        acc *= tl.load(WEIGHTS + choice, mask=live, other=0.0)[:, None]
        row = choice % TOP_K * tokens + choice // TOP_K
    at = OUT + row.to(tl.int64)[:, None] * n_out + col[None, :]
    tl.store(at, acc.to(OUT.dtype.element_ty), mask=live[:, None] & (col < n_out)[None, :])
