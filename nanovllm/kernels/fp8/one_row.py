"""FP8 products of one row on tensor cores, fused with what surrounds them in a decoder layer; as gemm/skinny.py, and by
its rule: no kernel in flight may write weights.

Each warp takes every WARPS-th group of 128 columns: a step is a group of each warp. Tensor cores multiply 16 weight
rows by 8 columns of the other operand, and these are x of 8 steps: of each product one column counts, and x is read and
widened once for all. So a weight costs half a conversion and hardly more, where on CUDA cores conversions, products and
sums take as long as the reads. e4m3 is widened to float16, which is exact, and float32 sums of a group are multiplied
by both scales.

The first steps of weights are read into registers before `gdc_wait`, as in gemm/skinny.py. Where x comes unrounded
every program normalises and rounds all of it: the lane that rounds a number is the one that multiplies by it, and one
dependent kernel less is worth more than that.
"""

import torch
from torch import Tensor

from nanovllm.kernels.base.activations import silu_mul
from nanovllm.kernels.base.device import multiprocessors, pdl_options
from nanovllm.kernels.base.float_order import magnitude
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.quantize import quantize_rows, rounded, scales_of
from nanovllm.kernels.fp8.reference import GROUP
from nanovllm.kernels.gemm.epilogue import normalise
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.pointwise.norm import Norm, add_norms


@triton.jit
def _widened(tile):
    """e4m3 [8, W, 64] -> float16, columns in another order: 16 neighbours, which a lane loads at once, become what the
    product wants in this lane, so nothing moves between lanes."""
    lanes = tl.reshape(tile, [tile.shape[0], tile.shape[1], 4, 2, 8])
    return tl.reshape(tl.permute(lanes, [0, 1, 3, 2, 4]), tile.shape).to(tl.float16)


@triton.jit
def _left(first, second):
    """e4m3 [8, W, 64] of 8 weight rows each -> float16 [W, 16, 64]."""
    both = tl.permute(tl.join(_widened(first), _widened(second)), [1, 3, 0, 2])
    return tl.reshape(both, [first.shape[1], 16, 64])


@triton.jit
def _load_weight(ptrs, live, EVEN_K: tl.constexpr):
    """[8, W, 64] of weights, or zeros. They are read once, so they go past L1."""
    if EVEN_K:
        return tl.load(ptrs, cache_modifier=".cg")
    else:
        return tl.load(ptrs, mask=live, other=0.0, cache_modifier=".cg")


@triton.jit
def load_weights(w_ptr, first, end, cols, K: tl.constexpr, EVEN_K: tl.constexpr):
    """A group of columns of each warp, of 16 weight rows: the halves of the first 8 rows, and of the others. Past
    `end` the last row again. w_ptr: one pointer, or [1, W, 1]; cols [1, W, 64]."""
    rows = first + tl.arange(0, 8)[:, None, None]
    low = w_ptr + tl.minimum(rows, end - 1).to(tl.int64) * K + cols
    high = w_ptr + tl.minimum(rows + 8, end - 1).to(tl.int64) * K + cols
    return (
        _load_weight(low, cols < K, EVEN_K), _load_weight(high, cols < K, EVEN_K),
        _load_weight(low + 64, cols < K - 64, EVEN_K), _load_weight(high + 64, cols < K - 64, EVEN_K),
    )  # fmt: skip


@triton.jit
def groups_of_steps(begin, WARPS: tl.constexpr):
    """Group indices of each warp in the 8 steps from `begin` on: [W, 1, 8]."""
    return (begin + tl.arange(0, 8)[None, None, :]) * WARPS + tl.arange(0, WARPS)[:, None, None]


@triton.jit
def load_halves(ptr, begin, K: tl.constexpr, WARPS: tl.constexpr):
    """Both halves, [8, W, 64], of the groups of a row in 8 steps from `begin` on."""
    step, warp = begin + tl.arange(0, 8)[:, None, None], tl.arange(0, WARPS)[None, :, None]
    at = (step * WARPS + warp) * 128 + tl.arange(0, 64)[None, None, :]
    return tl.load(ptr + at, mask=at < K, other=0.0), tl.load(ptr + at + 64, mask=at < K - 64, other=0.0)


@triton.jit
def _right(low, high):
    """Halves in e4m3 -> float16 [W, 64, 8]."""
    return tl.permute(_widened(low), [1, 2, 0]), tl.permute(_widened(high), [1, 2, 0])


@triton.jit
def load_x(x_ptr, X_SCALE, begin, scale_stride, K: tl.constexpr, WARPS: tl.constexpr):
    """x of 8 steps from `begin` on: both halves of the groups [W, 64, 8], and scales [W, 1, 8]."""
    halves = load_halves(x_ptr, begin, K, WARPS)
    group = groups_of_steps(begin, WARPS)
    scale = tl.load(X_SCALE + group * scale_stride, mask=group < tl.cdiv(K, 128), other=0.0)
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
def add_step(acc, tile, x, scale, step):
    """acc [W, 16, 8] plus in one column the products of load_weights' tile and x of this step, times `scale`."""
    products = tl.dot(_left(tile[0], tile[1]), x[0])
    products = tl.dot(_left(tile[2], tile[3]), x[1], products)
    return acc + products * tl.where(tl.arange(0, 8)[None, None, :] == step % 8, scale, 0.0)


@triton.jit
def finish(acc):
    """Sums of warps and columns: [W, 16, 8] -> [16]."""
    return tl.sum(tl.sum(acc, axis=0), axis=1)


@triton.jit
def all_of_x(
    x_ptr, X_SCALE, gains, scale_stride, eps, K: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """Loads x for all steps, as load_x does for 8. Without X_SCALE x is rounded here, after its norm where there are
    gains."""
    loaded, factor = (), 1.0
    if len(gains) > 0:
        total = tl.zeros([8, WARPS, 64], tl.float32)
        for part in tl.static_range(PARTS):
            low, high = load_halves(x_ptr, part * 8, K, WARPS)
            total += low.to(tl.float32) * low.to(tl.float32) + high.to(tl.float32) * high.to(tl.float32)
        factor = tl.rsqrt(tl.sum(tl.reshape(total, [8 * WARPS * 64])) / K + eps)
    for part in tl.static_range(PARTS):
        if X_SCALE is not None:
            loaded = loaded + (load_x(x_ptr, X_SCALE, part * 8, scale_stride, K, WARPS),)
        else:
            low, high = load_halves(x_ptr, part * 8, K, WARPS)
            if len(gains) > 0:
                low, high = normalise(low, gains[part][0], factor), normalise(high, gains[part][1], factor)
            loaded = loaded + (_round_x(low, high),)
    return loaded


@triton.jit(do_not_specialize=["scale_stride"])
def fp8_row_kernel(
    x_ptr, X_SCALE, GAIN, w_ptr, SCALE, out_ptr, res_ptr, scale_stride, n_out, groups, eps,
    K: tl.constexpr, STEPS: tl.constexpr, PRELOAD: tl.constexpr, ROWS_EACH: tl.constexpr, IN_BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 16 columns). x [K]: e4m3 with X_SCALE [groups of K], scale_stride apart, or, where there is none,
    to be rounded; with GAIN [K] it is normalised first. GATED: weights are [2 n_out, K], and a program has 16 gates and
    the ups that belong to them. Where IN_BLOCKS, 16 divides ROWS_EACH and n_out, and SCALE is [weight rows / ROWS_EACH,
    groups]. PRELOAD: steps of weights in flight. res_ptr: None, or [n_out], which is added."""
    SPAN: tl.constexpr = WARPS * 128
    HALVES: tl.constexpr = 2 if GATED else 1
    PARTS: tl.constexpr = (STEPS + 7) // 8
    first = tl.program_id(0) * 16
    cols = tl.arange(0, WARPS)[None, :, None] * 128 + tl.arange(0, 64)[None, None, :]

    tiles = ()
    for step in tl.static_range(PRELOAD):
        for half in tl.static_range(HALVES):
            at, end = half * n_out + first, (half + 1) * n_out
            tiles = tiles + (load_weights(w_ptr, at, end, cols + step * SPAN, K, EVEN_K),)
    scales, gains = (), ()
    for part in tl.static_range(PARTS):
        if GAIN is not None:
            gains = gains + (load_halves(GAIN, part * 8, K, WARPS),)
        group = groups_of_steps(part * 8, WARPS)
        for half in tl.static_range(HALVES if IN_BLOCKS else 0):
            at = SCALE + (half * n_out + first) // ROWS_EACH * groups + group
            scales = scales + (tl.load(at, mask=group < groups, other=0.0),)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    col = first + tl.arange(0, 16)
    if res_ptr is not None:
        residual = tl.load(res_ptr + col, mask=col < n_out, other=0.0).to(tl.float32)
    loaded = all_of_x(x_ptr, X_SCALE, gains, scale_stride, eps, K, PARTS, WARPS)
    accs, both = (), ()
    for _ in tl.static_range(HALVES):
        accs = accs + (tl.zeros([WARPS, 16, 8], dtype=tl.float32),)
    for part in tl.static_range(PARTS):
        for half in tl.static_range(HALVES):
            both = both + (loaded[part][2] * (scales[part * HALVES + half] if IN_BLOCKS else 1.0),)
    for step in tl.static_range(STEPS):
        summed = ()
        for half in tl.static_range(HALVES):
            scale = both[step // 8 * HALVES + half]  # type: ignore[var-annotated]
            summed = summed + (add_step(accs[half], tiles[half], loaded[step // 8], scale, step),)
        accs, tiles = summed, tiles[HALVES:]
        if step + PRELOAD < STEPS:
            for half in tl.static_range(HALVES):
                at, end = half * n_out + first, (half + 1) * n_out
                tiles = tiles + (load_weights(w_ptr, at, end, cols + (step + PRELOAD) * SPAN, K, EVEN_K),)

    y = _finish(accs[0], SCALE, col, n_out, IN_BLOCKS)
    if GATED:
        y = silu_mul(y, _finish(accs[1], SCALE, n_out + col, 2 * n_out, IN_BLOCKS), out_ptr.dtype.element_ty)
    if res_ptr is not None:
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32) + residual
    tl.store(out_ptr + col, y.to(out_ptr.dtype.element_ty), mask=col < n_out)


@triton.jit
def _finish(acc, SCALE, rows_of_w, n_end, IN_BLOCKS: tl.constexpr):
    """`finish`, times the scales of the weights' rows."""
    y = finish(acc)
    if not IN_BLOCKS:
        y *= tl.load(SCALE + tl.minimum(rows_of_w, n_end - 1))
    return y


def linear(
    x: Tensor | FP8Rows, weight: FP8Weight, config: GemmConfig, *, norm: Norm | None = None, gated: bool = False,
    residual: Tensor | None = None, pdl: bool = True,
) -> Tensor:  # fmt: skip
    """x [1, K] @ weight^T -> [1, N]; norm, of x that is no FP8Rows, gated and residual as in skinny.linear, but that
    the product is rounded before the activation and before it is added."""
    (rows, k), values, dtype = tuple(x.shape), weight.values, x.dtype
    n_out = values.shape[0] // 2 if gated else values.shape[0]
    if rows != 1 or values.shape[1] != k or k % 16:
        raise ValueError(f"x {list(x.shape)}: must have 1 row and fit weight {list(values.shape)}")
    if not values.is_contiguous() or config.block_n != 16 or config.block_k != GROUP * config.num_warps:
        raise ValueError(f"{config}: must take 16 contiguous weight rows, and {GROUP} columns a warp and step")
    if weight.in_blocks and (weight.rows_each % 16 or n_out % 16):
        raise ValueError(f"weight {list(values.shape)}: 16s of rows must share scales, not {weight.rows_each}")
    if isinstance(x, Tensor) and (residual is not None or weight.input_scale is not None or k > 8192):
        # Before a residual, and where every program has much to round, a kernel of its own takes less time.
        x = x if norm is None else add_norms(x, None, norm)[0]
        x, norm = FP8Rows(*quantize_rows(x, weight.input_scale), dtype), None
    out = torch.empty(1, n_out, dtype=dtype, device=values.device) if residual is None else residual
    steps = triton.cdiv(k, config.block_k)
    x, x_scale, stride = (x, None, 0) if isinstance(x, Tensor) else (x.values, x.scales, x.scales.stride(1))
    gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    programs, registers, processors = triton.cdiv(n_out, config.block_n), None, multiprocessors(values.device)
    if config.num_warps == 8 and steps <= 16 and not gated:  # one that holds more of x, or of weights, needs more
        registers = 128  # two programs fit a multiprocessor
    elif config.num_warps == 4 and steps > 16 and 2 * processors < programs <= 3 * processors and not gated:
        registers = 168  # three do, and all run at once
    fp8_row_kernel[(programs,)](
        x, x_scale, gain, values, weight.scale, out, residual, scale_stride=stride, n_out=n_out,
        groups=weight.scale.shape[1], eps=eps, K=k, STEPS=steps, PRELOAD=min(config.stages, steps),
        ROWS_EACH=weight.rows_each, IN_BLOCKS=weight.in_blocks, EVEN_K=k == steps * config.block_k, GATED=gated,
        WARPS=config.num_warps, num_warps=config.num_warps, maxnreg=registers, **pdl_options(values.device, pdl),
    )  # fmt: skip
    return out
