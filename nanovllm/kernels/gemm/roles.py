"""Products of many rows in FP8 by a kernel whose warps have roles.

One warp copies tiles by tensor descriptors into a ring of stages, and one or two groups of four warps multiply, 64 rows
of x at a time each, so that tensor cores work for one group while the other adds up in float32. In Triton's tiles
(tile.py) all warps wait for each other at every step. Programs go on from tile to tile; the first copies for a
tile are made while the one before is stored, and of a program's first tile, its weights before earlier kernels end.
"""

from torch import Tensor

from nanovllm.kernels.base.activations import silu_mul
from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.padded_rows import empty_product, rows_in_memory
from nanovllm.kernels.base.triton_import import gl, gluon, mbarrier, tl, tma, triton, warpgroup_mma, warpgroup_mma_wait
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.quantize import empty_rows_for, group_scales, rounded
from nanovllm.kernels.fp8.reference import GROUP
from nanovllm.kernels.gemm.epilogue import TRITON_DTYPES
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.plan.device import Device

_GROUP: gl.constexpr = gl.constexpr(128)
"""Columns of a step."""


@gluon.jit
def _place(tile, grid, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """First row, first weight row, split, first and end step of a tile; those of the same weights are neighbours."""
    tiles_m, tiles_n, splits, steps = grid
    split = tile // (tiles_m * tiles_n)
    begin, end = steps * split // splits, steps * (split + 1) // splits
    return tile % tiles_m * BLOCK_M, tile // tiles_m % tiles_n * BLOCK_N, split, begin, end


@gluon.jit
def _copy_weights(W, ws, ready, first_col, step, n_out, GATED: gl.constexpr, BYTES: gl.constexpr):
    BLOCK_N: gl.constexpr = W.block_shape[0]
    mbarrier.expect(ready, BYTES)
    tma.async_copy_global_to_shared(W, [first_col, step * _GROUP], ready, ws.slice(0, BLOCK_N))
    if GATED:
        tma.async_copy_global_to_shared(W, [n_out + first_col, step * _GROUP], ready, ws.slice(BLOCK_N, BLOCK_N))


@gluon.jit
def _copy(X, X_SCALE, W, ring, grid, n_out, scale_stride, GATED: gl.constexpr, PDL: gl.constexpr):
    """The warp that fills the ring."""
    xs, scales, ws, ready, free = ring
    STAGES: gl.constexpr = xs.shape[0]
    BLOCK_M: gl.constexpr = xs.shape[1]
    BLOCK_N: gl.constexpr = W.block_shape[0]
    BYTES: gl.constexpr = (BLOCK_M + ws.shape[1]) * _GROUP + 4 * BLOCK_M
    first_row, first_col, _, begin, end = _place(gl.program_id(0), grid, BLOCK_M, BLOCK_N)
    early = gl.minimum(end - begin, STAGES)
    for slot in range(early):
        _copy_weights(W, ws.index(slot), ready.index(slot), first_col, begin + slot, n_out, GATED, BYTES)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for slot in range(early):
        step = begin + slot
        tma.async_copy_global_to_shared(X, [first_row, step * _GROUP], ready.index(slot), xs.index(slot))
        tma.async_copy_global_to_shared(
            X_SCALE, [step * scale_stride + first_row], ready.index(slot), scales.index(slot)
        )
    count = early
    for tile in range(gl.program_id(0), grid[0] * grid[1] * grid[2], gl.num_programs(0)):
        first_row, first_col, _, begin, end = _place(tile, grid, BLOCK_M, BLOCK_N)
        already = early * (tile == gl.program_id(0)).to(gl.int32)
        for step in range(begin + already, end):
            slot = count % STAGES
            mbarrier.wait(free.index(slot), (count // STAGES + 1) & 1)
            _copy_weights(W, ws.index(slot), ready.index(slot), first_col, step, n_out, GATED, BYTES)
            tma.async_copy_global_to_shared(X, [first_row, step * _GROUP], ready.index(slot), xs.index(slot))
            tma.async_copy_global_to_shared(
                X_SCALE, [step * scale_stride + first_row], ready.index(slot), scales.index(slot)
            )
            count += 1


@gluon.jit
def _scales_of(
    SCALE, first_col, first, end, groups, n_out,
    STEPS: gl.constexpr, EACH: gl.constexpr, ROWS_EACH: gl.constexpr, IN_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Scales of the blocks of weights of STEPS from `first` on, each with that of ups; past `end` the last one again.
    """
    scales = ()
    for at in gl.static_range(STEPS):
        for half in gl.static_range(EACH):
            scale = 1.0
            if IN_BLOCKS:
                block = (first_col + half * n_out) // ROWS_EACH
                scale = gl.load(SCALE + block * groups + gl.minimum(first + at, end - 1))
            scales = scales + (scale,)
    return scales


@gluon.jit
def _add_products(sums, products, scale, IS_LAST: gl.constexpr):
    """The first of `sums` [64, n], plus products times their scales [64], behind the others. Registers are few: these
    are added up before the next products come into theirs, if there are any."""
    acc = sums[0] + products * scale[:, None]
    if not IS_LAST:
        acc = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=gl.float32, is_pure=False, pack=1)
    return sums[1:] + (acc,)


@gluon.jit
def _add_steps(
    sums, products, of_weights, ring, count,
    WHO: gl.constexpr, OF: gl.constexpr, EACH: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Adds the products of STEPS, the first of which is the ring's number `count`, to `sums` [64, n] of a group's rows,
    each with that of ups. Where there are registers of two `products`, one is computed while the other is added up."""
    xs, scales, ws, ready, free = ring
    STAGES: gl.constexpr = xs.shape[0]
    BLOCK_N: gl.constexpr = ws.shape[1] // EACH
    A_STEP: gl.constexpr = len(sums)
    COUNT: gl.constexpr = STEPS * A_STEP
    AHEAD: gl.constexpr = len(products) - 1
    flying = ()
    for i in gl.static_range(COUNT + AHEAD):
        if i < COUNT:
            slot = (count + i // A_STEP) % STAGES
            if i % A_STEP == 0:
                mbarrier.wait(ready.index(slot), (count + i // A_STEP) // STAGES & 1)
            x = xs.index(slot).slice(64 * (WHO + OF * (i % A_STEP // EACH)), 64)
            w = ws.index(slot).slice(BLOCK_N * (i % EACH), BLOCK_N).permute((1, 0))
            of_rows = scales.index(slot).slice(64 * (WHO + OF * (i % A_STEP // EACH)), 64)
            scale = of_rows.load(gl.SliceLayout(1, sums[0].type.layout)) * of_weights[i // A_STEP * EACH + i % EACH]
            flying = flying + (warpgroup_mma(x, w, products[0], use_acc=False, is_async=True), scale)
            products = products[1:]
        if i >= AHEAD:
            done = warpgroup_mma_wait(len(flying) // 2 - 1, deps=[flying[0]])
            sums = _add_products(sums, done, flying[1], i + 1 == COUNT + AHEAD)
            products, flying = products + (done,), flying[2:]
    for at in gl.static_range(STEPS):
        mbarrier.arrive(free.index((count + at) % STAGES), count=1)
    return sums, products


@gluon.jit
def _multiply(
    SCALE, OUT, OUT_SCALES, out_stride, ring, grid, rows, n_out, groups,
    WHO: gl.constexpr, OF: gl.constexpr, GATED: gl.constexpr, PARTS: gl.constexpr, ROWS_EACH: gl.constexpr,
    IN_BLOCKS: gl.constexpr, DTYPE: gl.constexpr, IN_PAIRS: gl.constexpr,
):  # fmt: skip
    """Group WHO of OF groups of warps: rows 64 * (WHO + OF * i) of each tile."""
    EACH: gl.constexpr = 2 if GATED else 1
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    BLOCK_N: gl.constexpr = ring[2].shape[1] // EACH
    OWN: gl.constexpr = BLOCK_M // (64 * OF)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    # Two products at once where there are two of a step, or an even number of steps, and registers for them.
    STEPS: gl.constexpr = 2 if OWN * EACH == 1 and IN_PAIRS else 1
    AT_ONCE: gl.constexpr = 2 if STEPS * OWN * EACH > 1 and (OWN * EACH + 2) * BLOCK_N <= 384 else 1
    count = 0
    for tile in range(gl.program_id(0), grid[0] * grid[1] * grid[2], gl.num_programs(0)):
        first_row, first_col, split, begin, end = _place(tile, grid, BLOCK_M, BLOCK_N)
        sums, products = (), ()
        for _ in gl.static_range(OWN * EACH):
            sums = sums + (gl.zeros([64, BLOCK_N], gl.float32, MMA),)
        for _ in gl.static_range(AT_ONCE):
            products = products + (gl.zeros([64, BLOCK_N], gl.float32, MMA),)
        of_weights = _scales_of(SCALE, first_col, begin, end, groups, n_out, STEPS, EACH, ROWS_EACH, IN_BLOCKS)
        for step in range(begin, end, STEPS):
            coming = _scales_of(SCALE, first_col, step + STEPS, end, groups, n_out, STEPS, EACH, ROWS_EACH, IN_BLOCKS)
            sums, products = _add_steps(sums, products, of_weights, ring, count, WHO, OF, EACH, STEPS)
            of_weights = coming
            count += STEPS
        for own in gl.static_range(OWN):
            _store(
                sums[EACH * own], sums[EACH * own + EACH - 1], SCALE, OUT, OUT_SCALES, out_stride,
                first_row + 64 * (WHO + OF * own), first_col, rows, n_out, split, GATED, PARTS, IN_BLOCKS, DTYPE,
            )  # fmt: skip


@gluon.jit
def _store(
    acc, up, SCALE, OUT, OUT_SCALES, out_stride, first_row, first_col, rows, n_out, split,
    GATED: gl.constexpr, PARTS: gl.constexpr, IN_BLOCKS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Sums [64, n]; `up` is not looked at unless GATED."""
    MMA: gl.constexpr = acc.type.layout
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    row = first_row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, MMA))
    col = first_col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, MMA))
    if not IN_BLOCKS:
        of_weights = SCALE + gl.minimum(col, n_out - 1)
        acc *= gl.load(of_weights)[None, :]
        if GATED:
            up *= gl.load(of_weights + n_out)[None, :]
    if GATED:
        acc = gl.where((col < n_out)[None, :], silu_mul(acc, up, DTYPE).to(DTYPE).to(gl.float32), 0.0)
        scale = group_scales(acc)
        gl.store(OUT_SCALES + first_col // _GROUP * out_stride + row, scale, mask=row < rows)
        acc = gl.convert_layout(rounded(acc, scale[:, None]), WIDE)
        row = first_row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, WIDE))
        col = first_col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, WIDE))
    OUT += row.to(gl.int64)[:, None] * n_out + col[None, :]
    if PARTS:
        OUT += split.to(gl.int64) * rows * n_out
    gl.store(OUT, acc.to(OUT.dtype.element_ty), mask=(row < rows)[:, None] & (col < n_out)[None, :])


@gluon.jit(do_not_specialize=["rows", "scale_stride", "out_stride", "tiles_m"])
def roles_kernel(
    X, X_SCALE, W, SCALE, OUT, OUT_SCALES, rows, scale_stride, out_stride, n_out, groups,
    tiles_m, tiles_n, splits, steps,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, ROWS_EACH: gl.constexpr, IN_BLOCKS: gl.constexpr, PARTS: gl.constexpr,
    DTYPE: gl.constexpr, IN_PAIRS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (programs,), which share the tiles. X, W, SCALE, OUT: as in tile.py, but that a tile's weights have
    one scale of a block. X_SCALE: descriptor of x's scales [groups * scale_stride]. GROUPS of warps multiply. Where
    there are OUT_SCALES [groups of n_out, out_stride], OUT is silu(gate) * up, rounded to DTYPE and then to e4m3."""
    GATED: gl.constexpr = OUT_SCALES is not None
    BLOCK_M: gl.constexpr = X.block_shape[0]
    W_ROWS: gl.constexpr = W.block_shape[0] * (2 if GATED else 1)
    ring = (
        gl.allocate_shared_memory(X.dtype, [STAGES, BLOCK_M, _GROUP], X.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], X_SCALE.layout),
        gl.allocate_shared_memory(W.dtype, [STAGES, W_ROWS, _GROUP], W.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for slot in gl.static_range(STAGES):
        mbarrier.init(ring[3].index(slot), count=1)
        mbarrier.init(ring[4].index(slot), count=GROUPS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    grid = (tiles_m, tiles_n, splits, steps)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    SCALE, OUT, OUT_SCALES, out_stride, ring, grid, rows, n_out, groups,
                    0, 1, GATED, PARTS, ROWS_EACH, IN_BLOCKS, DTYPE, IN_PAIRS,
                )),
                (_copy, (X, X_SCALE, W, ring, grid, n_out, scale_stride, GATED, PDL)),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    SCALE, OUT, OUT_SCALES, out_stride, ring, grid, rows, n_out, groups,
                    0, 2, GATED, PARTS, ROWS_EACH, IN_BLOCKS, DTYPE, IN_PAIRS,
                )),
                (_multiply, (
                    SCALE, OUT, OUT_SCALES, out_stride, ring, grid, rows, n_out, groups,
                    1, 2, GATED, PARTS, ROWS_EACH, IN_BLOCKS, DTYPE, IN_PAIRS,
                )),
                (_copy, (X, X_SCALE, W, ring, grid, n_out, scale_stride, GATED, PDL)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


def linear(x: FP8Rows, weight: FP8Weight, config: GemmConfig, *, gated: bool = False) -> Tensor | FP8Rows:
    """x [T, K] @ weight^T -> [T, N] in the dtype that x was rounded from; with config.parts > 1 float32 [parts, T, N].
    gated: gates are the first N / 2 columns, and the result is silu(gate) * up, [T, N / 2], rounded to e4m3."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    (rows, k), values, scales, device = x.shape, weight.values, x.scales.t(), weight.values.device
    n_out = values.shape[0] // 2 if gated else values.shape[0]
    if values.shape[1] != k or k % 16 or (gated and weight.in_blocks and n_out % GROUP):
        raise ValueError(f"weight {list(values.shape)} does not fit x {list(x.shape)}, or has ragged blocks or groups")
    activated = empty_rows_for(rows, n_out, x.dtype, device) if gated else None
    out = activated.values if activated else empty_product(rows, n_out, config.parts, False, x.dtype, device)
    tiles_m, tiles_n = triton.cdiv(rows, config.block_m), triton.cdiv(n_out, config.block_n)
    readable = min(rows_in_memory(x.values), tiles_m * config.block_m)
    bytes_layout, floats_layout = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(0, 32, 1)
    groups, stride = triton.cdiv(k, GROUP), scales.stride(0)
    programs = Device.of(device).processors * 8 // config.num_warps  # as many as fit
    roles_kernel[(min(tiles_m * tiles_n * config.split_k, programs),)](
        TensorDescriptor(x.values, [readable, k], [k, 1], [config.block_m, GROUP], bytes_layout),
        TensorDescriptor(scales, [groups * stride], [1], [config.block_m], floats_layout),
        TensorDescriptor(values, list(values.shape), [k, 1], [config.block_n, GROUP], bytes_layout),
        weight.scale, out, activated and activated.scales, rows, stride, activated.scales.stride(1) if activated else 0,
        n_out, weight.scale.shape[1], tiles_m, tiles_n, config.split_k, groups, STAGES=config.stages,
        GROUPS=config.num_warps // 4, ROWS_EACH=weight.rows_each, IN_BLOCKS=weight.in_blocks, PARTS=config.parts > 1,
        DTYPE=TRITON_DTYPES[x.dtype], IN_PAIRS=groups % (2 * config.split_k) == 0, num_warps=4,
        maxnreg=128 if config.num_warps == 4 else None, **pdl_options(device),
    )  # fmt: skip
    return out if activated is None else activated
