"""y = x @ W^T for the decode steps between a handful of rows and prompts: the kernel; decode.py launches it.

Both operands come by tensor descriptors (TMA), which read zeros past the end of a matrix, so that ragged
edges cost no masks in the loop. A Hopper matrix instruction has 64 rows of its left operand at least and 8 of the
right one: tiles of 64 weight rows and more put the weights on the left, so that 32 rows of x are enough, and tiles of
fewer weight rows put x there.

A row's sum over K goes in an order that the shapes alone decide, and does not depend on the other rows.
"""

from nanovllm.kernels.base.device import prefetch_tile
from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit
def wait_for_rows(
    w_ptr, first_col, n_out, begin, k, BLOCK_N: tl.constexpr, GATED: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """After it x may be read. With PDL the program's weights, where GATED its ups too, are on their way into L2 then:
    PREFETCH of their columns from `begin` on."""
    if PDL:
        prefetch_tile(w_ptr, first_col, n_out, begin, k, BLOCK_N, PREFETCH)
        if GATED:
            prefetch_tile(w_ptr, n_out + first_col, 2 * n_out, begin, k, BLOCK_N, PREFETCH)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def multiply(x, w, acc, X_LEFT: tl.constexpr):
    """acc + x @ w^T where x is the left operand, else its transpose."""
    if X_LEFT:
        return tl.dot(x, w.T, acc, input_precision="ieee")
    else:
        return tl.dot(w, x.T, acc, input_precision="ieee")


@triton.jit
def silu_mul(gate, up, dtype: tl.constexpr):
    """The activation kernel's result (activation.py) from float32 sums, with its roundings but the last."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)


@triton.jit
def store_sums(
    acc, out_ptr, first_row, first_col, rows, n_out, split, X_LEFT: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """acc, transposed where not X_LEFT, into out [rows, n_out] from (first_row, first_col) on; with PARTS into the
    matrix `split` of [splits, rows, n_out]."""
    if not X_LEFT:
        acc = tl.trans(acc)
    row = tl.arange(0, acc.shape[0])[:, None]
    col = first_col + tl.arange(0, acc.shape[1])[None, :]
    out_ptr += first_row.to(tl.int64) * n_out
    if PARTS:
        out_ptr += split.to(tl.int64) * rows * n_out
    live = (row < rows - first_row) & (col < n_out)
    tl.store(out_ptr + row * n_out + col, acc.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def decode_gemm_kernel(
    X, W, w_ptr, out_ptr, rows, n_out, k,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, PARTS: tl.constexpr, X_LEFT: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of weights, splits of K). X and W are descriptors of x [rows, k] and of the weights
    [n_out, k], or [2 n_out, k] where GATED: then a program has BLOCK_N gates and the BLOCK_N ups that belong to them.
    out [rows, n_out]; with PARTS [splits, rows, n_out], a sum for each split.
    """
    split, splits = tl.program_id(2), tl.num_programs(2)
    first_row = tl.program_id(0) * BLOCK_M
    first_col = tl.program_id(1) * BLOCK_N
    steps = tl.cdiv(k, BLOCK_K)
    begin, end = steps * split // splits, steps * (split + 1) // splits
    wait_for_rows(w_ptr, first_col, n_out, begin * BLOCK_K, k, BLOCK_N, GATED, PREFETCH, PDL)

    acc = tl.zeros([BLOCK_M, BLOCK_N] if X_LEFT else [BLOCK_N, BLOCK_M], dtype=tl.float32)
    if GATED:
        up = tl.zeros(acc.shape, dtype=tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        x = X.load([first_row, step * BLOCK_K])
        acc = multiply(x, W.load([first_col, step * BLOCK_K]), acc, X_LEFT)
        if GATED:
            up = multiply(x, W.load([n_out + first_col, step * BLOCK_K]), up, X_LEFT)

    if GATED:
        acc = silu_mul(acc, up, out_ptr.dtype.element_ty)
    store_sums(acc, out_ptr, first_row, first_col, rows, n_out, split, X_LEFT, PARTS)
