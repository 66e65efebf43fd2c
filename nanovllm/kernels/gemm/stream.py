"""Products of 1 to 8 rows on tensor cores by weights that pass through registers, in e4m3 or 16 bits, fused with what
surrounds them in a decoder layer; as gemm/skinny.py, and by its rule: no kernel in flight may write weights.

A step is a group of columns for each warp, 128 in e4m3 and 64 in 16 bits. Tensor cores multiply 16 weight rows by 8
columns of the other operand, and these are the rows of x in 8 / rows steps: of each product the columns of one step
count, and x is read and widened once for all. So a weight in e4m3 costs half a conversion and hardly more, where on
CUDA cores conversions, products and sums take as long as the reads. e4m3 is widened to float16, which is exact, and
float32 sums of a group are multiplied by both scales.

The first steps of weights are read into registers before `gdc_wait`, as in gemm/skinny.py. Where one row comes
unrounded every program normalises and rounds all of it: the lane that rounds a number is the one that multiplies by it,
and one dependent kernel less is worth more than that.
"""

import torch
from torch import Tensor

from nanovllm.kernels.base.activations import silu_mul
from nanovllm.kernels.base.device import multiprocessors, pdl_options
from nanovllm.kernels.base.float_order import magnitude
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight, values_of
from nanovllm.kernels.fp8.quantize import in_groups, quantize_rows, rounded, scales_of
from nanovllm.kernels.fp8.reference import GROUP
from nanovllm.kernels.gemm.epilogue import normalise
from nanovllm.kernels.plan.config import STREAM_ROWS, GemmConfig
from nanovllm.kernels.pointwise.norm import Norm, add_norms, add_norms_fp8


@triton.jit
def _ordered(tile):
    """[8, W, half a group] -> 16 bits, columns in another order: neighbours, 16 bytes that a lane loads at once, become
    what the product wants in this lane, so nothing moves between lanes."""
    EACH: tl.constexpr = 8 if tile.dtype.primitive_bitwidth == 8 else 4
    lanes = tl.reshape(tile, [tile.shape[0], tile.shape[1], 4, 2, EACH])
    ordered = tl.reshape(tl.permute(lanes, [0, 1, 3, 2, 4]), tile.shape)
    return ordered.to(tl.float16) if EACH == 8 else ordered


@triton.jit
def _left(first, second):
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
def _steps_of(begin, ROWS: tl.constexpr):
    """The step of each of the 8 columns from `begin` on: [8]."""
    column = tl.arange(0, 8)
    if ROWS > 1:
        column = column // ROWS
    return begin + column


@triton.jit
def groups_of_steps(begin, WARPS: tl.constexpr, ROWS: tl.constexpr = 1):
    """Groups of each warp, for the steps of 8 columns from `begin` on: [W, 1, 8]."""
    return _steps_of(begin, ROWS)[None, None, :] * WARPS + tl.arange(0, WARPS)[:, None, None]


@triton.jit
def load_halves(
    ptr, begin, K: tl.constexpr, WARPS: tl.constexpr, HALF: tl.constexpr = 64, ROWS: tl.constexpr = 1, rows=None
):  # fmt: skip
    """Both halves, [8, W, HALF], of the groups of 8 columns in the steps from `begin` on. rows: of ROWS those that are
    there; None: each is the first."""
    step, warp = _steps_of(begin, ROWS)[:, None, None], tl.arange(0, WARPS)[None, :, None]
    at = (step * WARPS + warp) * (2 * HALF) + tl.arange(0, HALF)[None, None, :]
    if rows is None:
        return tl.load(ptr + at, mask=at < K, other=0.0), tl.load(ptr + at + HALF, mask=at < K - HALF, other=0.0)
    else:
        row = (tl.arange(0, 8) % ROWS)[:, None, None]
        ptrs, live = ptr + row * K + at, row < rows
        low = tl.load(ptrs, mask=live & (at < K), other=0.0)
        return low, tl.load(ptrs + HALF, mask=live & (at < K - HALF), other=0.0)


@triton.jit
def _right(low, high):
    """Halves of what is multiplied -> 16 bits [W, half, 8]."""
    return tl.permute(_ordered(low), [1, 2, 0]), tl.permute(_ordered(high), [1, 2, 0])


@triton.jit
def load_x(
    x_ptr, X_SCALE, begin, scale_stride, K: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr = 1, rows=None
):  # fmt: skip
    """Loads x in e4m3 for 8 columns, from step `begin` on: both halves of the groups [W, 64, 8], and scales [W, 1, 8].
    """
    halves = load_halves(x_ptr, begin, K, WARPS, 64, ROWS, rows)
    group = groups_of_steps(begin, WARPS, ROWS)
    live, at = group < tl.cdiv(K, 128), X_SCALE + group * scale_stride
    if rows is not None:
        row = (tl.arange(0, 8) % ROWS)[None, None, :]
        at, live = at + row, live & (row < rows)
    scale = tl.load(at, mask=live, other=0.0)
    low, high = _right(halves[0], halves[1])
    return low, high, scale


@triton.jit
def _round_x(low, high):
    """Halves that are not rounded -> what load_x gives."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    scale = scales_of(tl.maximum(magnitude(low), magnitude(high)))[:, :, None]
    low, high = _right(rounded(low, scale), rounded(high, scale))
    return low, high, tl.permute(scale, [1, 2, 0])


@triton.jit
def add_step(acc, tile, x, scale, step, ROWS: tl.constexpr = 1):
    """acc [W, 16, 8] plus, in the columns of this step, the products of load_weights' tile and x times `scale`."""
    products = tl.dot(_left(tile[0], tile[1]), x[0], input_precision="ieee")
    products = tl.dot(_left(tile[2], tile[3]), x[1], products, input_precision="ieee")
    return acc + products * tl.where(_steps_of(0, ROWS)[None, None, :] == step % (8 // ROWS), scale, 0.0)


@triton.jit
def finish(acc, ROWS: tl.constexpr = 1):
    """Sums of warps and steps: [W, 16, 8] -> [16], or of several ROWS [16, ROWS]."""
    if ROWS == 1:
        return tl.sum(tl.sum(acc, axis=0), axis=1)
    else:
        return tl.sum(tl.reshape(tl.sum(acc, axis=0), [16, 8 // ROWS, ROWS]), axis=1)


@triton.jit
def _factors(
    x_ptr, eps, K: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, rows
):
    """1 / rms of x: of one row a scalar, of more [8, 1, 1]."""
    total = tl.zeros([8, WARPS, HALF], tl.float32)
    for part in tl.static_range(PARTS):
        low, high = load_halves(x_ptr, part * (8 // ROWS), K, WARPS, HALF, ROWS, rows)
        total += low.to(tl.float32) * low.to(tl.float32) + high.to(tl.float32) * high.to(tl.float32)
    if ROWS == 1:
        return tl.rsqrt(tl.sum(tl.reshape(total, [8 * WARPS * HALF])) / K + eps)
    else:
        of_rows = tl.sum(tl.reshape(tl.sum(tl.sum(total, axis=2), axis=1), [8 // ROWS, ROWS]), axis=0)
        columns = tl.broadcast_to(tl.rsqrt(of_rows / K + eps)[None, :], [8 // ROWS, ROWS])
        return tl.reshape(columns, [8])[:, None, None]


@triton.jit
def _part_of_x(
    x_ptr, X_SCALE, gain, factor, part, scale_stride, K: tl.constexpr, WARPS: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, rows,
):  # fmt: skip
    """Loads x for 8 columns as load_x does, without scales for weights of 16 bits. Without X_SCALE x is normalised here
    if there is a gain, and then rounded if weights are in e4m3."""
    begin = part * (8 // ROWS)
    if X_SCALE is not None:
        return load_x(x_ptr, X_SCALE, begin, scale_stride, K, WARPS, ROWS, rows)
    else:
        low, high = load_halves(x_ptr, begin, K, WARPS, HALF, ROWS, rows)
        if len(gain) > 0:
            low, high = normalise(low, gain[0], factor), normalise(high, gain[1], factor)
        if HALF == 64:
            return _round_x(low, high)
        else:
            low, high = _right(low, high)
            return low, high, 1.0


@triton.jit
def load_parts(
    x_ptr, X_SCALE, gains, scale_stride, eps, K: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr,
    HALF: tl.constexpr = 64, ROWS: tl.constexpr = 1, rows=None,
):  # fmt: skip
    """Loads the first PARTS parts of x, each 8 columns. With gains they must be all, which are normalised."""
    loaded, factor = (), 1.0
    if len(gains) > 0:
        factor = _factors(x_ptr, eps, K, PARTS, WARPS, HALF, ROWS, rows)
    for part in tl.static_range(PARTS):
        gain = ()
        if len(gains) > 0:
            gain = gains[part]
        loaded = loaded + (_part_of_x(x_ptr, X_SCALE, gain, factor, part, scale_stride, K, WARPS, HALF, ROWS, rows),)
    return loaded


@triton.jit
def _load_step(w_ptr, first, n_out, cols, K: tl.constexpr, EVEN_K: tl.constexpr, HALVES: tl.constexpr):
    """Loads a step of a program's weights, and of the ups that belong to them if HALVES is 2."""
    tiles = ()
    for half in tl.static_range(HALVES):
        tiles = tiles + (load_weights(w_ptr, half * n_out + first, (half + 1) * n_out, cols, K, EVEN_K),)
    return tiles


@triton.jit
def _block_scales(SCALE, first, n_out, group, groups, ROWS_EACH: tl.constexpr, HALVES: tl.constexpr):
    """Loads the scales of a program's blocks of weights, for each half, in the groups [W, 1, 8]."""
    scales = ()
    for half in tl.static_range(HALVES):
        at = SCALE + (half * n_out + first) // ROWS_EACH * groups + group
        scales = scales + (tl.load(at, mask=group < groups, other=0.0),)
    return scales


@triton.jit
def _both_scales(x, scales, part: tl.constexpr, HALVES: tl.constexpr, IN_BLOCKS: tl.constexpr):
    """Multiplies the scales of x by those of a part's blocks of weights, for each half."""
    both = ()
    for half in tl.static_range(HALVES):
        both = both + (x[2] * (scales[part * HALVES + half] if IN_BLOCKS else 1.0),)
    return both


@triton.jit
def _add_halves(accs, tiles, x, scales, step, ROWS: tl.constexpr):
    """add_step for each half."""
    summed = ()
    for half in tl.static_range(len(accs)):
        summed = summed + (add_step(accs[half], tiles[half], x, scales[half], step, ROWS),)
    return summed


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def stream_kernel(
    x_ptr, X_SCALE, GAIN, w_ptr, SCALE, out_ptr, res_ptr, scale_stride, n_out, groups, eps, rows,
    K: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, PRELOAD: tl.constexpr, AHEAD: tl.constexpr,
    ROWS_EACH: tl.constexpr, IN_BLOCKS: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 16 columns). x [rows <= ROWS, K]: of the weights' type, or for weights in e4m3 with X_SCALE
    [groups of K], scale_stride apart, or, where there is none, to be rounded; with GAIN [K] it is normalised first.
    GATED: weights are [2 n_out, K], and a program has 16 gates and the ups that belong to them. Where IN_BLOCKS, 16
    divides ROWS_EACH and n_out, and SCALE is [weight rows / ROWS_EACH, groups]. PRELOAD: steps of weights in flight;
    AHEAD: 8 columns of x. res_ptr: None, or [rows, n_out], which is added."""
    HALF: tl.constexpr = 64 if SCALE is not None else 32
    SPAN: tl.constexpr = WARPS * 2 * HALF
    HALVES: tl.constexpr = 2 if GATED else 1
    EACH: tl.constexpr = 8 // ROWS
    PARTS: tl.constexpr = (STEPS + EACH - 1) // EACH
    live_rows = rows if ROWS > 1 else None
    first = tl.program_id(0) * 16
    cols = tl.arange(0, WARPS)[None, :, None] * (2 * HALF) + tl.arange(0, HALF)[None, None, :]

    tiles, scales, gains = (), (), ()
    for step in tl.static_range(PRELOAD):
        tiles = tiles + _load_step(w_ptr, first, n_out, cols + step * SPAN, K, EVEN_K, HALVES)
    for part in tl.static_range(PARTS):
        if GAIN is not None:
            gains = gains + (load_halves(GAIN, part * EACH, K, WARPS, HALF, ROWS),)
        group = groups_of_steps(part * EACH, WARPS, ROWS)
        scales = scales + _block_scales(SCALE, first, n_out, group, groups, ROWS_EACH, HALVES if IN_BLOCKS else 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    col, residual = first + tl.arange(0, 16), None
    if res_ptr is not None:
        at, live = _places(col, rows, n_out, ROWS)
        residual = tl.load(res_ptr + at, mask=live, other=0.0).to(tl.float32)
    loaded = load_parts(x_ptr, X_SCALE, gains, scale_stride, eps, K, AHEAD, WARPS, HALF, ROWS, live_rows)
    accs, both = (), ()
    for _ in tl.static_range(HALVES):
        accs = accs + (tl.zeros([WARPS, 16, 8], dtype=tl.float32),)
    for part in tl.static_range(AHEAD):
        both = both + (_both_scales(loaded[part], scales, part, HALVES, IN_BLOCKS),)
    for step in tl.static_range(STEPS):
        accs = _add_halves(accs, tiles, loaded[step // EACH], both[step // EACH], step, ROWS)
        tiles = tiles[HALVES:]
        if step + PRELOAD < STEPS:
            tiles = tiles + _load_step(w_ptr, first, n_out, cols + (step + PRELOAD) * SPAN, K, EVEN_K, HALVES)
        if step % EACH == EACH - 1 and step // EACH + AHEAD < PARTS:
            x = _part_of_x(x_ptr, X_SCALE, (), 1.0, step // EACH + AHEAD, scale_stride, K, WARPS, HALF, ROWS,
                           live_rows)  # fmt: skip
            loaded = loaded + (x,)
            both = both + (_both_scales(x, scales, step // EACH + AHEAD, HALVES, IN_BLOCKS),)

    y = _result(accs, residual, SCALE, col, n_out, out_ptr.dtype.element_ty, IN_BLOCKS, ROWS)
    at, live = _places(col, rows, n_out, ROWS)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _places(col, rows, n_out, ROWS: tl.constexpr):
    """Indices in out of the results, of one row [16], of more [16, ROWS], and a mask of those that belong there."""
    if ROWS == 1:
        return col, col < n_out
    else:
        row = tl.arange(0, ROWS)[None, :]
        return row * n_out + col[:, None], (row < rows) & (col < n_out)[:, None]


@triton.jit
def _finish(acc, SCALE, rows_of_w, n_end, IN_BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """`finish`, times the scales of the weights' rows."""
    y = finish(acc, ROWS)
    if SCALE is not None and not IN_BLOCKS:
        scale = tl.load(SCALE + tl.minimum(rows_of_w, n_end - 1))
        y *= scale if ROWS == 1 else scale[:, None]
    return y


@triton.jit
def _result(accs, residual, SCALE, col, n_out, dtype: tl.constexpr, IN_BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """Finished sums of a tile, activated if there are those of ups too, plus the residual, if any: float32."""
    y = _finish(accs[0], SCALE, col, n_out, IN_BLOCKS, ROWS)
    if len(accs) > 1:
        y = silu_mul(y, _finish(accs[1], SCALE, n_out + col, 2 * n_out, IN_BLOCKS, ROWS), dtype)
    if residual is not None:
        if SCALE is not None:
            y = y.to(dtype).to(tl.float32)
        y += residual
    return y


def linear(
    x: Tensor | FP8Rows, weight: Tensor | FP8Weight, config: GemmConfig, *, norm: Norm | None = None,
    gated: bool = False, residual: Tensor | None = None, pdl: bool = True,
) -> Tensor:  # fmt: skip
    """x [M <= 8, K] @ weight^T -> [M, N]; norm, of x that is no FP8Rows, gated and residual as in skinny.linear, but
    that the product is rounded before the activation, and in e4m3 before it is added."""
    (rows, k), values, dtype = tuple(x.shape), values_of(weight), x.dtype
    n_out = values.shape[0] // 2 if gated else values.shape[0]
    _check(x, weight, config, n_out)
    if isinstance(x, Tensor) and isinstance(weight, FP8Weight):
        x, norm = _rounded(x, weight, norm, residual)
    out = torch.empty(rows, n_out, dtype=dtype, device=values.device) if residual is None else residual
    steps, block_rows = triton.cdiv(k, config.block_k), triton.next_power_of_2(rows)
    parts = triton.cdiv(steps * block_rows, 8)
    ahead = parts if rows == 1 or norm is not None or parts <= 4 else 2  # registers hold no more of x
    scale, rows_each, in_blocks = None, 1, False
    if isinstance(weight, FP8Weight):
        scale, rows_each, in_blocks = weight.scale, weight.rows_each, weight.in_blocks
    x = x if isinstance(x, Tensor) or rows == 1 else in_groups(x)
    x, x_scale, stride = (x, None, 0) if isinstance(x, Tensor) else (x.values, x.scales, x.scales.stride(1))
    gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    programs = triton.cdiv(n_out, 16)
    stream_kernel[(programs,)](
        x, x_scale, gain, values, scale, out, residual, scale_stride=stride, n_out=n_out,
        groups=0 if scale is None else scale.shape[1], eps=eps, rows=rows, K=k, ROWS=block_rows, STEPS=steps,
        PRELOAD=min(config.stages, steps), AHEAD=ahead, ROWS_EACH=rows_each, IN_BLOCKS=in_blocks,
        EVEN_K=k == steps * config.block_k, GATED=gated, WARPS=config.num_warps, num_warps=config.num_warps,
        maxnreg=_registers(config, steps, programs, gated, values.device) if rows == 1 and scale is not None else None,
        **pdl_options(values.device, pdl),
    )  # fmt: skip
    return out


def _check(x: Tensor | FP8Rows, weight: Tensor | FP8Weight, config: GemmConfig, n_out: int) -> None:
    (rows, k), values = tuple(x.shape), values_of(weight)
    columns, multiple = (GROUP, 16) if isinstance(weight, FP8Weight) else (GROUP // 2, 8)
    if not 1 <= rows <= STREAM_ROWS:
        raise ValueError(f"a streamed weight takes 1 to {STREAM_ROWS} rows, got {rows}")
    if values.shape[1] != k or k % multiple:
        fault = f"does not fit x {list(x.shape)}, or K is no multiple of {multiple}"
        raise ValueError(f"weight {list(values.shape)} {fault}")
    if not values.is_contiguous() or config.block_n != 16 or config.block_k != columns * config.num_warps:
        raise ValueError(f"{config}: must take 16 contiguous weight rows, and {columns} columns a warp and step")
    if isinstance(weight, FP8Weight) and weight.in_blocks and (weight.rows_each % 16 or n_out % 16):
        raise ValueError(f"weight {list(values.shape)}: 16s of rows must share scales, not {weight.rows_each}")


def _rounded(
    x: Tensor, weight: FP8Weight, norm: Norm | None, residual: Tensor | None
) -> tuple[Tensor | FP8Rows, Norm | None]:
    """x in e4m3, or as it is where the kernel rounds it, and the norm that is left to the kernel."""
    rows, k = x.shape
    if rows > 1 and norm is not None and weight.input_scale is None:
        return add_norms_fp8(x, None, norm)[0], None
    if rows == 1 and residual is None and weight.input_scale is None and k <= 8192:
        return x, norm
    # Before a residual, and where every program has much to round, a kernel of its own takes less time.
    x = x if norm is None else add_norms(x, None, norm)[0]
    return FP8Rows(*quantize_rows(x, weight.input_scale), x.dtype), None


def _registers(config: GemmConfig, steps: int, programs: int, gated: bool, device: torch.device) -> int | None:
    """Most registers of a thread, for one row of e4m3; None: the compiler chooses."""
    if config.num_warps == 8 and steps <= 16 and not gated:  # one that holds more of x, or of weights, needs more
        return 128  # two programs fit a multiprocessor
    processors = multiprocessors(device)
    if config.num_warps == 4 and steps > 16 and 2 * processors < programs <= 3 * processors and not gated:
        return 168  # three do, and all run at once
    return None
