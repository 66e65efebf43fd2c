"""y = x @ W^T in FP8 for a few rows on CUDA cores: the kernel; few_rows.py launches it.

As gemm/fma.py, with weights of a byte: a program owns BLOCK_N weight rows, a warp some of them, and the first steps of
weights are read before `gdc_wait`. Rounded activations come in e4m3. A lane's 16 columns lie in one group of 128: it
multiplies and adds them in float32, where products of e4m3 are exact, and its sum by both scales.
"""

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.decode_kernel import silu_mul
from nanovllm.kernels.gemm.fma import lane_columns, load_vector, load_weight

LANE_SPAN: tl.constexpr = tl.constexpr(512)
"""Columns of W that one warp covers with one 16-byte load a lane."""


@triton.jit
def _load_scales(ptr, stride, live, k0, groups, WARPS: tl.constexpr, CHUNKS: tl.constexpr):
    """The scales that the lanes' columns of a step have, ptr[group * stride]: [WARPS, 1, CHUNKS, 32]."""
    group = k0 // 128 + tl.arange(0, CHUNKS)[None, None, :, None] * 4 + tl.arange(0, 32)[None, None, None, :] // 8
    group += tl.arange(0, WARPS)[:, None, None, None] * 0
    return tl.load(ptr + group * stride, mask=(group < groups) & live, other=0.0)


@triton.jit
def _lane_sums(tile, x, scale, WARPS: tl.constexpr, CHUNKS: tl.constexpr):
    """tile [WARPS, R, CHUNKS, 512] times x, summed inside each lane and scaled: [WARPS, R, 32]."""
    split = tl.reshape(tile * x.to(tl.float32), [WARPS, tile.shape[1], CHUNKS, 32, 16])
    return tl.sum(tl.sum(split, axis=4) * scale, axis=2)


@triton.jit
def _finish(acc, SCALE, rows_of_w, n_end, IN_BLOCKS: tl.constexpr):
    """Sums of lanes [WARPS, R, 32] -> [WARPS, R], times the scales of the weights' rows."""
    y = tl.sum(acc, axis=2)
    if not IN_BLOCKS:
        y *= tl.load(SCALE + tl.minimum(rows_of_w, n_end - 1))
    return y


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def fp8_fma_kernel(
    x_ptr, X_SCALE, w_ptr, SCALE, out_ptr, res_ptr, rows, scale_stride, n_out, groups,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr,
    PRELOAD: tl.constexpr, ROWS_EACH: tl.constexpr, IN_BLOCKS: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (column tiles); x is e4m3 [rows <= ROWS, K], X_SCALE [groups of K, scale_stride]. GATED: weights are
    [2 n_out, K], and a program has BLOCK_N gates and the ups that belong to them. Where IN_BLOCKS, BLOCK_N divides
    ROWS_EACH, and SCALE is [weight rows / ROWS_EACH, groups]."""
    SPAN: tl.constexpr = CHUNKS * LANE_SPAN
    PER_WARP: tl.constexpr = BLOCK_N // WARPS
    HALVES: tl.constexpr = 2 if GATED else 1
    first = tl.program_id(0) * BLOCK_N
    lane = tl.arange(0, WARPS)[:, None] * PER_WARP + tl.arange(0, PER_WARP)[None, :]
    col = first + lane
    live = col < n_out
    row_ptrs = (w_ptr + col.to(tl.int64) * K)[:, :, None, None]
    row_live = live[:, :, None, None]
    half_size = n_out.to(tl.int64) * K

    tiles = ()
    for step in tl.static_range(PRELOAD):
        cols = lane_columns(step * SPAN, CHUNKS, LANE_SPAN)
        for half in tl.static_range(HALVES):
            tiles = tiles + (load_weight(row_ptrs + half * half_size, row_live, cols, K, EVEN_K, EVEN_N),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    accs = ()
    for _ in tl.static_range(ROWS * HALVES):
        accs = accs + (tl.zeros([WARPS, PER_WARP, 32], dtype=tl.float32),)
    for step in tl.static_range(STEPS):
        k0 = step * SPAN
        cols = lane_columns(k0, CHUNKS, LANE_SPAN)
        now = ()
        for half in tl.static_range(HALVES):
            now = now + (tiles[half].to(tl.float32),)
        tiles = tiles[HALVES:]
        if step + PRELOAD < STEPS:
            for half in tl.static_range(HALVES):
                at = row_ptrs + half * half_size
                tiles = tiles + (load_weight(at, row_live, cols + PRELOAD * SPAN, K, EVEN_K, EVEN_N),)
        summed = ()
        for row in tl.static_range(ROWS):
            x = load_vector(x_ptr + row * K, row < rows, cols, K, WARPS, EVEN_K)
            scale = _load_scales(X_SCALE + row, scale_stride, row < rows, k0, tl.cdiv(K, 128), WARPS, CHUNKS)
            for half in tl.static_range(HALVES):
                both = scale
                if IN_BLOCKS:
                    of_weight = SCALE + (half * n_out + first) // ROWS_EACH * groups
                    both = scale * _load_scales(of_weight, 1, rows > 0, k0, groups, WARPS, CHUNKS)
                summed = summed + (accs[row * HALVES + half] + _lane_sums(now[half], x, both, WARPS, CHUNKS),)
        accs = summed

    for row in tl.static_range(ROWS):
        y = _finish(accs[row * HALVES], SCALE, col, n_out, IN_BLOCKS)
        if GATED:
            up = _finish(accs[row * HALVES + 1], SCALE, n_out + col, 2 * n_out, IN_BLOCKS)
            y = silu_mul(y, up, out_ptr.dtype.element_ty)
        at = row * n_out + col
        mask = live & (row < rows)
        if RESIDUAL:
            y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
            y += tl.load(res_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)
