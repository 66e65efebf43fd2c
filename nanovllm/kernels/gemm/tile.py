"""x @ W^T by tiles that all warps of a program compute together: of one weight or of experts', in 16 bits or in e4m3.

Operands come by tensor descriptors (TMA) where the device has them, which read zeros past the end of a matrix, so that
ragged edges cost no masks in the loop; rows of experts lie apart, and come by pointers. A Hopper matrix instruction has
64 rows of its left operand at least and 8 of the right one: tiles of 64 weight rows and more put the weights on the
left, so that few rows of x are enough, and tiles of fewer weight rows put x there.

In e4m3 products are summed by the tensor cores over one group of 128 columns, since these keep some 14 bits while they
add (DeepSeek-V3, arXiv 2412.19437, section 3.5.2); the sums times their scales are added in float32.

A row's sum over K goes in an order that the tiles' sizes alone decide: it does not depend on the other rows. With PDL a
program's first weights are on their way into L2 before earlier kernels end.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.base.activations import gate_mul, relu_squared
from nanovllm.kernels.base.device import pdl_options, prefetch_tile, prefetched_columns
from nanovllm.kernels.base.padded_rows import empty_product, rows_in_memory
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight, values_of
from nanovllm.kernels.fp8.reference import GROUP
from nanovllm.kernels.gemm.epilogue import TRITON_DTYPES, add_delta
from nanovllm.kernels.gemm.expand import Shrunk, first_b, slots_of, tile_deltas
from nanovllm.kernels.gemm.tile_store import store_by_choice, store_sums
from nanovllm.kernels.plan.config import GemmConfig

PREFETCH_BYTES = 64 << 10
"""Bytes of a program's weights to bring into L2 before it may start: about what its pipeline asks for first."""

@triton.jit
def _enter_part(
    w_ptr, n_out, k, ADAPTER, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """First rows of x and of the weights of the program, first step and end of its part of K, and for tile_deltas slots
    of the rows and first_b of each half. On return X may be read, and with PDL PREFETCH columns of the program's
    weights, with GATED of its ups too, are on their way into L2.
    """
    split, splits = tl.program_id(2), tl.num_programs(2)
    first_row, first_col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    steps = tl.cdiv(k, BLOCK_K)
    first_step, end_step = steps * split // splits, steps * (split + 1) // splits
    IS_LATE: tl.constexpr = ADAPTER is not None and ADAPTER[5]
    slots, bs = -1, ()
    if ADAPTER is not None:
        slots, col = slots_of(ADAPTER, first_row + tl.arange(0, BLOCK_M), rows), first_col + tl.arange(0, BLOCK_N)
        for half in tl.static_range(2 if GATED else 1):
            end = (half + 1) * n_out
            bs = bs + (first_b(ADAPTER, slots, half * n_out + col, end, n_out * 2 if GATED else n_out),)
    if PDL:
        begin = first_step * BLOCK_K
        prefetch_tile(w_ptr, first_col, n_out, begin, k, BLOCK_N, PREFETCH)
        if GATED:
            prefetch_tile(w_ptr, n_out + first_col, 2 * n_out, begin, k, BLOCK_N, PREFETCH)
        tl.extra.cuda.gdc_launch_dependents()
        if not IS_LATE:
            tl.extra.cuda.gdc_wait()
    return first_row, first_col, first_step, end_step, slots, bs


@triton.jit
def tile_of_rows(TILES, GATED: tl.constexpr, PDL: tl.constexpr):
    """(expert, first position, end) of the program's rows; expert < 0: it has none. GATED: routing has ended."""
    if PDL and GATED:
        # Not before: what routing wrote may then be read by the next kernel as soon as that starts.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = TILES + 3 * tl.program_id(1)  # past L1, which may still hold what was there before routing wrote it
    expert, first = tl.load(tile, cache_modifier=".cg"), tl.load(tile + 1, cache_modifier=".cg")
    return expert, first, tl.load(tile + 2, cache_modifier=".cg")


@triton.jit
def enter_tile(
    w_ptr, first_row, end_row, k, ORDER, first_position, end,
    GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Positions [BLOCK_M] of the tile, whether they are live, and their choices. On return X may be read."""
    if PDL and not GATED:
        # Routing ended before the kernel before this one let it start, and weights are always there.
        prefetch_tile(w_ptr, first_row, end_row, 0, k, BLOCK_N, PREFETCH)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    position = first_position + tl.arange(0, BLOCK_M)
    live = position < end
    return position, live, tl.load(ORDER + position, mask=live, other=0)


@triton.jit
def _weight_tile(
    W, first_row, end_row, col, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """[ROWS, COLUMNS] of the weights [all rows, k] by a descriptor or a pointer. Zero past column k, and anything past
    end_row, the last row that counts."""
    if TMA:
        return W.load([first_row, col])
    else:
        row = tl.minimum(first_row + tl.arange(0, ROWS), end_row - 1).to(tl.int64)
        cols = col + tl.arange(0, COLUMNS)
        at = W + row[:, None] * k + cols[None, :]
        if EVEN:
            return tl.load(at)
        else:
            return tl.load(at, mask=(cols < k)[None, :], other=0.0)


@triton.jit
def _add_step(
    accs, X, X_SCALE, scale_stride, first_row, row, live, W, first_w, end_w, SCALE, first, n_out, k, group, groups,
    BLOCK_N: tl.constexpr, SPAN: tl.constexpr, ROWS_EACH: tl.constexpr, IN_BLOCKS: tl.constexpr, X_LEFT: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, BY_EXPERT: tl.constexpr,
):  # fmt: skip
    """Adds to accs the products of x and the weights in the SPAN columns of `group`, as _add_products does. Of one of
    accs the weights are rows `first_w` to `end_w` of W; of two, each of n_out rows, they are the gates and the ups.
    BY_EXPERT: X and X_SCALE are pointers to rows; else a descriptor, of rows from first_row on, and a pointer."""
    col, x_scale = group * SPAN, None
    if BY_EXPERT:
        cols = col + tl.arange(0, SPAN)
        mask = live[:, None] if EVEN else live[:, None] & (cols < k)[None, :]
        x = tl.load(X + cols[None, :], mask=mask, other=0.0)
        if X_SCALE is not None:
            x_scale = tl.load(X_SCALE + group * scale_stride, mask=live, other=0.0)
    else:
        x = X.load([first_row, col])
        if X_SCALE is not None:
            x_scale = tl.load(X_SCALE + group * scale_stride + row, mask=live & (col < k), other=0.0)
    added = ()
    for half in tl.static_range(len(accs)):
        w = _weight_tile(W, half * n_out + first_w, half * n_out + end_w, col, k, BLOCK_N, SPAN, EVEN, TMA)
        added = added + (
            _add_products(accs[half], x, w, x_scale, SCALE, half * n_out + first, (half + 1) * n_out, group, groups,
                          BLOCK_N, ROWS_EACH, IN_BLOCKS, X_LEFT),
        )  # fmt: skip
    return added


@triton.jit
def _add_products(
    acc, x, w, x_scale, SCALE, first, end, group, groups,
    BLOCK_N: tl.constexpr, ROWS_EACH: tl.constexpr, IN_BLOCKS: tl.constexpr, X_LEFT: tl.constexpr,
):  # fmt: skip
    """acc + x @ w^T where X_LEFT, else its transpose; in e4m3 the products of a group times both scales. Weights are
    rows `first` and on, before `end`."""
    if x_scale is None:
        if X_LEFT:
            return tl.dot(x, w.T, acc, input_precision="ieee")
        else:
            return tl.dot(w, x.T, acc, input_precision="ieee")
    else:
        products = tl.dot(x, w.T, out_dtype=tl.float32) if X_LEFT else tl.dot(w, x.T, out_dtype=tl.float32)
        if IN_BLOCKS:
            if ROWS_EACH % BLOCK_N == 0:
                x_scale *= tl.load(SCALE + first // ROWS_EACH * groups + group, mask=group < groups, other=0.0)
            else:
                row = tl.minimum(first + tl.arange(0, BLOCK_N), end - 1)
                scale = tl.load(SCALE + row // ROWS_EACH * groups + group, mask=group < groups, other=0.0)
                products *= scale[None, :] if X_LEFT else scale[:, None]
        return acc + products * (x_scale[:, None] if X_LEFT else x_scale[None, :])


@triton.jit
def _finish(
    acc, SCALE, BIAS, DELTA, base, first, end, first_col, n_out, row, rows, n, BLOCK_N: tl.constexpr,
    IN_BLOCKS: tl.constexpr, X_LEFT: tl.constexpr,
):  # fmt: skip
    """acc times the scales of the weights' rows, where there are such, plus BIAS at base + its columns, which of parts
    the first has. DELTA [rows, n]: see add_delta."""
    if SCALE is not None and not IN_BLOCKS:
        scale = tl.load(SCALE + tl.minimum(first + tl.arange(0, BLOCK_N), end - 1))
        acc *= scale[None, :] if X_LEFT else scale[:, None]
    if BIAS is not None:
        col = first_col + tl.arange(0, BLOCK_N)
        bias = tl.load(BIAS + base + col, mask=(col < n_out) & (tl.program_id(2) == 0), other=0.0).to(tl.float32)
        acc += bias[None, :] if X_LEFT else bias[:, None]
    if DELTA is not None:
        w_row = first + tl.arange(0, BLOCK_N)
        at, w_row = (row[:, None], w_row[None, :]) if X_LEFT else (row[None, :], w_row[:, None])
        acc = add_delta(acc, DELTA, at.to(tl.int64), w_row, (at < rows) & (w_row < end), n)
    return acc


@triton.jit
def result(
    accs, SCALE, BIAS, base, first_col, n_out, dtype: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr, IN_BLOCKS: tl.constexpr, X_LEFT: tl.constexpr, SQUARED: tl.constexpr,
    DELTA, row, rows, deltas,
):  # fmt: skip
    """Finished sums of accs, float32 [rows, BLOCK_N] with X_LEFT, else transposed; of gates and ups their activation,
    for which the sums are rounded to dtype (ALPHA None: by GELU), and of ups alone (SQUARED) theirs. DELTA: see
    _finish; deltas: of each of accs, or ()."""
    n = n_out * len(accs)
    acc = _finish(accs[0], SCALE, BIAS, DELTA, base, first_col, n_out, first_col, n_out, row, rows, n, BLOCK_N,
                  IN_BLOCKS, X_LEFT)  # fmt: skip
    if len(deltas) > 0:
        acc += deltas[0]
    if len(accs) > 1:
        up = _finish(accs[1], SCALE, BIAS, DELTA, base + n_out, n_out + first_col, 2 * n_out, first_col, n_out, row,
                     rows, n, BLOCK_N, IN_BLOCKS, X_LEFT)  # fmt: skip
        if len(deltas) > 0:
            up += deltas[1]
        acc = gate_mul(acc, up, dtype, ALPHA, LIMIT)
    elif SQUARED:
        acc = relu_squared(acc, dtype)
    return acc


@triton.jit(do_not_specialize=["rows", "scale_stride", "out_stride"])
def tile_kernel(
    X, X_SCALE, W, w_ptr, SCALE, BIAS, DELTA, ADAPTER, TILES, ORDER, WEIGHTS, OUT, OUT_SCALES, rows, scale_stride,
    out_stride, n_out, k, groups, scale_rows, DTYPE: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr, STAGES: tl.constexpr, ROWS_EACH: tl.constexpr, IN_BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    X_LEFT: tl.constexpr, EVEN_K: tl.constexpr, PREFETCH: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """x @ weight^T by tiles. Without TILES: grid (tiles of rows, tiles of weights, splits of K). X, W: descriptors of x
    [rows, k] and of the weights [n_out, k], or [2 n_out, k] where GATED: then a program has BLOCK_N gates and the ups
    that belong to them. OUT [rows, n_out]; with PARTS [splits, rows, n_out], a sum for each split.

    With TILES (Routing's): grid (tiles of weights, tiles of rows), and `rows` tokens that chose TOP_K experts each. W:
    a descriptor or w_ptr, [experts * (2 n_out or n_out), k]; BIAS likewise, or None. GATED: rows of X are tokens; OUT
    [choices by expert, n_out] gets the activation of columns c and n_out + c, or where not PAIRED of c alone, with
    OUT_SCALES in e4m3. Else rows of X are choices by expert, and OUT [TOP_K, tokens, n_out] their results times
    WEIGHTS [tokens, TOP_K], by slot.

    X_SCALE, SCALE: None, or float32 [groups of k, scale_stride] and [weight rows / ROWS_EACH, groups] where IN_BLOCKS,
    else [weight rows], for each expert scale_rows of them; then x and weights are e4m3. SPAN columns of a step, all
    BLOCK_K or with scales 128, are loaded and multiplied at once. ADAPTER: see expand.py; DELTA: add_delta."""
    scale_ptrs, scales_of_w, slots, bs = X_SCALE, SCALE, -1, ()
    if TILES is None:
        first_row, first_col, begin, end, slots, bs = _enter_part(
            w_ptr, n_out, k, ADAPTER, rows, BLOCK_M, BLOCK_N, BLOCK_K, GATED, PREFETCH, PDL)  # fmt: skip
        first_w, end_w, base, x_ptrs, row = first_col, n_out, 0, X, first_row + tl.arange(0, BLOCK_M)
        live = row < rows
    else:
        expert, first_row, end_position = tile_of_rows(TILES, GATED, PDL)
        if expert < 0:
            return
        first_col, begin, end = tl.program_id(0) * BLOCK_N, 0, tl.cdiv(k, BLOCK_K)
        base = expert * (n_out * 2 if PAIRED else n_out)
        first_w, end_w = base + first_col, base + n_out
        position, live, choice = enter_tile(w_ptr, first_w, end_w, k, ORDER, first_row, end_position, GATED, BLOCK_M,
                                             BLOCK_N, PREFETCH, PDL)  # fmt: skip
        row = choice // TOP_K if GATED else position
        x_ptrs = X + row.to(tl.int64)[:, None] * k
        if X_SCALE is not None:
            scale_ptrs, scales_of_w = X_SCALE + row, SCALE + expert * scale_rows * groups
    acc = tl.zeros([BLOCK_M, BLOCK_N] if X_LEFT else [BLOCK_N, BLOCK_M], dtype=tl.float32)
    accs = (acc, tl.zeros(acc.shape, dtype=tl.float32)) if PAIRED else (acc,)
    for step in tl.range(begin, end, num_stages=STAGES):
        for part in tl.static_range(BLOCK_K // SPAN):
            group = step * (BLOCK_K // SPAN) + part
            accs = _add_step(accs, x_ptrs, scale_ptrs, scale_stride, first_row, row, live, W, first_w, end_w,
                             scales_of_w, first_col, n_out, k, group, groups, BLOCK_N, SPAN, ROWS_EACH, IN_BLOCKS,
                             X_LEFT, EVEN_K, TMA, TILES is not None)  # fmt: skip
    if TILES is not None and X_SCALE is None:  # before or after the sums are finished: whichever is scheduled better
        cols_out = first_col + tl.arange(0, BLOCK_N)
    deltas = tile_deltas(ADAPTER, bs, slots, row, rows, first_col + tl.arange(0, BLOCK_N), n_out, X_LEFT, PDL)
    at, end_at = (row, rows) if TILES is None else (position, end_position)  # rows of DELTA
    acc = result(accs, scales_of_w, BIAS, base, first_col, n_out, DTYPE, ALPHA, LIMIT, BLOCK_N, IN_BLOCKS, X_LEFT,
                  GATED and not PAIRED, DELTA, at, end_at, deltas)  # fmt: skip
    if TILES is None:
        store_sums(acc, OUT, first_row, first_col, rows, n_out, X_LEFT, PARTS)
    else:
        cols_out = cols_out if X_SCALE is None else first_col + tl.arange(0, BLOCK_N)
        store_by_choice(acc, OUT, WEIGHTS, position, live, choice, cols_out, rows, n_out, TOP_K, GATED, X_LEFT,
                        OUT_SCALES, out_stride, DTYPE)  # fmt: skip


def linear(
    x: Tensor, weight: Tensor, config: GemmConfig, *, gated: bool = False, delta: Shrunk | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K] @ weight [N, K]^T in one dtype -> [M, N]; with config.split_k > 1 float32 [split_k, M, N], or with
    config.round_sums in that dtype, sums over parts of K. gated: the weight is [2 I, K], gates first, and the result
    silu(gate) * up, [M, I], rounded as the GEMM and the activation kernel by themselves do; not in parts. delta and
    bias: as in fma.linear, added to the first part."""
    rows, k = x.shape
    n_out = weight.shape[0] // 2 if gated else weight.shape[0]
    assert config.split_k == 1 or not gated, config
    if weight.shape[1] != k or k * x.element_size() % 16:
        raise ValueError(f"weight {list(weight.shape)} does not fit x {list(x.shape)}, or K is no multiple of 16 bytes")
    if not (x.is_contiguous() and weight.is_contiguous()) or x.dtype != weight.dtype:
        raise ValueError(f"contiguous tensors of one dtype expected, got {x.dtype} and {weight.dtype}")
    part_dtype = x.dtype if config.round_sums else torch.float32
    out = empty_product(rows, n_out, config.split_k, gated, x.dtype, x.device, part_dtype)
    return multiply_rows(x, None, weight, config, out, gated=gated, x_left=config.block_n < 64, delta=delta, bias=bias)


def multiply_rows(
    x: Tensor, x_scale: Tensor | None, weight: Tensor | FP8Weight, config: GemmConfig, out: Tensor, *, gated: bool,
    x_left: bool, pdl: bool = True, delta: Shrunk | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Fills and returns `out` [T, n_out] or [split_k, T, n_out] by x [T, K], in e4m3 with x_scale float32 [T, groups],
    and weight [n_out, K], gated [2 n_out, K]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    (rows, k), n_out, device = x.shape, out.shape[-1], x.device
    span = config.block_k if x_scale is None else GROUP
    grid = (triton.cdiv(rows, config.block_m), triton.cdiv(n_out, config.block_n), config.split_k)
    readable = min(rows_in_memory(x), grid[0] * config.block_m)
    operand = TensorDescriptor(x, [readable, k], [k, 1], [config.block_m, span])
    prefetch = prefetched_columns(PREFETCH_BYTES, config.block_n * (2 if gated else 1), x.element_size(), k)
    constants: dict[str, Any] = {
        "GATED": gated, "X_LEFT": x_left, "PARTS": config.split_k > 1, "PREFETCH": prefetch, **pdl_options(device, pdl),
    }  # fmt: skip
    launch(grid, operand, x_scale, weight, config, out, rows, span=span, adapter=delta, bias=bias, **constants)
    return out


def launch(
    grid: tuple[int, ...], x: Any, x_scale: Tensor | None, weight: Tensor | FP8Weight, config: GemmConfig, out: Tensor,
    rows: int, *, span: int, bias: Tensor | None = None, delta: Tensor | None = None, adapter: Any = None,
    top_k: int = 0,
    routing: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    activation: tuple[float | None, float | None] = (1.0, None), tma: bool = True, rounded_to: FP8Rows | None = None,
    **constants: Any,
) -> None:  # fmt: skip
    """tile_kernel over `grid`, with the operands that it describes. x: a descriptor, or with a routing (tiles, order,
    weights) a tensor [any, K]. weight [N, K] or [experts, N, K]. activation: alpha and limit of experts'. adapter: a
    Shrunk, or None. rounded_to: `out` are its values."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    values, n_out = values_of(weight), out.shape[-1]
    k = values.shape[-1]
    of_rows: Any = values.view(-1, k)
    described = TensorDescriptor(of_rows, list(of_rows.shape), [k, 1], [config.block_n, span]) if tma else of_rows
    scale = groups = scale_rows = stride = None
    if isinstance(weight, FP8Weight) and x_scale is not None:
        scale, stride, groups = weight.scale, x_scale.stride(1), weight.scale.shape[-1]
        scale_rows = weight.scale.shape[1] if weight.scale.dim() == 3 else None
        constants |= {"ROWS_EACH": weight.rows_each, "IN_BLOCKS": weight.in_blocks}
    else:
        constants |= {"ROWS_EACH": 1, "IN_BLOCKS": False}
    out_scales, out_stride, dtype = None, None, out.dtype
    if rounded_to is not None:
        out_scales, out_stride, dtype = rounded_to.scales, rounded_to.scales.stride(1), rounded_to.dtype
    tile_kernel[grid](
        x, x_scale, described, of_rows, scale, bias, delta, adapter and adapter.operands, *routing, out, out_scales,
        rows, stride, out_stride, n_out, k, groups, scale_rows, DTYPE=TRITON_DTYPES[dtype], TOP_K=top_k,
        ALPHA=activation[0], LIMIT=activation[1], BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k if scale is None or top_k == 0 else span, SPAN=span, STAGES=config.stages,
        EVEN_K=k % span == 0, TMA=tma, PAIRED=constants["GATED"] and values.shape[-2] == 2 * n_out,
        num_warps=config.num_warps, **constants,
    )  # fmt: skip


def sums_over_parts(x: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
    """x [M, K] @ weight [N, K]^T over the columns between each two of `ends`, float32 [parts, M, N]."""
    return torch.stack([x[:, a:b].float() @ weight[:, a:b].float().T for a, b in pairwise(ends)])


def linear_reference(x: Tensor, weight: Tensor, config: GemmConfig, *, gated: bool = False) -> Tensor:
    """Plain twin of `linear`: the same columns in each part."""
    if gated:
        gate, up = (x.float() @ weight.float().T).to(x.dtype).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    steps = -(-x.shape[1] // config.block_k)
    ends = [steps * part // config.split_k * config.block_k for part in range(config.split_k + 1)]
    sums = sums_over_parts(x, weight, ends)
    return (sums.to(x.dtype) if config.round_sums else sums) if config.split_k > 1 else sums[0].to(x.dtype)
