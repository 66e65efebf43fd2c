"""Operands in registers of kernels that stream weights: weights and x as tensor cores take them, and the sums of their
products.

A step is a group of columns, 128 in e4m3 and 64 in 16 bits, for each of W warps, or two groups for each of W / 2 warps.
Tensor cores multiply 16 weight rows by 8 columns of the other operand, and these are the rows of x in 8 / rows steps:
of each product the columns of one step count, and x is read and widened once for all. So a weight in e4m3 costs half a
conversion and hardly more, where on CUDA cores conversions, products and sums take as long as the reads. e4m3 is
widened to float16, which is exact, and float32 sums of a group are multiplied by both scales.
"""

from nanovllm.kernels.base.float_order import magnitude
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.quantize import rounded, scales_of
from nanovllm.kernels.gemm.epilogue import normalise


@triton.jit
def _ordered(tile):
    """[8, W, half a group] -> 16 bits, columns in another order: neighbours, 16 bytes that a lane loads at once, become
    what the product wants in this lane, so nothing moves between lanes."""
    EACH: tl.constexpr = 8 if tile.dtype.primitive_bitwidth == 8 else 4
    lanes = tl.reshape(tile, [tile.shape[0], tile.shape[1], 4, 2, EACH])
    ordered = tl.reshape(tl.permute(lanes, [0, 1, 3, 2, 4]), tile.shape)
    return ordered.to(tl.float16) if EACH == 8 else ordered


@triton.jit
def left(first, second):
    """[8, W, half] of 8 weight rows each -> 16 bits [W, 16, half]."""
    both = tl.permute(tl.join(_ordered(first), _ordered(second)), [1, 3, 0, 2])
    return tl.reshape(both, [first.shape[1], 16, first.shape[2]])


@triton.jit
def _load_weight(ptrs, live, EVEN_K: tl.constexpr):
    """[8, W, half] of weights, or zeros. They are read once, so they go past L1."""
    return tl.load(ptrs, mask=None if EVEN_K else live, other=None if EVEN_K else 0.0, cache_modifier=".cg")


@triton.jit
def load_weights(w_ptr, first, end, cols, K: tl.constexpr, EVEN_K: tl.constexpr):
    """A group of columns of each warp, of 16 weight rows: the halves of the first 8 rows, and of the others. Past
    `end` the last row again. w_ptr: one pointer, or [1, W, 1]; cols [1, W, half]."""
    HALF: tl.constexpr = cols.shape[2]
    rows = first + tl.arange(0, 8)[:, None, None]
    low = w_ptr + tl.minimum(rows, end - 1).to(tl.int64) * K + cols
    high = w_ptr + tl.minimum(rows + 8, end - 1).to(tl.int64) * K + cols
    return (
        _load_weight(low, cols < K, EVEN_K), _load_weight(high, cols < K, EVEN_K),
        _load_weight(low + HALF, cols < K - HALF, EVEN_K), _load_weight(high + HALF, cols < K - HALF, EVEN_K),
    )  # fmt: skip


@triton.jit
def steps_of(begin, ROWS: tl.constexpr):
    """The step of each of the 8 columns from `begin` on: [8]."""
    column = tl.arange(0, 8)
    if ROWS > 1:
        column = column // ROWS
    return begin + column


@triton.jit
def groups_of_steps(begin, WARPS: tl.constexpr, ROWS: tl.constexpr = 1):
    """Groups of each warp, for the steps of 8 columns from `begin` on: [W, 1, 8]."""
    return steps_of(begin, ROWS)[None, None, :] * WARPS + tl.arange(0, WARPS)[:, None, None]


@triton.jit
def columns_of(piece: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, RUN: tl.constexpr):
    """Columns of a group that a piece has, [1, 1, WIDTH]: RUN neighbours of each PIECES * RUN."""
    index = tl.arange(0, WIDTH)
    if RUN < WIDTH:
        index = index // RUN * (PIECES * RUN) + index % RUN
    return (index + piece * RUN)[None, None, :]


@triton.jit
def load_pieces(
    ptr, begin, K: tl.constexpr, WARPS: tl.constexpr, WIDTH: tl.constexpr = 64, ROWS: tl.constexpr = 1, rows=None,
    PIECES: tl.constexpr = 2, RUN: tl.constexpr = None,
):  # fmt: skip
    """The PIECES, [8, W, WIDTH], of the groups of 8 columns in the steps from `begin` on. rows: of ROWS those that are
    there; None: each is the first. RUN: columns of a piece that are neighbours; None: all."""
    EACH: tl.constexpr = WIDTH if RUN is None else RUN
    step, warp = steps_of(begin, ROWS)[:, None, None], tl.arange(0, WARPS)[None, :, None]
    row, found = (tl.arange(0, 8) % ROWS)[:, None, None], ()
    for piece in tl.static_range(PIECES):
        at = (step * WARPS + warp) * (PIECES * WIDTH) + columns_of(piece, WIDTH, PIECES, EACH)
        if rows is None:
            found = found + (tl.load(ptr + at, mask=at < K, other=0.0),)
        else:
            found = found + (tl.load(ptr + row * K + at, mask=(row < rows) & (at < K), other=0.0),)
    return found


@triton.jit
def right(pieces):
    """Pieces of what is multiplied -> 16 bits [W, width, 8]."""
    turned = ()
    for piece in tl.static_range(len(pieces)):
        turned = turned + (tl.permute(_ordered(pieces[piece]), [1, 2, 0]),)
    return turned


@triton.jit
def load_x(
    x_ptr, X_SCALE, begin, scale_stride, K: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr = 1, rows=None
):  # fmt: skip
    """Loads x in e4m3 for 8 columns, from step `begin` on: both halves of the groups [W, 64, 8], and scales [W, 1, 8].
    """
    halves = load_pieces(x_ptr, begin, K, WARPS, 64, ROWS, rows)
    group = groups_of_steps(begin, WARPS, ROWS)
    live, at = group < tl.cdiv(K, 128), X_SCALE + group * scale_stride
    if rows is not None:
        row = (tl.arange(0, 8) % ROWS)[None, None, :]
        at, live = at + row, live & (row < rows)
    scale = tl.load(at, mask=live, other=0.0)
    return right(halves) + (scale,)


@triton.jit
def _round_x(low, high):
    """Halves that are not rounded -> what load_x gives."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    scale = scales_of(tl.maximum(magnitude(low), magnitude(high)))[:, :, None]
    return right((rounded(low, scale), rounded(high, scale))) + (tl.permute(scale, [1, 2, 0]),)


@triton.jit
def add_step(acc, tile, x, scale, step, ROWS: tl.constexpr = 1):
    """acc [W, 16, 8] plus, in the columns of this step, the products of load_weights' tile and x times `scale`."""
    products = tl.dot(left(tile[0], tile[1]), x[0], input_precision="ieee")
    products = tl.dot(left(tile[2], tile[3]), x[1], products, input_precision="ieee")
    return acc + products * tl.where(steps_of(0, ROWS)[None, None, :] == step % (8 // ROWS), scale, 0.0)


@triton.jit
def finish(acc, ROWS: tl.constexpr = 1):
    """Sums of warps and steps: [W, 16, 8] -> [16], or of several ROWS [16, ROWS]."""
    if ROWS == 1:
        return tl.sum(tl.sum(acc, axis=0), axis=1)
    else:
        return tl.sum(tl.reshape(tl.sum(acc, axis=0), [16, 8 // ROWS, ROWS]), axis=1)


@triton.jit
def _factors(
    x_ptr, eps, K: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    rows, PIECES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """1 / rms of x: of one row a scalar, of more [8, 1, 1]."""
    total = tl.zeros([8, WARPS, WIDTH], tl.float32)
    for part in tl.static_range(PARTS):
        x = load_pieces(x_ptr, part * (8 // ROWS), K, WARPS, WIDTH, ROWS, rows, PIECES, RUN)
        for piece in tl.static_range(PIECES):
            total += x[piece].to(tl.float32) * x[piece].to(tl.float32)
    if ROWS == 1:
        return tl.rsqrt(tl.sum(tl.reshape(total, [8 * WARPS * WIDTH])) / K + eps)
    else:
        of_rows = tl.sum(tl.reshape(tl.sum(tl.sum(total, axis=2), axis=1), [8 // ROWS, ROWS]), axis=0)
        columns = tl.broadcast_to(tl.rsqrt(of_rows / K + eps)[None, :], [8 // ROWS, ROWS])
        return tl.reshape(columns, [8])[:, None, None]


@triton.jit
def part_of_x(
    x_ptr, X_SCALE, gain, factor, part, scale_stride, K: tl.constexpr, WARPS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, rows, PIECES: tl.constexpr = 2, RUN: tl.constexpr = None,
):  # fmt: skip
    """Loads x for 8 columns as load_x does, without scales for weights that are not in e4m3. Without X_SCALE x is
    normalised here if there is a gain, and then rounded if weights are in e4m3."""
    begin = part * (8 // ROWS)
    if X_SCALE is not None:
        return load_x(x_ptr, X_SCALE, begin, scale_stride, K, WARPS, ROWS, rows)
    else:
        x = load_pieces(x_ptr, begin, K, WARPS, WIDTH, ROWS, rows, PIECES, RUN)
        if len(gain) > 0:
            normed = ()
            for piece in tl.static_range(PIECES):
                normed = normed + (normalise(x[piece], gain[piece], factor),)
            x = normed
        if WIDTH == 64:
            return _round_x(x[0], x[1])
        else:
            return right(x) + (1.0,)


@triton.jit
def load_parts(
    x_ptr, X_SCALE, gains, scale_stride, eps, K: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr,
    WIDTH: tl.constexpr = 64, ROWS: tl.constexpr = 1, rows=None, PIECES: tl.constexpr = 2, RUN: tl.constexpr = None,
):  # fmt: skip
    """Loads the first PARTS parts of x, each 8 columns. With gains they must be all, which are normalised."""
    loaded, factor = (), 1.0
    if len(gains) > 0:
        factor = _factors(x_ptr, eps, K, PARTS, WARPS, WIDTH, ROWS, rows, PIECES, RUN)
    for part in tl.static_range(PARTS):
        gain = ()
        if len(gains) > 0:
            gain = gains[part]
        loaded = loaded + (part_of_x(x_ptr, X_SCALE, gain, factor, part, scale_stride, K, WARPS, WIDTH, ROWS, rows,
                                     PIECES, RUN),)  # fmt: skip
    return loaded


@triton.jit
def load_step(w_ptr, first, n_out, cols, K: tl.constexpr, EVEN_K: tl.constexpr, HALVES: tl.constexpr):
    """Loads a step of a program's weights, and of the ups that belong to them if HALVES is 2."""
    tiles = ()
    for half in tl.static_range(HALVES):
        tiles = tiles + (load_weights(w_ptr, half * n_out + first, (half + 1) * n_out, cols, K, EVEN_K),)
    return tiles


@triton.jit
def block_scales(SCALE, first, n_out, group, groups, ROWS_EACH: tl.constexpr, HALVES: tl.constexpr):
    """Loads the scales of a program's blocks of weights, for each half, in the groups [W, 1, 8]."""
    scales = ()
    for half in tl.static_range(HALVES):
        at = SCALE + (half * n_out + first) // ROWS_EACH * groups + group
        scales = scales + (tl.load(at, mask=group < groups, other=0.0),)
    return scales


@triton.jit
def both_scales(x, scales, part: tl.constexpr, HALVES: tl.constexpr, IN_BLOCKS: tl.constexpr):
    """Multiplies the scales of x by those of a part's blocks of weights, for each half."""
    both = ()
    for half in tl.static_range(HALVES):
        both = both + (x[len(x) - 1] * (scales[part * HALVES + half] if IN_BLOCKS else 1.0),)
    return both


@triton.jit
def add_halves(accs, tiles, x, scales, step, ROWS: tl.constexpr):
    """add_step for each half."""
    summed = ()
    for half in tl.static_range(len(accs)):
        summed = summed + (add_step(accs[half], tiles[half], x, scales[half], step, ROWS),)
    return summed
