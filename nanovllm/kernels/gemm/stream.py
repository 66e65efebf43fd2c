"""Products of 1 to 8 rows on tensor cores by weights that pass through registers, in 4, 8 or 16 bits, fused with what
surrounds them in a decoder layer; as gemm/skinny.py, and by its rule: no kernel in flight may write weights.

The first steps of weights are read into registers before `gdc_wait`, as in gemm/skinny.py. Where one row comes
unrounded every program normalises and rounds all of it: the lane that rounds a number is the one that multiplies by it,
and one dependent kernel less is worth more than that.
"""

import torch
from torch import Tensor

from nanovllm.kernels.base.activations import silu_mul
from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight, values_of
from nanovllm.kernels.fp8.quantize import in_groups, quantize_rows
from nanovllm.kernels.gemm.e2m1 import NV_GROUP
from nanovllm.kernels.gemm.epilogue import add_delta, checked_width
from nanovllm.kernels.gemm.packed import PackedWeight, check_fits
from nanovllm.kernels.gemm.packed_operands import add_blocks, load_blocks
from nanovllm.kernels.gemm.stream_operands import (
    add_halves,
    block_scales,
    both_scales,
    finish,
    groups_of_steps,
    load_parts,
    load_pieces,
    load_step,
    part_of_x,
)
from nanovllm.kernels.plan.config import FP8, INT8, GemmConfig
from nanovllm.kernels.plan.fits import rounds_inside
from nanovllm.kernels.pointwise.norm import Norm


@triton.jit(do_not_specialize=["rows", "scale_stride"])
def stream_kernel(
    x_ptr, X_SCALE, GAIN, w_ptr, PACKED, SCALE, out_ptr, res_ptr, DELTA, scale_stride, n_out, groups, eps, rows,
    K: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, PRELOAD: tl.constexpr, AHEAD: tl.constexpr,
    ROWS_EACH: tl.constexpr, IN_BLOCKS: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
    WARPS: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of 16 columns). x [rows <= ROWS, K]: of the weights' type, or for weights in e4m3 with X_SCALE
    [groups of K], scale_stride apart, or, where there is none, to be rounded; with GAIN [K] it is normalised first.
    GATED: weights are [2 n_out, K], and a program has 16 gates and their ups. Where IN_BLOCKS, 16 divides ROWS_EACH and
    n_out, and SCALE is [weight rows / ROWS_EACH, groups]; else one for each weight row. WARPS: groups of columns in a
    step. PRELOAD: steps of weights in flight; AHEAD: 8 columns of x. res_ptr: None, or [rows, n_out]. DELTA: see
    add_delta. CODE: "wide", "e4m3", or a PackedWeight's (words in w_ptr, scales in PACKED), as GROUP and HAS_ZEROS."""
    WIDTH: tl.constexpr = 64 if CODE == "e4m3" else 32
    PIECES: tl.constexpr = 2 if PACKED is None else 4
    RUN: tl.constexpr = 16 if GROUP == 16 else None
    HALVES: tl.constexpr = 2 if GATED else 1
    EACH: tl.constexpr = 8 // ROWS
    PARTS: tl.constexpr = (STEPS + EACH - 1) // EACH
    live_rows = rows if ROWS > 1 else None
    first = tl.program_id(0) * 16
    tiles, scales, gains = (), (), ()
    for step in tl.static_range(PRELOAD):
        tiles = tiles + _load(w_ptr, PACKED, first, n_out, step, K, EVEN_K, WARPS, WIDTH, HALVES, CODE, GROUP)
    for part in tl.static_range(PARTS):
        if GAIN is not None:
            gains = gains + (load_pieces(GAIN, part * EACH, K, WARPS, WIDTH, ROWS, None, PIECES, RUN),)
        group = groups_of_steps(part * EACH, WARPS, ROWS)
        scales = scales + block_scales(SCALE, first, n_out, group, groups, ROWS_EACH, HALVES if IN_BLOCKS else 0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    col, residual = first + tl.arange(0, 16), None
    if res_ptr is not None:
        at, live = _places(col, rows, n_out, ROWS)
        residual = tl.load(res_ptr + at, mask=live, other=0.0).to(tl.float32)
    loaded = load_parts(x_ptr, X_SCALE, gains, scale_stride, eps, K, AHEAD, WARPS, WIDTH, ROWS, live_rows, PIECES, RUN)
    accs, both = (), ()
    for _ in tl.static_range(HALVES):
        accs = accs + (tl.zeros([WARPS, 16, 8], dtype=tl.float32),)
    for part in tl.static_range(AHEAD):
        both = both + (both_scales(loaded[part], scales, part, HALVES, IN_BLOCKS),)
    for step in tl.static_range(STEPS):
        x, factors = loaded[step // EACH], both[step // EACH]  # type: ignore[var-annotated]
        if PACKED is None:
            accs = add_halves(accs, tiles, x, factors, step, ROWS)
        else:
            accs = add_blocks(accs, tiles, x, factors, step, ROWS, x_ptr.dtype.element_ty, CODE, GROUP, HAS_ZEROS, PTX)
        tiles = tiles[HALVES:]
        if step + PRELOAD < STEPS:
            tiles = tiles + _load(w_ptr, PACKED, first, n_out, step + PRELOAD, K, EVEN_K, WARPS, WIDTH, HALVES, CODE,
                                  GROUP)  # fmt: skip
        if step % EACH == EACH - 1 and step // EACH + AHEAD < PARTS:
            x = part_of_x(x_ptr, X_SCALE, (), 1.0, step // EACH + AHEAD, scale_stride, K, WARPS, WIDTH, ROWS,
                          live_rows, PIECES, RUN)  # fmt: skip
            loaded = loaded + (x,)
            both = both + (both_scales(x, scales, step // EACH + AHEAD, HALVES, IN_BLOCKS),)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y = _result(accs, residual, SCALE, DELTA, col, rows, n_out, dtype, IN_BLOCKS, ROWS, CODE == "e4m3")
    at, live = _places(col, rows, n_out, ROWS)
    tl.store(out_ptr + at, y.to(dtype), mask=live)


@triton.jit
def _load(
    w_ptr, PACKED, first, n_out, step, K: tl.constexpr, EVEN_K: tl.constexpr, WARPS: tl.constexpr, WIDTH: tl.constexpr,
    HALVES: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Loads a step of weights, and of the ups that belong to them if HALVES is 2: by load_step or load_blocks."""
    warp = tl.arange(0, WARPS)[None, :, None]
    if PACKED is None:
        cols = (step * WARPS + warp) * (2 * WIDTH) + tl.arange(0, WIDTH)[None, None, :]
        return load_step(w_ptr, first, n_out, cols, K, EVEN_K, HALVES)
    else:
        last: tl.constexpr = (K - 1) // (4 * WIDTH)
        return load_blocks(w_ptr, PACKED, first, n_out, step * WARPS + warp, last, n_out * HALVES, HALVES, CODE, GROUP)


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
    acc, SCALE, DELTA, rows_of_w, n_end, rows, n, IN_BLOCKS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """`finish`, times the scales of the weights' rows, and DELTA [rows, n]."""
    y = finish(acc, ROWS)
    if SCALE is not None and not IN_BLOCKS:
        scale = tl.load(SCALE + tl.minimum(rows_of_w, n_end - 1))
        y *= scale if ROWS == 1 else scale[:, None]
    if ROWS == 1:
        return add_delta(y, DELTA, 0, rows_of_w, rows_of_w < n_end, n)
    else:
        row = tl.arange(0, ROWS)[None, :]
        return add_delta(y, DELTA, row, rows_of_w[:, None], (row < rows) & (rows_of_w < n_end)[:, None], n)


@triton.jit
def _result(
    accs, residual, SCALE, DELTA, col, rows, n_out, dtype: tl.constexpr, IN_BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Finished sums of a tile, activated if there are those of ups too, plus the residual, if any, before which they
    are rounded where ROUNDS: float32."""
    n = n_out * len(accs)
    y = _finish(accs[0], SCALE, DELTA, col, n_out, rows, n, IN_BLOCKS, ROWS)
    if len(accs) > 1:
        y = silu_mul(y, _finish(accs[1], SCALE, DELTA, n_out + col, 2 * n_out, rows, n, IN_BLOCKS, ROWS), dtype)
    if residual is not None:
        if ROUNDS:
            y = y.to(dtype).to(tl.float32)
        y += residual
    return y


def linear(
    x: Tensor | FP8Rows, weight: Tensor | FP8Weight | PackedWeight, config: GemmConfig, *, norm: Norm | None = None,
    gated: bool = False, residual: Tensor | None = None, delta: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [M <= 8, K] @ weight^T -> [M, N]; norm (by an FP8Weight of a row that the kernel rounds: rounds_inside), gated,
    residual and delta as in skinny.linear, but that the product is rounded before the activation, and in e4m3 before it
    is added."""
    (rows, k), dtype = tuple(x.shape), x.dtype
    values, packed, code, group, has_zeros, columns = *_operands(weight), 64
    scale, rows_each, in_blocks = None, 1, False
    type_name, shape = "bfloat16", tuple(values.shape)
    if isinstance(weight, PackedWeight):
        assert isinstance(x, Tensor)
        check_fits(x, weight)
        scale = weight.factors if group == NV_GROUP else None  # those of others are 1
        type_name, shape, columns = INT8, (weight.n, k), 128
    elif isinstance(weight, FP8Weight):
        type_name, columns = FP8, 128
    n_out = checked_width(config, x.shape, shape, residual, gated=gated, norms=norm is not None, dtype=type_name)
    if not values.is_contiguous():
        raise ValueError(f"weight {list(shape)}: must be contiguous")
    if isinstance(weight, FP8Weight):
        scale, rows_each, in_blocks = weight.scale, weight.rows_each, weight.in_blocks
        inside = residual is None and rounds_inside(rows, k, weight.input_scale is not None)
        if isinstance(x, Tensor) and not inside:  # every program would have much to round, or wait for a residual
            assert norm is None, "the plan leaves it to a kernel that rounds"
            x = quantize_rows(x, weight.input_scale)
        if in_blocks and (rows_each % 16 or n_out % 16):
            raise ValueError(f"weight {list(values.shape)}: 16s of rows must share scales, not {rows_each}")
    out = torch.empty(rows, n_out, dtype=dtype, device=values.device) if residual is None else residual
    steps, block_rows = triton.cdiv(k, config.block_k), triton.next_power_of_2(rows)
    parts, per_warp = triton.cdiv(steps * block_rows, 8), config.block_k // (columns * config.num_warps)
    fits = rows == 1 or norm is not None or parts * per_warp * (2 if packed is not None else 1) <= 4
    ahead = parts if fits else min(parts, 2 // per_warp)  # registers hold no more of x
    x = x if isinstance(x, Tensor) or rows == 1 else in_groups(x)
    x, x_scale, stride = (x, None, 0) if isinstance(x, Tensor) else (x.values, x.scales, x.scales.stride(1))
    gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    stream_kernel[(triton.cdiv(n_out, 16),)](
        x, x_scale, gain, values, packed, scale, out, residual, delta, scale_stride=stride, n_out=n_out,
        groups=0 if scale is None or not in_blocks else scale.shape[1], eps=eps, rows=rows, K=k, ROWS=block_rows,
        STEPS=steps, PRELOAD=min(config.stages, steps), AHEAD=ahead, ROWS_EACH=rows_each, IN_BLOCKS=in_blocks,
        EVEN_K=k == steps * config.block_k, GATED=gated, WARPS=per_warp * config.num_warps, CODE=code, GROUP=group,
        HAS_ZEROS=has_zeros, PTX=values.is_cuda, num_warps=config.num_warps, maxnreg=config.max_registers or None,
        **pdl_options(values.device),
    )  # fmt: skip
    return out


def _operands(weight: Tensor | FP8Weight | PackedWeight) -> tuple[Tensor, Tensor | None, str, int, bool]:
    """The numbers of a weight, and the kernel's PACKED, CODE, GROUP and HAS_ZEROS."""
    if isinstance(weight, PackedWeight):
        return weight.words, weight.scales, weight.code, weight.group, weight.has_zeros
    return values_of(weight), None, "e4m3" if isinstance(weight, FP8Weight) else "wide", 0, False
