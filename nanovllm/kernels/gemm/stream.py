"""y = f(x) @ W^T for up to 16 rows on tensor cores.

A plain software-pipelined loop with the weights as the *left* operand (64 weight rows fill a Hopper matrix instruction,
the 16 rows of x are its narrow side). Before `gdc_wait` it prefetches the first PREFETCH columns of its weight rows
into L2, since the loop's own copies cannot start ahead of the normalisation.

Rows of x beyond `rows` are read as zero; a row's result does not depend on the other rows.
"""

from nanovllm.kernels.base.device import prefetch_lines
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.epilogue import arrive_last, load_residual, normalise, store_tile, sum_splits, weight_rows

ROWS: tl.constexpr = tl.constexpr(16)


@triton.jit
def _row_scales(x_ptr, rows, eps, K: tl.constexpr, SPAN: tl.constexpr):
    """1 / rms of the 16 rows of x, float32 [16]."""
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, SPAN], dtype=tl.float32)
    for k0 in tl.static_range(0, K, SPAN):
        cols = k0 + tl.arange(0, SPAN)
        live = (row < rows)[:, None] & (cols < K)[None, :]
        x = tl.load(x_ptr + row[:, None] * K + cols[None, :], mask=live, other=0.0).to(tl.float32)
        total += x * x
    return tl.rsqrt(tl.sum(total, axis=1) / K + eps)


@triton.jit(do_not_specialize=["rows", "n_out"])
def skinny_stream_kernel(
    x_ptr, w_ptr, norm_ptr, out_ptr, res_ptr, scratch_ptr, counter_ptr, rows, n_out, eps,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, NORM: tl.constexpr,
    PAIRED: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (column tiles, SPLIT_K); x is [rows <= 16, K]. EVEN_K: the STEPS x SPLIT_K steps tile K exactly."""
    pid = tl.program_id(0)
    k_first = tl.program_id(1) * (STEPS * BLOCK_K)
    w_rows, w_live = weight_rows(tl.arange(0, BLOCK_N), pid, n_out, BLOCK_N, PAIRED)
    row_ptrs = (w_ptr + w_rows.to(tl.int64) * K + k_first)[:, None]
    if PDL:
        # A line is 64 bf16. Rows past the end prefetch row 0's tile instead.
        safe_ptrs = tl.where(w_live[:, None], row_ptrs, w_ptr)
        prefetch_lines(safe_ptrs + tl.arange(0, PREFETCH // 64)[None, :] * 64)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    row = tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK_N)[None, :]
    residual = load_residual(res_ptr, lane, row[:, None], rows, pid, n_out, BLOCK_N, RESIDUAL and SPLIT_K == 1)
    scales = tl.zeros([ROWS], dtype=tl.float32)
    if NORM:
        scales = _row_scales(x_ptr, rows, eps, K, 512)
    acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        w_mask = w_live[:, None] & (k_first + k < K)[None, :]
        x_mask = (row < rows)[:, None] & (k_first + k < K)[None, :]
        if EVEN_K:
            x_mask = (row < rows)[:, None] & (k >= 0)[None, :]
        if EVEN_K and EVEN_N:
            w = tl.load(row_ptrs + k[None, :])
        else:
            w = tl.load(row_ptrs + k[None, :], mask=w_mask, other=0.0)
        x = tl.load(x_ptr + row[:, None] * K + (k_first + k)[None, :], mask=x_mask, other=0.0)
        if NORM:
            gain = tl.load(norm_ptr + k_first + k, mask=k_first + k < K, other=0.0)
            x = normalise(x, gain[None, :], scales[:, None])
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    _finish(
        tl.trans(acc), residual, out_ptr, res_ptr, scratch_ptr, counter_ptr, rows, n_out,
        BLOCK_N, SPLIT_K, PAIRED, RESIDUAL,
    )  # fmt: skip


@triton.jit
def _finish(
    y, residual, out_ptr, res_ptr, scratch_ptr, counter_ptr, rows, n_out,
    BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, PAIRED: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Sum the splits, if any, and store y float32 [16, BLOCK_N]. Scratch is float32 [SPLIT_K, 16, padded N]."""
    OUT_WIDTH: tl.constexpr = BLOCK_N // 2 if PAIRED else BLOCK_N
    pid = tl.program_id(0)
    row = tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, BLOCK_N)[None, :]
    out_lane = tl.arange(0, OUT_WIDTH)[None, :]
    if SPLIT_K == 1:
        store_tile(y, residual, out_lane, row, out_ptr, rows, pid, n_out, BLOCK_N, PAIRED)
    else:
        width = tl.num_programs(0) * BLOCK_N
        at = row * width + pid * BLOCK_N + lane
        tl.store(scratch_ptr + tl.program_id(1) * ROWS * width + at, y)
        if arrive_last(counter_ptr + pid, SPLIT_K):
            total = sum_splits(scratch_ptr, at, ROWS * width, SPLIT_K)
            base = load_residual(res_ptr, lane, row, rows, pid, n_out, BLOCK_N, RESIDUAL)
            store_tile(total, base, out_lane, row, out_ptr, rows, pid, n_out, BLOCK_N, PAIRED)
