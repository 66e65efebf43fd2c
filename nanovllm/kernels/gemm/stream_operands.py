"""Operands in registers of kernels that stream weights: weights and x as tensor cores take them, and the sums of their
products.

A step is a group of columns, 128 in e4m3 and 64 in 16 bits, for each of W warps, or two groups for each of W / 2 warps.
Tensor cores multiply 16 weight rows by 8 columns of the other operand, and these are the rows of x in 8 / rows steps:
of each product the columns of one step count, and x is read and widened once for all. So a weight in e4m3 costs half a
conversion and hardly more, where on CUDA cores conversions, products and sums take as long as the reads. e4m3 is
widened to float16, which is exact, and float32 sums of a group are multiplied by both scales.
"""

from typing import Any, NamedTuple

from nanovllm.kernels.base.float_order import magnitude
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.quantize import rounded, scales_of
from nanovllm.kernels.gemm.epilogue import normalise


class Walk(NamedTuple):
    """Way of a kernel's programs through their weights. All are constants: what they decide is compiled away."""

    code: Any
    """Numbers of the weights: "wide" (16 bits), "e4m3", or what PackedWeight has, as `group` and `has_zeros`."""
    group: Any
    has_zeros: Any
    ptx: Any
    """A GPU runs, not an interpreter: PTX may unpack."""
    k: Any
    even_k: Any
    """Whether steps end where k does."""
    warps: Any
    """Groups of columns in a step."""
    rows: Any = 1
    """Rows of x, up to a power of two."""
    halves: Any = 1
    """2: programs have gates, and the ups that belong to them."""


@triton.constexpr_function
def is_packed(code: str) -> bool:
    """Whether it is one of a PackedWeight."""
    return code not in ("wide", "e4m3")


@triton.constexpr_function
def pieces_of(code: str) -> int:
    """Pieces of a group of columns, each for one instruction."""
    return 4 if is_packed(code) else 2


@triton.constexpr_function
def width_of(code: str) -> int:
    """Columns of a piece."""
    return 64 if code == "e4m3" else 32


@triton.constexpr_function
def neighbours(code: str, group: int) -> int:
    """Columns of a piece that are next to each other."""
    return 16 if group == 16 else width_of(code)


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
def _load_weight(ptrs, live, walk):
    """[8, W, half] of weights, or zeros. They are read once, so they go past L1."""
    return tl.load(ptrs, mask=None if walk.even_k else live, other=None if walk.even_k else 0.0, cache_modifier=".cg")


@triton.jit
def load_weights(w_ptr, first, end, cols, walk):
    """A group of columns of each warp, of 16 weight rows: the halves of the first 8 rows, and of the others. Past
    `end` the last row again. w_ptr: one pointer, or [1, W, 1]; cols [1, W, half]."""
    HALF: tl.constexpr = cols.shape[2]
    rows, live = first + tl.arange(0, 8)[:, None, None], cols < walk.k
    low = w_ptr + tl.minimum(rows, end - 1).to(tl.int64) * walk.k + cols
    high = w_ptr + tl.minimum(rows + 8, end - 1).to(tl.int64) * walk.k + cols
    halves = _load_weight(low, live, walk), _load_weight(high, live, walk)
    live = cols < walk.k - HALF
    return halves + (_load_weight(low + HALF, live, walk), _load_weight(high + HALF, live, walk))


@triton.jit
def steps_of(begin, walk):
    """The step of each of the 8 columns from `begin` on: [8]."""
    column = tl.arange(0, 8)
    if walk.rows > 1:
        column = column // walk.rows
    return begin + column


@triton.jit
def groups_of_steps(begin, walk):
    """Groups of each warp, for the steps of 8 columns from `begin` on: [W, 1, 8]."""
    return steps_of(begin, walk)[None, None, :] * walk.warps + tl.arange(0, walk.warps)[:, None, None]


@triton.jit
def columns_of(piece: tl.constexpr, walk):
    """Columns of a group that a piece has, [1, 1, width]."""
    WIDTH: tl.constexpr = width_of(walk.code)
    RUN: tl.constexpr = neighbours(walk.code, walk.group)
    index = tl.arange(0, WIDTH)
    if RUN < WIDTH:
        index = index // RUN * (pieces_of(walk.code) * RUN) + index % RUN
    return (index + piece * RUN)[None, None, :]


@triton.jit
def load_pieces(ptr, begin, walk, rows=None):
    """The pieces, [8, W, width], of the groups of 8 columns in the steps from `begin` on. rows: of walk.rows those that
    are there; None: each is the first."""
    PIECES: tl.constexpr = pieces_of(walk.code)
    step, warp = steps_of(begin, walk)[:, None, None], tl.arange(0, walk.warps)[None, :, None]
    row, found = (tl.arange(0, 8) % walk.rows)[:, None, None], ()
    for piece in tl.static_range(PIECES):
        at = (step * walk.warps + warp) * (PIECES * width_of(walk.code)) + columns_of(piece, walk)
        if rows is None:
            found = found + (tl.load(ptr + at, mask=at < walk.k, other=0.0),)
        else:
            found = found + (tl.load(ptr + row * walk.k + at, mask=(row < rows) & (at < walk.k), other=0.0),)
    return found


@triton.jit
def right(pieces):
    """Pieces of what is multiplied -> 16 bits [W, width, 8]."""
    turned = ()
    for piece in tl.static_range(len(pieces)):
        turned = turned + (tl.permute(_ordered(pieces[piece]), [1, 2, 0]),)
    return turned


@triton.jit
def load_x(x_ptr, X_SCALE, begin, scale_stride, walk, rows=None):
    """Loads x in e4m3 for 8 columns, from step `begin` on: both halves of the groups [W, 64, 8], and scales [W, 1, 8].
    """
    halves = load_pieces(x_ptr, begin, walk, rows)
    group = groups_of_steps(begin, walk)
    live, at = group < tl.cdiv(walk.k, 128), X_SCALE + group * scale_stride
    if rows is not None:
        row = (tl.arange(0, 8) % walk.rows)[None, None, :]
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
def of_step(step, walk):
    """Mask [1, 1, 8] of the columns that count in a step's products."""
    return steps_of(0, walk)[None, None, :] == step % (8 // walk.rows)


@triton.jit
def add_wide(acc, tile, x, scale, step, walk):
    """acc [W, 16, 8] plus, in the columns of this step, the products of load_weights' tile and x times `scale`."""
    products = tl.dot(left(tile[0], tile[1]), x[0], input_precision="ieee")
    products = tl.dot(left(tile[2], tile[3]), x[1], products, input_precision="ieee")
    return acc + products * tl.where(of_step(step, walk), scale, 0.0)


@triton.jit
def finish(acc, ROWS: tl.constexpr):
    """Sums of warps and steps: [W, 16, 8] -> [16], or of several ROWS [16, ROWS]."""
    if ROWS == 1:
        return tl.sum(tl.sum(acc, axis=0), axis=1)
    else:
        return tl.sum(tl.reshape(tl.sum(acc, axis=0), [16, 8 // ROWS, ROWS]), axis=1)


@triton.jit
def norm_factors(x_ptr, eps, PARTS: tl.constexpr, walk, rows):
    """1 / rms of x: of one row a scalar, of more [8, 1, 1]."""
    WIDTH: tl.constexpr = width_of(walk.code)
    EACH: tl.constexpr = 8 // walk.rows
    total = tl.zeros([8, walk.warps, WIDTH], tl.float32)
    for part in tl.static_range(PARTS):
        x = load_pieces(x_ptr, part * EACH, walk, rows)
        for piece in tl.static_range(len(x)):
            total += x[piece].to(tl.float32) * x[piece].to(tl.float32)
    if walk.rows == 1:
        return tl.rsqrt(tl.sum(tl.reshape(total, [8 * walk.warps * WIDTH])) / walk.k + eps)
    else:
        of_rows = tl.sum(tl.reshape(tl.sum(tl.sum(total, axis=2), axis=1), [EACH, walk.rows]), axis=0)
        columns = tl.broadcast_to(tl.rsqrt(of_rows / walk.k + eps)[None, :], [EACH, walk.rows])
        return tl.reshape(columns, [8])[:, None, None]


@triton.jit
def part_of_x(x_ptr, X_SCALE, gain, factor, part, scale_stride, walk, rows):
    """Loads x for 8 columns as load_x does, without scales for weights that are not in e4m3. Without X_SCALE x is
    normalised here if there is a gain, and then rounded if weights are in e4m3."""
    begin = part * (8 // walk.rows)
    if X_SCALE is not None:
        return load_x(x_ptr, X_SCALE, begin, scale_stride, walk, rows)
    else:
        x = load_pieces(x_ptr, begin, walk, rows)
        if len(gain) > 0:
            normed = ()
            for piece in tl.static_range(len(x)):
                normed = normed + (normalise(x[piece], gain[piece], factor),)
            x = normed
        if walk.code == "e4m3":
            return _round_x(x[0], x[1])
        else:
            return right(x) + (1.0,)


@triton.jit
def load_parts(x_ptr, X_SCALE, gains, scale_stride, eps, PARTS: tl.constexpr, walk, rows=None):
    """Loads the first PARTS parts of x, each 8 columns. With gains they must be all, which are normalised."""
    loaded, factor = (), 1.0
    if len(gains) > 0:
        factor = norm_factors(x_ptr, eps, PARTS, walk, rows)
    for part in tl.static_range(PARTS):
        gain = ()
        if len(gains) > 0:
            gain = gains[part]
        loaded = loaded + (part_of_x(x_ptr, X_SCALE, gain, factor, part, scale_stride, walk, rows),)
    return loaded


@triton.jit
def load_gains(GAIN, PARTS: tl.constexpr, walk):
    """Loads the norm's weight as load_parts takes it; () where there is none."""
    gains = ()
    if GAIN is not None:
        for part in tl.static_range(PARTS):
            gains = gains + (load_pieces(GAIN, part * (8 // walk.rows), walk),)
    return gains


@triton.jit
def block_scales(SCALE, first, n_out, groups, ROWS_EACH: tl.constexpr, PARTS: tl.constexpr, walk):
    """Loads the scales of a program's blocks of weights, for each part of x and each half: [W, 1, 8]."""
    scales = ()
    for part in tl.static_range(PARTS):
        group = groups_of_steps(part * (8 // walk.rows), walk)
        for half in tl.static_range(walk.halves):
            at = SCALE + (half * n_out + first) // ROWS_EACH * groups + group
            scales = scales + (tl.load(at, mask=group < groups, other=0.0),)
    return scales


@triton.jit
def both_scales(x, scales, part: tl.constexpr, walk):
    """Multiplies the scales of x by those of a part's blocks of weights, where there are such, for each half."""
    both = ()
    for half in tl.static_range(walk.halves):
        both = both + (x[len(x) - 1] * (scales[part * walk.halves + half] if len(scales) > 0 else 1.0),)
    return both
