"""Products of 1 to 8 rows on tensor cores by weights that pass through registers, in 8 or 16 bits, fused with what
surrounds them in a decoder layer; as gemm/fma.py, and by its rule: no kernel in flight may write weights.

The first steps of weights are read into registers before `gdc_wait`, as in gemm/fma.py. Where one row comes
unrounded every program normalises and rounds all of it: the lane that rounds a number is the one that multiplies by it,
and one dependent kernel less is worth more than that.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.base.activations import silu_mul
from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.quantize import in_groups, quantize_rows
from nanovllm.kernels.gemm.e2m1 import NV_GROUP
from nanovllm.kernels.gemm.epilogue import checked_width
from nanovllm.kernels.gemm.expand import EARLY_RANK, Shrunk, held_delta, hold, slots_of
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.kernels.gemm.packed_operands import add_packed, load_blocks
from nanovllm.kernels.gemm.stream_operands import (
    Walk,
    add_wide,
    block_scales,
    both_scales,
    finish,
    is_packed,
    load_gains,
    load_parts,
    load_weights,
    norm_factors,
    part_of_x,
    width_of,
)
from nanovllm.kernels.plan.config import FP8, GemmConfig
from nanovllm.kernels.plan.fits import rounds_inside
from nanovllm.kernels.pointwise.norm import Norm


@triton.jit
def load_steps(w_ptr, PACKED, first, n_out, begin: tl.constexpr, end: tl.constexpr, walk):
    """Loads weights, and the ups that belong to them if there are two halves, of the steps from `begin` to `end`."""
    WIDTH: tl.constexpr = width_of(walk.code)
    warp, tiles = tl.arange(0, walk.warps)[None, :, None], ()
    for step in tl.static_range(begin, end):
        if PACKED is None:
            cols = (step * walk.warps + warp) * (2 * WIDTH) + tl.arange(0, WIDTH)[None, None, :]
            for half in tl.static_range(walk.halves):
                tiles = tiles + (load_weights(w_ptr, half * n_out + first, (half + 1) * n_out, cols, walk),)
        else:
            tiles = tiles + load_blocks(w_ptr, PACKED, first, n_out, step * walk.warps + warp, walk)
    return tiles


@triton.jit
def add_step(accs, tiles, x, factors, step: tl.constexpr, dtype: tl.constexpr, walk):
    """Each of accs [W, 16, 8] plus the products of a step, times its factor."""
    added = ()
    for half in tl.static_range(len(accs)):
        if is_packed(walk.code):
            added = added + (add_packed(accs[half], tiles[half], x, factors[half], step, dtype, walk),)
        else:
            added = added + (add_wide(accs[half], tiles[half], x, factors[half], step, walk),)
    return added


@triton.jit
def no_sums(walk):
    """A sum for each half, of nothing yet."""
    accs = ()
    for _ in tl.static_range(walk.halves):
        accs = accs + (tl.zeros([walk.warps, 16, 8], dtype=tl.float32),)
    return accs


@triton.jit
def add_products(
    accs, tiles, scales, gains, x_ptr, X_SCALE, scale_stride, eps, rows, w_ptr, PACKED, first, n_out,
    STEPS: tl.constexpr, PRELOAD: tl.constexpr, AHEAD: tl.constexpr, walk,
):  # fmt: skip
    """accs plus the products of all steps, of which `tiles` are the weights of the first PRELOAD. scales: of the
    weights, for each part of x and each half, or (). gains: load_gains'. AHEAD: parts of x in registers at a time."""
    EACH: tl.constexpr = 8 // walk.rows
    loaded, factors = load_parts(x_ptr, X_SCALE, gains, scale_stride, eps, AHEAD, walk, rows), ()
    for part in tl.static_range(AHEAD):
        factors = factors + (both_scales(loaded[part], scales, part, walk),)
    for step in tl.static_range(STEPS):
        x, factor = loaded[step // EACH], factors[step // EACH]  # type: ignore[var-annotated]
        accs = add_step(accs, tiles, x, factor, step, x_ptr.dtype.element_ty, walk)
        tiles = tiles[walk.halves:]
        if step + PRELOAD < STEPS:
            tiles = tiles + load_steps(w_ptr, PACKED, first, n_out, step + PRELOAD, step + PRELOAD + 1, walk)
        if step % EACH == EACH - 1 and step + 1 + (AHEAD - 1) * EACH < STEPS:
            x = part_of_x(x_ptr, X_SCALE, (), 1.0, step // EACH + AHEAD, scale_stride, walk, rows)
            loaded, factors = loaded + (x,), factors + (both_scales(x, scales, step // EACH + AHEAD, walk),)
    return accs


@triton.jit
def _hold(ADAPTER, slots, first, rows, n_out, walk):
    """hold's of each half of a program's weight rows."""
    held, col, row = (), first + tl.arange(0, 16)[:, None], tl.arange(0, walk.rows)[None, :]
    EARLY: tl.constexpr = ADAPTER[3] * walk.rows <= 2 * EARLY_RANK
    for half in tl.static_range(walk.halves):
        w_row, n = half * n_out + col, n_out * walk.halves
        held = held + (hold(ADAPTER, slots, row, rows, w_row, col < n_out, n, EARLY),)
    return held


@triton.jit
def _deltas(ADAPTER, held, x_ptr, GAIN, eps, first, rows, n_out, PARTS: tl.constexpr, walk):
    """Sums that adapters add to each half, [16, rows]."""
    deltas, scale, col, row = (), 1.0, first + tl.arange(0, 16)[:, None], tl.arange(0, walk.rows)[None, :]
    if GAIN is not None:
        scale = norm_factors(x_ptr, eps, PARTS, walk, rows if walk.rows > 1 else None)
        if walk.rows > 1:
            scale = tl.max(tl.reshape(scale, [8 // walk.rows, walk.rows]), 0)[None, :, None]
    for half in tl.static_range(walk.halves):
        w_row, n = half * n_out + col, n_out * walk.halves
        deltas = deltas + (held_delta(ADAPTER, held[half], row, rows, w_row, col < n_out, n, scale),)
    return deltas


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def stream_kernel(
    x_ptr, X_SCALE, GAIN, w_ptr, SCALE, out_ptr, res_ptr, ADAPTER, scale_stride, n_out, groups, eps, rows,
    K: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, PRELOAD: tl.constexpr, AHEAD: tl.constexpr,
    ROWS_EACH: tl.constexpr, IN_BLOCKS: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
    WARPS: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 16 columns). x [rows <= ROWS, K]: of the weights' type, or for weights in e4m3 with X_SCALE
    [groups of K], scale_stride apart, or, where there is none, to be rounded; with GAIN [K] it is normalised first.
    GATED: weights are [2 n_out, K], and a program has 16 gates and their ups. Where IN_BLOCKS, 16 divides ROWS_EACH and
    n_out, and SCALE is [weight rows / ROWS_EACH, groups]; else one for each weight row. STEPS, PRELOAD, AHEAD: see
    add_products. res_ptr: None, or [rows, n_out]. ADAPTER: see expand.py. The others: see Walk."""
    walk: tl.constexpr = Walk(CODE, GROUP, HAS_ZEROS, PTX, K, EVEN_K, WARPS, ROWS, 2 if GATED else 1)
    PARTS: tl.constexpr = (STEPS * ROWS + 7) // 8
    first, scales = tl.program_id(0) * 16, ()
    tiles = load_steps(w_ptr, None, first, n_out, 0, PRELOAD, walk)
    gains = load_gains(GAIN, PARTS, walk)
    if IN_BLOCKS:
        scales = block_scales(SCALE, first, n_out, groups, ROWS_EACH, PARTS, walk)
    held, deltas = (), ()
    if ADAPTER is not None:
        slots = slots_of(ADAPTER, tl.arange(0, ROWS)[None, :], rows)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if ADAPTER is not None:
        held = _hold(ADAPTER, slots, first, rows, n_out, walk)
    col, residual = first + tl.arange(0, 16), None
    if res_ptr is not None:
        at, live = _places(col, rows, n_out, ROWS)
        residual = tl.load(res_ptr + at, mask=live, other=0.0).to(tl.float32)
    accs = add_products(no_sums(walk), tiles, scales, gains, x_ptr, X_SCALE, scale_stride, eps,
                        rows if ROWS > 1 else None, w_ptr, None, first, n_out, STEPS, PRELOAD, AHEAD, walk)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if ADAPTER is not None:
        deltas = _deltas(ADAPTER, held, x_ptr, GAIN, eps, first, rows, n_out, PARTS, walk)
    y = _result(accs, residual, SCALE, deltas, col, n_out, dtype, IN_BLOCKS, ROWS, CODE == "e4m3")
    at, live = _places(col, rows, n_out, ROWS)
    tl.store(out_ptr + at, y.to(dtype), mask=live)


@triton.jit
def _places(col, rows, n_out, ROWS: tl.constexpr):
    """Indices in out of the results, of one row [16], of more [16, ROWS], and a mask of those that belong there."""
    if ROWS == 1:
        return col, col < n_out
    else:
        row = tl.arange(0, ROWS)[None, :]
        return row * n_out + col[:, None], (row < rows) & (col < n_out)[:, None]


@triton.jit
def _finish(
    acc, SCALE, deltas, half: tl.constexpr, rows_of_w, n_end, IN_BLOCKS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """`finish`, times the scales of the weights' rows, plus the half of _deltas, where there is such."""
    y = finish(acc, ROWS)
    if SCALE is not None and not IN_BLOCKS:
        scale = tl.load(SCALE + tl.minimum(rows_of_w, n_end - 1))
        y *= scale if ROWS == 1 else scale[:, None]
    if len(deltas) > 0:
        y += tl.reshape(deltas[half], y.shape)
    return y


@triton.jit
def _result(
    accs, residual, SCALE, deltas, col, n_out, dtype: tl.constexpr, IN_BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Finished sums of a tile, activated if there are those of ups too, plus the residual, if any, before which they
    are rounded where ROUNDS: float32."""
    y = _finish(accs[0], SCALE, deltas, 0, col, n_out, IN_BLOCKS, ROWS)
    if len(accs) > 1:
        y = silu_mul(y, _finish(accs[1], SCALE, deltas, 1, n_out + col, 2 * n_out, IN_BLOCKS, ROWS), dtype)
    if residual is not None:
        if ROUNDS:
            y = y.to(dtype).to(tl.float32)
        y += residual
    return y


class Operands(NamedTuple):
    """A weight, or those of experts, as kernels that stream it take it."""

    values: Tensor
    packed: Tensor | None = None
    """Scales of a PackedWeight's groups."""
    scale: Tensor | None = None
    """Scales of an FP8Weight, or factors of a PackedWeight's rows; None: all are 1."""
    code: str = "wide"
    """Numbers of the weights; for this and the next two see Walk."""
    group: int = 0
    has_zeros: bool = False
    groups: int = 0
    """Columns of scales in blocks."""
    scale_rows: int = 0
    """Rows of scales in blocks."""
    rows_each: int = 1
    """Weight rows that share scales."""


def operands_of(weight: Tensor | FP8Weight | PackedWeight) -> Operands:
    """Operands of a weight [N, K], or of experts [E, N, K]."""
    if isinstance(weight, PackedWeight):
        factors = weight.factors if weight.group == NV_GROUP else None
        return Operands(weight.words, weight.scales, factors, weight.code, weight.group, weight.has_zeros)
    if not isinstance(weight, FP8Weight):
        return Operands(weight)
    scale_rows, groups = weight.scale.shape[-2:] if weight.in_blocks else (0, 0)
    return Operands(weight.values, None, weight.scale, "e4m3", 0, False, groups, scale_rows, weight.rows_each)


def walk_constants(one: Operands, config: GemmConfig, k: int, columns: int) -> dict[str, Any]:
    """Constants of a kernel that multiplies by rows [k] of a weight, or by a longer one of so many columns: those of a
    Walk, and its steps."""
    steps = triton.cdiv(columns, config.block_k)
    return {
        "K": k, "STEPS": steps, "PRELOAD": min(config.stages, steps), "CODE": one.code, "GROUP": one.group,
        "HAS_ZEROS": one.has_zeros, "PTX": one.values.is_cuda,
        "WARPS": config.block_k // (64 if one.code == "wide" else 128), "num_warps": config.num_warps,
        "maxnreg": config.max_registers or None,
    }  # fmt: skip


def linear(
    x: Tensor | FP8Rows, weight: Tensor | FP8Weight, config: GemmConfig, *, norm: Norm | None = None,
    gated: bool = False, residual: Tensor | None = None, delta: Shrunk | None = None,
) -> Tensor:  # fmt: skip
    """x [M <= 8, K] @ weight^T -> [M, N]; norm (by an FP8Weight of a row that the kernel rounds: rounds_inside), gated,
    residual and delta as in fma.linear, but that the product is rounded before the activation, and in e4m3 before it
    is added."""
    (rows, k), dtype, type_name, in_blocks = tuple(x.shape), x.dtype, "bfloat16", False
    if isinstance(weight, FP8Weight):
        type_name, in_blocks = FP8, weight.in_blocks
    n_out = checked_width(config, x.shape, weight.shape, residual, gated=gated, norms=norm is not None, dtype=type_name)
    operands = operands_of(weight)
    if not operands.values.is_contiguous():
        raise ValueError(f"weight {list(weight.shape)}: must be contiguous")
    if isinstance(weight, FP8Weight):
        inside = residual is None and rounds_inside(rows, k, weight.input_scale is not None)
        if isinstance(x, Tensor) and not inside:  # every program would have much to round, or wait for a residual
            assert norm is None, "the plan leaves it to a kernel that rounds"
            x = quantize_rows(x, weight.input_scale)
        if in_blocks and (weight.rows_each % 16 or n_out % 16):
            raise ValueError(f"weight {list(weight.shape)}: 16s of rows must share scales, not {weight.rows_each}")
    out = torch.empty(rows, n_out, dtype=dtype, device=operands.values.device) if residual is None else residual
    constants, block_rows = walk_constants(operands, config, k, k), triton.next_power_of_2(rows)
    parts, per_warp = triton.cdiv(constants["STEPS"] * block_rows, 8), constants["WARPS"] // config.num_warps
    fits = rows == 1 or norm is not None or parts * per_warp <= 4
    ahead = parts if fits else min(parts, 2 // per_warp)  # registers hold no more of x
    x = x if isinstance(x, Tensor) or rows == 1 else in_groups(x)
    x, x_scale, stride = (x, None, 0) if isinstance(x, Tensor) else (x.values, x.scales, x.scales.stride(1))
    gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    stream_kernel[(triton.cdiv(n_out, 16),)](
        x, x_scale, gain, operands.values, operands.scale, out, residual, delta and delta.operands,
        scale_stride=stride, n_out=n_out,
        groups=operands.groups, eps=eps, rows=rows, ROWS=block_rows, AHEAD=ahead, ROWS_EACH=operands.rows_each,
        IN_BLOCKS=in_blocks, EVEN_K=k % config.block_k == 0, GATED=gated, **constants, **pdl_options(out.device),
    )  # fmt: skip
    return out
