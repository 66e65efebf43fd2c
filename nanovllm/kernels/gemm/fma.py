"""y = f(x) @ W^T for a few rows on CUDA cores: the kernel for 1 to 4 rows (it takes more, but tensor cores win there).

A program owns BLOCK_N weight rows, WARPS groups of BLOCK_N / WARPS, and walks K in steps of CHUNKS x 256 columns. All
tiles are shaped [WARPS, rows of a warp, CHUNKS, 256]: the compiler then gives each warp whole rows of W (512 contiguous
bytes a load instruction) and its own copy of x, so only the last sum, over 32 lanes, crosses threads.

The first PRELOAD steps are read into registers *before* `gdc_wait`: weights never depend on the previous kernel, so
under programmatic dependent launch this kernel streams its weights while its predecessor is still finishing. Everything
that does depend on the predecessor (x, the residual, the split-K scratch) is touched only after the wait, which every
program executes; a kernel thus cannot finish before all of its predecessors have, and no buffer is overwritten while
an earlier kernel reads it.

A row's result does not depend on how many rows share the launch: its accumulators are its own, their order is fixed.
"""

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.epilogue import (
    LANE_SPAN,
    arrive_last,
    load_residual,
    normalise,
    store_tile,
    sum_splits,
    weight_rows,
)


@triton.jit
def lane_columns(k0, CHUNKS: tl.constexpr, SPAN: tl.constexpr):
    """Columns of a step, [1, 1, CHUNKS, SPAN]; SPAN of them are a 16-byte load of each lane of a warp."""
    chunk = k0 + tl.arange(0, CHUNKS) * SPAN
    return chunk[None, None, :, None] + tl.arange(0, SPAN)[None, None, None, :]


@triton.jit
def load_weight(row_ptrs, row_live, cols, K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr):
    """A weight tile [WARPS, rows of a warp, CHUNKS, SPAN]. It is read once, so it goes past L1, which x needs."""
    if EVEN_K and EVEN_N:
        w = tl.load(row_ptrs + cols, cache_modifier=".cg")
    elif EVEN_K:
        w = tl.load(row_ptrs + cols, mask=row_live, other=0.0, cache_modifier=".cg")
    else:
        w = tl.load(row_ptrs + cols, mask=row_live & (cols < K), other=0.0, cache_modifier=".cg")
    return w


@triton.jit
def load_vector(ptr, live, cols, K: tl.constexpr, WARPS: tl.constexpr, EVEN_K: tl.constexpr):
    """A step of one row of x, or of the norm weight, a copy for each warp: [WARPS, 1, CHUNKS, SPAN]."""
    cols += tl.arange(0, WARPS)[:, None, None, None] * 0
    mask = (cols >= 0) & live if EVEN_K else (cols < K) & live
    return tl.load(ptr + cols, mask=mask, other=0.0)


@triton.jit
def lane_sums(tile, WARPS: tl.constexpr, CHUNKS: tl.constexpr):
    """Sums inside each lane: float32 [WARPS, R, CHUNKS, 256] -> [WARPS, R, 32]."""
    split = tl.reshape(tile, [WARPS, tile.shape[1], CHUNKS, 32, 8])
    return tl.sum(tl.sum(split, axis=4), axis=2)


@triton.jit
def row_scale(x_ptr, live, eps, K: tl.constexpr, WARPS: tl.constexpr, CHUNKS: tl.constexpr, EVEN_K: tl.constexpr):
    """1 / rms of one row of x, a copy for each warp: float32 [WARPS, 1, 1, 1]."""
    total = tl.zeros([WARPS, 1, 32], dtype=tl.float32)
    for k0 in tl.static_range(0, K, CHUNKS * LANE_SPAN):
        x = load_vector(x_ptr, live, lane_columns(k0, CHUNKS, LANE_SPAN), K, WARPS, EVEN_K).to(tl.float32)
        total += lane_sums(x * x, WARPS, CHUNKS)
    return tl.rsqrt(tl.sum(total, axis=2) / K + eps)[:, :, None, None]


@triton.jit(do_not_specialize=["rows", "n_out"])
def skinny_fma_kernel(
    x_ptr, w_ptr, norm_ptr, out_ptr, res_ptr, scratch_ptr, counter_ptr, rows, n_out, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr,
    PRELOAD: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, NORM: tl.constexpr,
    PAIRED: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (column tiles, SPLIT_K); x is [rows <= ROWS, K]. EVEN_K: the STEPS x SPLIT_K steps tile K exactly."""
    SPAN: tl.constexpr = CHUNKS * LANE_SPAN
    PER_WARP: tl.constexpr = BLOCK_N // WARPS
    pid = tl.program_id(0)
    split = tl.program_id(1)
    k_first = split * (STEPS * SPAN)
    lane = tl.arange(0, WARPS)[:, None] * PER_WARP + tl.arange(0, PER_WARP)[None, :]
    w_rows, w_live = weight_rows(lane, pid, n_out, BLOCK_N, PAIRED)
    row_ptrs = (w_ptr + w_rows.to(tl.int64) * K)[:, :, None, None]
    row_live = w_live[:, :, None, None]

    tiles = ()
    for step in tl.static_range(PRELOAD):
        cols = lane_columns(k_first + step * SPAN, CHUNKS, LANE_SPAN)
        tiles = tiles + (load_weight(row_ptrs, row_live, cols, K, EVEN_K, EVEN_N),)
    if NORM:
        gain = load_vector(norm_ptr, rows > 0, lane_columns(k_first, CHUNKS, LANE_SPAN), K, WARPS, EVEN_K)
    # In a chain for one row, where each kernel lets the next come as soon as all its own programs run, gate and up hold
    # them back: else those after `down` take the room that it needs.
    LATE: tl.constexpr = PAIRED and NORM and ROWS == 1
    if PDL:
        if not LATE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if LATE:
            tl.extra.cuda.gdc_launch_dependents()

    scales = ()
    accs = ()
    residuals = ()
    for row in tl.static_range(ROWS):
        accs = accs + (tl.zeros([WARPS, PER_WARP, 32], dtype=tl.float32),)
        base = load_residual(res_ptr, lane, row, rows, pid, n_out, BLOCK_N, RESIDUAL and SPLIT_K == 1)
        residuals = residuals + (base,)
    for row in tl.static_range(ROWS):
        if NORM:
            scales = scales + (row_scale(x_ptr + row * K, row < rows, eps, K, WARPS, CHUNKS, EVEN_K),)
    for step in tl.static_range(STEPS):
        cols = lane_columns(k_first + step * SPAN, CHUNKS, LANE_SPAN)
        tile = tiles[0].to(tl.float32)
        tiles = tiles[1:]
        if step + PRELOAD < STEPS:
            tiles = tiles + (load_weight(row_ptrs, row_live, cols + PRELOAD * SPAN, K, EVEN_K, EVEN_N),)
        if NORM and step > 0:
            gain = load_vector(norm_ptr, rows > 0, cols, K, WARPS, EVEN_K)
        summed = ()
        for row in tl.static_range(ROWS):
            x = load_vector(x_ptr + row * K, row < rows, cols, K, WARPS, EVEN_K)
            if NORM:
                x = normalise(x, gain, scales[row])
            summed = summed + (accs[row] + lane_sums(tile * x.to(tl.float32), WARPS, CHUNKS),)
        accs = summed
    _finish(
        accs, residuals, out_ptr, res_ptr, scratch_ptr, counter_ptr, rows, n_out,
        ROWS, BLOCK_N, SPLIT_K, PAIRED, RESIDUAL, WARPS,
    )  # fmt: skip


@triton.jit
def _finish(
    accs, residuals, out_ptr, res_ptr, scratch_ptr, counter_ptr, rows, n_out,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, PAIRED: tl.constexpr, RESIDUAL: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Sum the lanes, and the splits where there are any, and store. Scratch is float32 [SPLIT_K, ROWS, padded N]."""
    PER_WARP: tl.constexpr = BLOCK_N // WARPS
    OUT_WIDTH: tl.constexpr = PER_WARP // 2 if PAIRED else PER_WARP
    pid = tl.program_id(0)
    lane = tl.arange(0, WARPS)[:, None] * PER_WARP + tl.arange(0, PER_WARP)[None, :]
    out_lane = tl.arange(0, WARPS)[:, None] * OUT_WIDTH + tl.arange(0, OUT_WIDTH)[None, :]
    if SPLIT_K == 1:
        for row in tl.static_range(ROWS):
            y = tl.sum(accs[row], axis=2)
            store_tile(y, residuals[row], out_lane, row, out_ptr, rows, pid, n_out, BLOCK_N, PAIRED)
    else:
        width = tl.num_programs(0) * BLOCK_N
        at = pid * BLOCK_N + lane
        for row in tl.static_range(ROWS):
            tl.store(scratch_ptr + (tl.program_id(1) * ROWS + row) * width + at, tl.sum(accs[row], axis=2))
        if arrive_last(counter_ptr + pid, SPLIT_K):
            for row in tl.static_range(ROWS):
                y = sum_splits(scratch_ptr, row * width + at, ROWS * width, SPLIT_K)
                residual = load_residual(res_ptr, lane, row, rows, pid, n_out, BLOCK_N, RESIDUAL)
                store_tile(y, residual, out_lane, row, out_ptr, rows, pid, n_out, BLOCK_N, PAIRED)
