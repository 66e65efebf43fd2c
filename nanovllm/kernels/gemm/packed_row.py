"""Products of one row by weights of 4 and 8 bits, fused with what surrounds them in a decoder layer; as fma.py, and by
its rule: no kernel in flight may write weights.

Nothing crosses threads between memory and the tensor cores: a lane's 16 bytes, as they lie there, are its part of the
left operands of matrix instructions, whose narrow side is x. A warp takes blocks of 128 columns of its own, for all
weight rows of the program, and only the last sum, over the warps, goes through shared memory. Triton would choose other
layouts. So they are written down, in Gluon, and a conversion that would move data does not compile.

Weights come by asynchronous copies, the first ones before `gdc_wait`; what an earlier kernel writes is read after it,
as in fma.py.
"""

from torch import Tensor

from nanovllm.kernels.base.activations import silu_mul
from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import async_copy, gl, gluon, mma_v2, tl, triton
from nanovllm.kernels.gemm.e2m1 import E2M1
from nanovllm.kernels.gemm.epilogue import checked_width, normalise
from nanovllm.kernels.gemm.expand import Shrunk, b_of_rows, delta_of_rows, of_adapters, sums_of_rows
from nanovllm.kernels.gemm.packed import INT8 as BYTES
from nanovllm.kernels.gemm.packed import PackedWeight, check_fits
from nanovllm.kernels.gemm.unpack import SPAN, WORDS, e2m1_planes, int8_planes, unpacked, words_of_row
from nanovllm.kernels.plan.config import INT4, INT8, NVFP4, GemmConfig
from nanovllm.kernels.pointwise.norm import Norm

M: gl.constexpr = gl.constexpr(16)
"""Weight rows of a tile, and of a matrix instruction."""
N: gl.constexpr = gl.constexpr(8)
"""Rows of x in the product: the one row is there 8 times, or for numbers of e2m1 a run of its columns."""
RUN: gl.constexpr = gl.constexpr(16)
"""Columns of e2m1 that are next to each other, and have a column of the product."""


@triton.constexpr_function
def _lift(dtype: object) -> float:
    """Factor of x for numbers of e2m1: in bfloat16 these are 2^-126 times what they stand for, and products are to stay
    far from the least numbers of float32."""
    return 2.0**64 if dtype == tl.bfloat16 else 1.0


@gluon.jit
def _operand(values, LAYOUT: gl.constexpr):
    """values [WARPS, rows, 32], of which a lane has 8 neighbours, as a left operand of two instructions, [WARPS, rows,
    32], or a right one, [WARPS, 32, rows]: in another order of columns, the same for both, in which nothing moves."""
    WARPS: gl.constexpr = values.shape[0]
    ROWS: gl.constexpr = values.shape[1]
    lanes = values.reshape((WARPS, ROWS, 4, 2, 2, 2))
    if LAYOUT.operand_index == 0:
        ordered = lanes.permute((0, 1, 3, 4, 2, 5)).reshape((WARPS, ROWS, WORDS))
    else:
        ordered = lanes.permute((0, 3, 4, 2, 5, 1)).reshape((WARPS, WORDS, ROWS))
    return gl.convert_layout(ordered, LAYOUT, assert_trivial=True)


@gluon.jit
def _weight_rows(layout: gl.constexpr, first, n_out, TILES: gl.constexpr, PAIRED: gl.constexpr, EVEN_N: gl.constexpr):
    """The weight rows of TILES tiles that begin with output `first`. PAIRED: 16 gates and the ups that belong to them
    take turns. Past the end the last one is there again."""
    index = gl.arange(0, M * TILES, layout=layout)
    row = first + (index // (2 * M) * M + index % M if PAIRED else index)
    if not EVEN_N:
        row = gl.minimum(row, n_out - 1)
    return row + (index // M % 2 * n_out if PAIRED else 0)


@gluon.jit
def _copy_step(
    words, scales, w_ptr, groups_ptr, first, step, n, n_out,
    BLOCKS: gl.constexpr, TILES: gl.constexpr, GROUP: gl.constexpr, PAIRED: gl.constexpr, EVEN_N: gl.constexpr,
):  # fmt: skip
    """Starts to copy a step into its place in the rings: words [WARPS, rows, 32 or 64], a block for each warp, and
    scales int32 [sets of a block x WARPS, rows]: of integers scale and zero of a group, of e2m1 the scales of four.
    Past the end the last block is there again."""
    slot = step % words.shape[0]
    words, scales = words.index(slot), scales.index(slot)
    WARPS: gl.constexpr = words.shape[0]
    OF_ROW: gl.constexpr = words.shape[2]
    SETS: gl.constexpr = scales.shape[0] // WARPS
    PACKED: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, PACKED))
    block = step * WARPS + gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, PACKED)))[:, None, None]
    if BLOCKS % WARPS:
        block = gl.minimum(block, BLOCKS - 1)
    row = _weight_rows(ROWS, first, n_out, TILES, PAIRED, EVEN_N)[None, :, None]
    word = gl.arange(0, OF_ROW, layout=gl.SliceLayout(0, gl.SliceLayout(1, PACKED)))[None, None, :]
    async_copy.async_copy_global_to_shared(words, w_ptr + (block * n + row) * OF_ROW + word, cache_modifier=".cg")

    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    index = gl.arange(0, SETS * WARPS, layout=gl.SliceLayout(1, PAIRS))
    block = step * WARPS + index % WARPS
    if BLOCKS % WARPS:
        block = gl.minimum(block, BLOCKS - 1)
    group = (block * SETS + index // WARPS if GROUP else block * 0)[:, None]
    row = _weight_rows(gl.SliceLayout(0, PAIRS), first, n_out, TILES, PAIRED, EVEN_N)[None, :]
    async_copy.async_copy_global_to_shared(scales, groups_ptr.to(gl.pointer_type(gl.int32)) + group * n + row)


@gluon.jit
def _share(shared, x_ptr, norm_ptr, eps, K: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr):
    """Waits for earlier kernels, then puts x [K] into shared [steps, WARPS, 128], normalised if norm_ptr, zeros past
    its end. Returns what it was multiplied by, but for norm_ptr."""
    STEPS: gl.constexpr = shared.shape[0]
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, WARPS], [1, 0])
    ORDER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    dtype: gl.constexpr = shared.dtype
    col = gl.arange(0, WARPS * SPAN, layout=gl.SliceLayout(0, FLAT))[None, :]
    col += gl.arange(0, STEPS, layout=gl.SliceLayout(1, FLAT))[:, None] * (WARPS * SPAN)
    if norm_ptr is not None:
        gain = gl.load(norm_ptr + col, mask=col < K, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x, scale = gl.load(x_ptr + col, mask=col < K, other=0.0), 1.0
    if norm_ptr is not None:
        x32 = x.to(gl.float32)
        scale = gl.rsqrt(gl.sum(gl.sum(x32 * x32, axis=0), axis=0) / K + eps)
        x = normalise(x, gain, scale)
    shared._reinterpret(dtype, [STEPS, WARPS, SPAN], ORDER).store(x.reshape((STEPS, WARPS, SPAN)))
    return scale


@gluon.jit
def _planes(words, dtype: gl.constexpr, CODE: gl.constexpr):
    """Four planes [WARPS, 16, 32] of a tile's numbers: of "int4" plus an offset, of "e2m1" as e2m1_planes has them."""
    PACKED: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [words.shape[0], 1, 1], [2, 1, 0])
    found = words.slice(0, WORDS, dim=2).load(PACKED)
    if CODE == "int4":
        return unpacked(found, dtype, True)
    elif CODE == "bytes":
        first = int8_planes(found, dtype, True)
        second = int8_planes(words.slice(WORDS, WORDS, dim=2).load(PACKED), dtype, True)
        return first[0], second[0], first[1], second[1]
    else:
        return e2m1_planes(found, dtype, True)


@gluon.jit
def _add_ints(
    accs, words, pairs, x, dtype: gl.constexpr, CODE: gl.constexpr, HAS_ZEROS: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """accs, float32 [WARPS, 16, 8] for each tile, plus a step of words and pairs times x [WARPS, 128]."""
    WARPS: gl.constexpr = words.shape[0]
    GROUPS: gl.constexpr = pairs.shape[0] // WARPS
    PLANES: gl.constexpr = 4 // GROUPS
    OFFSET: gl.constexpr = 128 if dtype == gl.bfloat16 else 1024
    PACKED: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    planes = ()
    for tile in gl.static_range(len(accs)):
        planes = planes + (_planes(words.slice(tile * M, M, dim=1), dtype, CODE),)
    for group in gl.static_range(GROUPS):
        sums, zeros = (), ()
        for tile in gl.static_range(len(accs)):
            sums = sums + (gl.zeros([WARPS, M, N], gl.float32, MMA),)
            zero = gl.full([WARPS, M], 8 + OFFSET, dtype, gl.SliceLayout(2, LEFT))
            if HAS_ZEROS:
                pair = pairs.slice(group * WARPS, WARPS, dim=0).slice(tile * M, M, dim=1).load(gl.SliceLayout(2, LEFT))
                zero = ((pair >> 16).to(gl.int16).to(dtype, bitcast=True) + OFFSET).to(dtype)
            zeros = zeros + (zero[:, :, None],)
        for plane in gl.static_range(group * PLANES, (group + 1) * PLANES):
            part = x.slice(plane * WORDS, WORDS, dim=1).load(gl.SliceLayout(1, PACKED))[:, None, :]
            right = _operand(part.broadcast_to((WARPS, N, WORDS)), gl.DotOperandLayout(1, MMA, 2))
            more = ()
            for tile in gl.static_range(len(accs)):  # chains of products side by side: one instruction takes its time
                left = _operand(planes[tile][plane], LEFT)
                if CODE == "int4":
                    left -= zeros[tile]
                more = more + (mma_v2(left, right, sums[tile]),)
            sums = more
        more = ()
        for tile in gl.static_range(len(accs)):
            pair = pairs.slice(group * WARPS, WARPS, dim=0).slice(tile * M, M, dim=1).load(gl.SliceLayout(2, MMA))
            scale = pair.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
            more = more + (accs[tile] + scale[:, :, None] * sums[tile],)
        accs = more
    return accs


@gluon.jit
def _add_floats(accs, words, fours, x, dtype: gl.constexpr, MMA: gl.constexpr):
    """Does what _add_ints does, by numbers of e2m1 and x [WARPS, 8 runs, 16].

    A plane has two runs of 16 columns: groups p and p + 4, or both halves of group p. Column r of the right operand has
    x of run r, and zeros beside the other one; so column r of the product by this run's plane has the sums of the run,
    and the scales of all runs multiply at once.
    """
    WARPS: gl.constexpr = words.shape[0]
    IS_LONG: gl.constexpr = fours.shape[0] == WARPS  # groups of 32
    HALVES: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, N, 2, 2], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    run = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, HALVES))))[None, :, None, None]
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, HALVES))))[None, None, :, None]
    part = x.load(gl.SliceLayout(2, HALVES))[:, :, None, :].broadcast_to((WARPS, N, 2, RUN))
    lifted = part * gl.where((run % 2 if IS_LONG else run // 4) == half, _lift(dtype), 0.0).to(dtype)
    right = _operand(lifted.reshape((WARPS, N, WORDS)), gl.DotOperandLayout(1, MMA, 2))
    column, more = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :], ()
    of_plane = column // 2 if IS_LONG else column % 4
    for tile in gl.static_range(len(accs)):
        planes = _planes(words.slice(tile * M, M, dim=1), dtype, "e2m1")
        sums = gl.zeros([WARPS, M, N], gl.float32, MMA)
        for plane in gl.static_range(4):
            numbers = planes[plane]
            if dtype == gl.float16:
                numbers = (numbers * 2.0**63 * 2.0**63).to(dtype)
            left = _operand(numbers, gl.DotOperandLayout(0, MMA, 2))
            product = mma_v2(left, right, gl.zeros([WARPS, M, N], gl.float32, MMA))
            sums = gl.where(of_plane == plane, product, sums)
        of_tile = fours.slice(tile * M, M, dim=1)
        four = of_tile.slice(0, WARPS, dim=0).load(gl.SliceLayout(2, MMA))[:, :, None]
        if IS_LONG:  # powers of two, of which bytes are exponents, 126 more than they are
            scale = ((four >> of_plane * 8 & 255) << 23).to(gl.float32, bitcast=True) * 2.0**-126
        else:  # e4m3
            high = of_tile.slice(WARPS, WARPS, dim=0).load(gl.SliceLayout(2, MMA))[:, :, None]
            bits = gl.where(column < 4, four, high) >> of_plane * 8 & 127
            scale = (bits << 20).to(gl.float32, bitcast=True) * 2.0**120
        more = more + (accs[tile] + scale * sums,)
    return more


@gluon.jit
def packed_row_kernel(
    x_ptr, w_ptr, groups_ptr, factors_ptr, norm_ptr, out_ptr, res_ptr, ADAPTER, n, n_out, eps,
    K: gl.constexpr, X_STEPS: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr,
    CODE: gl.constexpr, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr, EVEN_N: gl.constexpr, PAIRED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Grid (groups of TILES tiles of weight rows); x [K], weights as in int4_gemm_kernel, out [n_out]. X_STEPS: steps
    of WARPS blocks that K has, rounded up to a power of two. TILES is 1, 2 or 4. AHEAD: steps of weights on their way.
    PAIRED: out is silu(gate) * up, rounded as the product and the activation by themselves do. res_ptr: None, or
    [n_out], which is added before the sum is rounded; it may be out. ADAPTER: see expand.py."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, M, N])
    IS_FLOAT: gl.constexpr = CODE == "e2m1"
    SUMS: gl.constexpr = gl.BlockedLayout([WARPS, 1, N if IS_FLOAT else 1], [1, 32, 1], [1, WARPS, 1], [2, 1, 0])
    BLOCKS: gl.constexpr = (K + SPAN - 1) // SPAN
    STEPS: gl.constexpr = (BLOCKS + WARPS - 1) // WARPS
    SETS: gl.constexpr = WORDS // GROUP if IS_FLOAT else SPAN // GROUP if GROUP else 1
    ROW_ORDER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    PAIR_ORDER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    words = gl.allocate_shared_memory(gl.int16, [AHEAD + 1, WARPS, M * TILES, words_of_row(CODE)], ROW_ORDER)
    scales = gl.allocate_shared_memory(gl.int32, [AHEAD + 1, SETS * WARPS, M * TILES], PAIR_ORDER)
    first = gl.program_id(0) * (M * TILES // 2 if PAIRED else M * TILES)
    for early in gl.static_range(AHEAD):
        if early < STEPS:
            _copy_step(words, scales, w_ptr, groups_ptr, first, early, n, n_out, BLOCKS, TILES, GROUP, PAIRED, EVEN_N)
        async_copy.commit_group()
    shared = gl.allocate_shared_memory(dtype, [X_STEPS, WARPS, SPAN], PAIR_ORDER)
    OF_B: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    slot, b, sums, deltas, w_row, rank = -1, 0.0, (), None, 0, 0
    if ADAPTER is not None:
        w_row = _weight_rows(gl.SliceLayout(1, OF_B), first, n_out, TILES, PAIRED, EVEN_N)[:, None]
        slot, rank = gl.load(ADAPTER[1]), gl.arange(0, ADAPTER[3], layout=gl.SliceLayout(0, OF_B))[None, :]
        b = b_of_rows(ADAPTER, slot, w_row, w_row >= 0, rank, n)
    scale = _share(shared, x_ptr, norm_ptr, eps, K, PDL, WARPS)
    if ADAPTER is not None:
        sums = sums_of_rows(ADAPTER, slot, 0, 1, w_row, rank)
    if IS_FLOAT:
        shared = shared._reinterpret(dtype, [X_STEPS, WARPS, N, RUN], ROW_ORDER)
    bases = _loaded(res_ptr, first, n_out, TILES, False, SUMS)
    factors = _loaded(factors_ptr, first, n_out, TILES, PAIRED, SUMS)
    accs = ()
    for _ in gl.static_range(TILES):
        accs = accs + (gl.zeros([WARPS, M, N], gl.float32, MMA),)
    for step in range(STEPS):
        async_copy.wait_group(AHEAD - 1)
        ahead = step + AHEAD
        if ahead < STEPS:
            _copy_step(words, scales, w_ptr, groups_ptr, first, ahead, n, n_out, BLOCKS, TILES, GROUP, PAIRED, EVEN_N)
        async_copy.commit_group()
        at = step % (AHEAD + 1)
        if IS_FLOAT:
            accs = _add_floats(accs, words.index(at), scales.index(at), shared.index(step), dtype, MMA)
        else:
            accs = _add_ints(accs, words.index(at), scales.index(at), shared.index(step), dtype, CODE, HAS_ZEROS, MMA)
    if ADAPTER is not None:
        deltas = gl.allocate_shared_memory(gl.float32, [M * TILES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        deltas.store(of_adapters(delta_of_rows(sums, b, scale), slot))
    # of groups of 16 NV_FACTOR is a part of the factors
    FACTOR: gl.constexpr = (2.0**126 if dtype == gl.bfloat16 else 1.0) / _lift(dtype) / (256.0 if GROUP == 16 else 1.0)
    _finish(accs, bases, factors, deltas, out_ptr, first, n_out, FACTOR, dtype, PAIRED, SUMS)


@gluon.jit
def _places(first, tile: gl.constexpr, n_out, SUMS: gl.constexpr):
    """Indices in out of a tile's sums [16, 1], and a mask of those that belong there."""
    col = first + tile * M + gl.arange(0, M, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))[:, None]
    return col, col < n_out


@gluon.jit
def _loaded(ptr, first, n_out, TILES: gl.constexpr, PAIRED: gl.constexpr, SUMS: gl.constexpr):
    """Loads the numbers of each tile's weight rows, if any, before they are needed."""
    found = ()
    if ptr is not None:
        for tile in gl.static_range(TILES):
            at, live = _places(first, tile // 2 if PAIRED else tile, n_out, SUMS)
            at += tile % 2 * n_out if PAIRED else 0
            found = found + (gl.load(ptr + at, mask=live, other=0.0).to(gl.float32),)
    return found


@gluon.jit
def _finish(
    accs, bases, factors, deltas, out_ptr, first, n_out, FACTOR: gl.constexpr, dtype: gl.constexpr,
    PAIRED: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Adds up the warps' sums float32 [WARPS, 16, 8] of each tile, times FACTOR times `factors` if there are such, and
    stores what becomes of them. SUMS: a layout in which one thread has all that it adds up: a reduction over warps as
    Triton does it costs as much as the products. deltas: None, or in shared memory [rows of all tiles], what adapters
    add to the sums."""
    ROW_ORDER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    WARPS: gl.constexpr = SUMS.size_per_thread[0]
    COLUMNS: gl.constexpr = SUMS.size_per_thread[2]
    buffers, sums = (), ()
    for tile in gl.static_range(len(accs)):
        buffers = buffers + (gl.allocate_shared_memory(gl.float32, [WARPS, M, N], ROW_ORDER, accs[tile]),)
    for tile in gl.static_range(len(accs)):
        y = gl.sum(buffers[tile].slice(0, COLUMNS, dim=2).load(SUMS), axis=0)
        if COLUMNS > 1:
            y = gl.sum(y, axis=1)[:, None]
        if len(factors) > 0:
            y *= factors[tile] * FACTOR
        if deltas is not None:
            y += deltas.slice(tile * M, M).load(gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))[:, None]
        sums = sums + (y,)
    for tile in gl.static_range(len(accs) // 2 if PAIRED else len(accs)):
        at, live = _places(first, tile, n_out, SUMS)
        y = silu_mul(sums[2 * tile], sums[2 * tile + 1], dtype) if PAIRED else sums[tile]
        if len(bases) > 0:
            y += bases[tile]
        gl.store(out_ptr + at, y.to(dtype), mask=live)


_DTYPES = {INT4: INT4, BYTES: INT8, E2M1: NVFP4}


def linear(
    x: Tensor, weight: PackedWeight, config: GemmConfig, *, norm: Norm | None = None, gated: bool = False,
    residual: Tensor | None = None, delta: Shrunk | None = None,
) -> Tensor:  # fmt: skip
    """x [1, k] @ weight^T -> [1, n]; norm, gated, residual and delta as in fma.linear, but that the product is
    rounded before the activation."""
    check_fits(x, weight)
    n_out = checked_width(config, x.shape, weight.shape, residual, gated=gated, dtype=_DTYPES[weight.code])
    out = x.new_empty(1, n_out) if residual is None else residual
    outputs = config.block_n // 2 if gated else config.block_n
    steps = triton.cdiv(weight.k, SPAN.value * config.num_warps)
    packed_row_kernel[(triton.cdiv(n_out, outputs),)](
        x, weight.words, weight.scales, weight.factors, norm and norm.weight, out, residual, delta and delta.operands,
        weight.n, n_out, norm.eps if norm else 0.0, K=weight.k, X_STEPS=triton.next_power_of_2(steps),
        TILES=config.block_n // 16, WARPS=config.num_warps, AHEAD=config.stages, CODE=weight.code, GROUP=weight.group,
        HAS_ZEROS=weight.has_zeros, EVEN_N=n_out % outputs == 0, PAIRED=gated, num_warps=config.num_warps,
        maxnreg=config.max_registers or None, **pdl_options(x.device),
    )  # fmt: skip
    return out
