"""A row of e4m3 times tiles of 16 weight rows, on tensor cores.

Each warp takes every WARPS-th group of 128 columns: a step is a group of each warp. Tensor cores multiply 16 weight
rows by 8 columns of the other operand, and these are x of 8 steps: of each product one column counts, and x is read and
widened once for all. So a weight costs half a conversion and hardly more, where on CUDA cores conversions, products and
sums take as long as the reads. e4m3 is widened to float16, which is exact, and float32 sums of a group are multiplied
by both scales.
"""

from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit
def _widened(tile):
    """e4m3 [8, W, 64] -> float16, columns in another order: the 16 bytes that a lane loads at once become those that
    the product wants in this lane, so nothing moves between lanes."""
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
    """Of 8 steps from `begin` on, each warp's: [W, 1, 8]."""
    return (begin + tl.arange(0, 8)[None, None, :]) * WARPS + tl.arange(0, WARPS)[:, None, None]


@triton.jit
def load_x(x_ptr, X_SCALE, begin, scale_stride, K: tl.constexpr, WARPS: tl.constexpr):
    """x of 8 steps from `begin` on: both halves of the groups [W, 64, 8], and scales [W, 1, 8]."""
    step, warp = begin + tl.arange(0, 8)[:, None, None], tl.arange(0, WARPS)[None, :, None]
    at = (step * WARPS + warp) * 128 + tl.arange(0, 64)[None, None, :]
    low = tl.load(x_ptr + at, mask=at < K, other=0.0)
    high = tl.load(x_ptr + at + 64, mask=at < K - 64, other=0.0)
    group = groups_of_steps(begin, WARPS)
    scale = tl.load(X_SCALE + group * scale_stride, mask=group < tl.cdiv(K, 128), other=0.0)
    return tl.permute(_widened(low), [1, 2, 0]), tl.permute(_widened(high), [1, 2, 0]), scale


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
