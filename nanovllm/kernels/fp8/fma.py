"""y = f(x) @ W^T in FP8 for a few rows on CUDA cores: the kernel; few_rows.py launches it.

As gemm/fma.py, with weights of a byte: a program owns BLOCK_N weight rows, a warp some of them, and the first steps of
weights are read before `gdc_wait`. What differs is x. All threads of a program together normalise a step of it, round
it to e4m3 and widen it again by its scales, and hand it to every warp through shared memory. e4m3 times a scale in
float32, multiplied and added in float32, is the definition's result but for the order of additions.
"""

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.quantize import group_scales, rounded, static_scale

LANE_SPAN: tl.constexpr = tl.constexpr(512)
"""Columns of W that one warp covers with one 16-byte load a lane."""


@triton.jit
def _load_weight(
    row_ptrs, row_live, k0, K: tl.constexpr, CHUNKS: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr
):
    """A weight tile [WARPS, rows of a warp, CHUNKS, 512], e4m3. It is read once, so it goes past L1."""
    chunk = k0 + tl.arange(0, CHUNKS) * LANE_SPAN
    cols = chunk[None, None, :, None] + tl.arange(0, LANE_SPAN)[None, None, None, :]
    if EVEN_K and EVEN_N:
        w = tl.load(row_ptrs + cols, cache_modifier=".cg")
    elif EVEN_K:
        w = tl.load(row_ptrs + cols, mask=row_live, other=0.0, cache_modifier=".cg")
    else:
        w = tl.load(row_ptrs + cols, mask=row_live & (cols < K), other=0.0, cache_modifier=".cg")
    return w


@triton.jit
def _load_step(ptr, live, k0, K: tl.constexpr, SPAN: tl.constexpr, EVEN_K: tl.constexpr):
    """A step of a vector [SPAN], float32."""
    cols = k0 + tl.arange(0, SPAN)
    mask = live & (cols >= 0) if EVEN_K else live & (cols < K)
    return tl.load(ptr + cols, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _quantised(x, scale_of_all, SPAN: tl.constexpr, STATIC: tl.constexpr):
    """x float32 [SPAN] -> rounded to e4m3, float32 [SPAN / 128, 128], and its scales [SPAN / 128]."""
    groups = tl.reshape(x, [SPAN // 128, 128])
    if STATIC:
        scale = tl.zeros([SPAN // 128], dtype=tl.float32) + scale_of_all
    else:
        scale = group_scales(groups)
    return rounded(groups, scale[:, None]).to(tl.float32), scale


@triton.jit
def _block_scales(SCALE, first, k0, groups, SPAN: tl.constexpr, ROWS_EACH: tl.constexpr):
    """Scales of the weight rows from `first` on, which share them, in a step: [SPAN / 128]."""
    group = k0 // 128 + tl.arange(0, SPAN // 128)
    return tl.load(SCALE + first // ROWS_EACH * groups + group, mask=group < groups, other=0.0)


@triton.jit
def _lane_sums(tile, x, WARPS: tl.constexpr, CHUNKS: tl.constexpr):
    """tile [WARPS, R, CHUNKS, 512] times x [SPAN], summed inside each lane: [WARPS, R, 32]."""
    products = tile * tl.reshape(x, [1, 1, CHUNKS, LANE_SPAN])
    split = tl.reshape(products, [WARPS, tile.shape[1], CHUNKS, 32, 16])
    return tl.sum(tl.sum(split, axis=4), axis=2)


@triton.jit
def _row_scale(x_ptr, live, eps, K: tl.constexpr, SPAN: tl.constexpr, STEPS: tl.constexpr, EVEN_K: tl.constexpr):
    """1 / rms of one row of x."""
    total = tl.zeros([SPAN], dtype=tl.float32)
    for step in tl.static_range(STEPS):
        x = _load_step(x_ptr, live, step * SPAN, K, SPAN, EVEN_K)
        total += x * x
    return tl.rsqrt(tl.sum(total, axis=0) / K + eps)


@triton.jit
def _finish(acc, SCALE, rows_of_w, n_end, IN_BLOCKS: tl.constexpr):
    """Sums of lanes [WARPS, R, 32] -> [WARPS, R], times the scales of the weights' rows."""
    y = tl.sum(acc, axis=2)
    if not IN_BLOCKS:
        y *= tl.load(SCALE + tl.minimum(rows_of_w, n_end - 1))
    return y


@triton.jit(do_not_specialize=["rows", "n_out"])
def fp8_fma_kernel(
    x_ptr, norm_ptr, INPUT_SCALE, w_ptr, SCALE, out_ptr, res_ptr, rows, n_out, eps, groups,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr,
    PRELOAD: tl.constexpr, ROWS_EACH: tl.constexpr, IN_BLOCKS: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, COUNT: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (column tiles); x is [rows <= ROWS, K]. GATED: weights are [2 n_out, K], and a program has BLOCK_N gates and
    the ups that belong to them. COUNT: of static scales of activations, 0: they are measured. Where IN_BLOCKS, BLOCK_N
    divides ROWS_EACH."""
    SPAN: tl.constexpr = CHUNKS * LANE_SPAN
    PER_WARP: tl.constexpr = BLOCK_N // WARPS
    HALVES: tl.constexpr = 2 if GATED else 1
    first = tl.program_id(0) * BLOCK_N
    lane = tl.arange(0, WARPS)[:, None] * PER_WARP + tl.arange(0, PER_WARP)[None, :]
    col = first + lane
    live = col < n_out

    tiles = ()
    for step in tl.static_range(PRELOAD):
        for half in tl.static_range(HALVES):
            row_ptrs = (w_ptr + (half * n_out + col).to(tl.int64) * K)[:, :, None, None]
            tiles = tiles + (_load_weight(row_ptrs, live[:, :, None, None], step * SPAN, K, CHUNKS, EVEN_K, EVEN_N),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    of_all = 0.0
    if COUNT > 0:
        of_all = static_scale(INPUT_SCALE, COUNT)
    accs = ()
    inverse = ()
    for row in tl.static_range(ROWS):
        if NORM:
            inverse = inverse + (_row_scale(x_ptr + row * K, row < rows, eps, K, SPAN, STEPS, EVEN_K),)
        for _ in tl.static_range(HALVES):
            accs = accs + (tl.zeros([WARPS, PER_WARP, 32], dtype=tl.float32),)
    for step in tl.static_range(STEPS):
        k0 = step * SPAN
        now = tiles[:HALVES]
        tiles = tiles[HALVES:]
        if step + PRELOAD < STEPS:
            for half in tl.static_range(HALVES):
                row_ptrs = (w_ptr + (half * n_out + col).to(tl.int64) * K)[:, :, None, None]
                next_tile = _load_weight(
                    row_ptrs, live[:, :, None, None], k0 + PRELOAD * SPAN, K, CHUNKS, EVEN_K, EVEN_N
                )
                tiles = tiles + (next_tile,)
        summed = ()
        for row in tl.static_range(ROWS):
            x = _load_step(x_ptr + row * K, row < rows, k0, K, SPAN, EVEN_K)
            if NORM:
                gain = _load_step(norm_ptr, rows > 0, k0, K, SPAN, EVEN_K)
                unit = (x * inverse[row]).to(x_ptr.dtype.element_ty).to(tl.float32)
                x = (unit * gain).to(x_ptr.dtype.element_ty).to(tl.float32)
            values, scale = _quantised(x, of_all, SPAN, COUNT > 0)
            for half in tl.static_range(HALVES):
                factor = scale
                if IN_BLOCKS:
                    factor = scale * _block_scales(SCALE, half * n_out + first, k0, groups, SPAN, ROWS_EACH)
                wide = tl.reshape(values * factor[:, None], [SPAN])
                summed = summed + (
                    accs[row * HALVES + half] + _lane_sums(now[half].to(tl.float32), wide, WARPS, CHUNKS),
                )
        accs = summed

    for row in tl.static_range(ROWS):
        y = _finish(accs[row * HALVES], SCALE, col, n_out, IN_BLOCKS).to(out_ptr.dtype.element_ty).to(tl.float32)
        if GATED:
            up = _finish(accs[row * HALVES + 1], SCALE, n_out + col, 2 * n_out, IN_BLOCKS)
            silu = (y / (1.0 + tl.exp(-y))).to(out_ptr.dtype.element_ty).to(tl.float32)
            y = silu * up.to(out_ptr.dtype.element_ty).to(tl.float32)
        at = row * n_out + col
        mask = live & (row < rows)
        if RESIDUAL:
            y += tl.load(res_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)
