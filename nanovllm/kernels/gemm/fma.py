"""Products of 1 to 4 rows on CUDA cores, and what surrounds them in a decoder layer: the decode path of small batches.

At these sizes a GEMM is a read of W, and in a CUDA graph of hundreds of such reads the gaps between kernels
weigh as much as the reads. So the norm before and the activation or residual after are folded in, and each kernel
starts its weight reads while the previous one is still running (programmatic dependent launch, PDL).

A chain under PDL is correct only if each kernel in it either is launched the ordinary way, which waits for its
predecessor's end, or calls `gdc_wait` in every program before touching anything that an earlier kernel writes. The
kernel here does the latter, so the two sorts mix freely: it cannot finish before all of its predecessors have, and no
buffer is overwritten while an earlier kernel reads it. In return no kernel in flight may write weights.

A program owns BLOCK_N weight rows, WARPS groups of BLOCK_N / WARPS, and walks K in steps of CHUNKS x 256 columns. All
tiles are shaped [WARPS, rows of a warp, CHUNKS, 256]: the compiler then gives each warp whole rows of W (512 contiguous
bytes a load instruction) and its own copy of x, so only the last sum, over 32 lanes, crosses threads. The first PRELOAD
steps of weights are read into registers *before* `gdc_wait`.

A row's result does not depend on how many rows share the launch: its accumulators are its own, their order is fixed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.epilogue import LANE_SPAN, checked_width, normalise, store_tile, weight_rows
from nanovllm.kernels.gemm.expand import EARLY_RANK, Shrunk, held_delta, hold, slots_of
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.pointwise.norm import Norm, norm_reference


class LaneWalk(NamedTuple):
    """Way of a program along weight rows. All are constants: what they decide is compiled away."""

    k: Any
    chunks: Any
    """256s of columns in a step."""
    steps: Any
    """Steps along a row."""
    warps: Any
    even_k: Any
    """The steps tile k exactly."""
    even_n: Any
    """The programs' tiles do so to the weight's rows."""


@triton.jit
def step_columns(step, walk):
    """Columns of a step, [1, 1, chunks, 256]; 256 of them are a 16-byte load of each lane of a warp."""
    chunk = step * (walk.chunks * LANE_SPAN) + tl.arange(0, walk.chunks) * LANE_SPAN
    return chunk[None, None, :, None] + tl.arange(0, LANE_SPAN)[None, None, None, :]


@triton.jit
def load_steps(row_ptrs, row_live, begin: tl.constexpr, end: tl.constexpr, walk):
    """Weights [WARPS, rows of a warp, chunks, 256] of the steps from `begin` to `end` along row_ptrs, a tuple of
    pointers to rows, of which one comes after the other. They are read once, so they go past L1, which x needs."""
    tiles = ()
    for step in tl.static_range(begin, end):
        cols, ptrs = step_columns(step % walk.steps, walk), row_ptrs[step // walk.steps]  # type: ignore[var-annotated]
        if walk.even_k and walk.even_n:
            w = tl.load(ptrs + cols, cache_modifier=".cg")
        elif walk.even_k:
            w = tl.load(ptrs + cols, mask=row_live, other=0.0, cache_modifier=".cg")
        else:
            w = tl.load(ptrs + cols, mask=row_live & (cols < walk.k), other=0.0, cache_modifier=".cg")
        tiles = tiles + (w,)
    return tiles


@triton.jit
def load_vector(ptr, live, step, walk, AGAIN: tl.constexpr = False):
    """A step of one row of x, or of the norm weight, a copy for each warp: [WARPS, 1, chunks, 256]."""
    cols = step_columns(step, walk) + tl.arange(0, walk.warps)[:, None, None, None] * 0
    mask = (cols >= 0) & live if walk.even_k else (cols < walk.k) & live
    return tl.load(ptr + cols, mask=mask, other=0.0, cache_modifier=".ca" if AGAIN else "")


@triton.jit
def lane_sums(tile):
    """Sums inside each lane: float32 [WARPS, R, chunks, 256] -> [WARPS, R, 32]."""
    split = tl.reshape(tile, [tile.shape[0], tile.shape[1], tile.shape[2], 32, 8])
    return tl.sum(tl.sum(split, axis=4), axis=2)


@triton.jit
def row_scale(x_ptr, live, eps, walk):
    """1 / rms of one row of x, a copy for each warp: float32 [WARPS, 1, 1, 1]."""
    total = tl.zeros([walk.warps, 1, 32], dtype=tl.float32)
    for step in tl.static_range(walk.steps):
        x = load_vector(x_ptr, live, step, walk).to(tl.float32)
        total += lane_sums(x * x)
    return tl.rsqrt(tl.sum(total, axis=2) / walk.k + eps)[:, :, None, None]


@triton.jit
def products(
    tiles, row_ptrs, row_live, x_ptr, rows, GAIN, gain, scales, ROWS: tl.constexpr, PRELOAD: tl.constexpr,
    AGAIN: tl.constexpr, walk,
):  # fmt: skip
    """Sums of each row of x [rows <= ROWS, k] times the weights, of whose steps `tiles` are the first PRELOAD: for each
    row [WARPS, rows of a warp, 32]. With GAIN, whose first step is `gain`, x is normalised by `scales`. AGAIN: it is
    read by another name than row_scale does; else one load is made of both, whose registers live all the while."""
    accs = ()
    for _ in tl.static_range(ROWS):
        accs = accs + (tl.zeros([walk.warps, tiles[0].shape[1], 32], dtype=tl.float32),)
    for step in tl.static_range(walk.steps):
        tile = tiles[0].to(tl.float32)
        tiles = tiles[1:]
        if step + PRELOAD < walk.steps:
            tiles = tiles + load_steps(row_ptrs, row_live, step + PRELOAD, step + PRELOAD + 1, walk)
        if GAIN is not None and step > 0:
            gain = load_vector(GAIN, rows > 0, step, walk)
        summed = ()
        for row in tl.static_range(ROWS):
            x = load_vector(x_ptr + row * walk.k, row < rows, step, walk, AGAIN)
            if GAIN is not None:
                x = normalise(x, gain, scales[row])
            summed = summed + (accs[row] + lane_sums(tile * x.to(tl.float32)),)
        accs = summed
    return accs


@triton.jit
def _load_residual(res_ptr, row, rows, col, n_out):
    """Loads columns `col` of a row in float32, before the multiplication, so that its latency is hidden; 0.0 where
    there is none."""
    residual = 0.0
    if res_ptr is not None:
        live = (row < rows) & (col < n_out)
        residual = tl.load(res_ptr + row * n_out + col, mask=live, other=0.0).to(tl.float32)
    return residual


@triton.jit(do_not_specialize=["rows", "n_out"])
def fma_kernel(
    x_ptr, w_ptr, norm_ptr, bias_ptr, out_ptr, res_ptr, ADAPTER, rows, n_out, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr,
    PRELOAD: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (column tiles,); x is [rows <= ROWS, K]. norm_ptr, bias_ptr [weight rows], res_ptr, ADAPTER (see
    expand.py): None where there is no such thing. CHUNKS, STEPS, EVEN_K, EVEN_N: see LaneWalk."""
    walk: tl.constexpr = LaneWalk(K, CHUNKS, STEPS, WARPS, EVEN_K, EVEN_N)
    NORM: tl.constexpr = norm_ptr is not None
    PER_WARP: tl.constexpr = BLOCK_N // WARPS
    pid = tl.program_id(0)
    lane = tl.arange(0, WARPS)[:, None] * PER_WARP + tl.arange(0, PER_WARP)[None, :]
    w_rows, w_live = weight_rows(lane, pid, n_out, BLOCK_N, PAIRED)
    row_ptrs, row_live = ((w_ptr + w_rows.to(tl.int64) * K)[:, :, None, None],), w_live[:, :, None, None]
    tiles, gain = load_steps(row_ptrs, row_live, 0, PRELOAD, walk), 0.0
    if NORM:
        gain = load_vector(norm_ptr, rows > 0, 0, walk)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + w_rows, mask=w_live, other=0.0).to(tl.float32)
    slots, held, n, first = (), (), n_out * 2 if PAIRED else n_out, tl.zeros([1, 1], tl.int32)
    for row in tl.static_range(ROWS if ADAPTER is not None else 0):
        slots = slots + (slots_of(ADAPTER, first + row, rows),)
    # In a chain for one row, where each kernel lets the next come as soon as all its own programs run, gate and up hold
    # them back: else those after `down` take the room that it needs.
    LATE: tl.constexpr = PAIRED and NORM and ROWS == 1
    if PDL:
        if not LATE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if LATE:
            tl.extra.cuda.gdc_launch_dependents()

    scales, residuals = (), ()
    for row in tl.static_range(len(slots)):
        held = held + (hold(ADAPTER, slots[row], first + row, rows, w_rows, w_live, n, ADAPTER[3] <= EARLY_RANK),)
    for row in tl.static_range(ROWS):
        residuals = residuals + (_load_residual(res_ptr, row, rows, pid * BLOCK_N + lane, n_out),)
    for row in tl.static_range(ROWS):
        if NORM:
            scales = scales + (row_scale(x_ptr + row * K, row < rows, eps, walk),)
    accs = products(tiles, row_ptrs, row_live, x_ptr, rows, norm_ptr, gain, scales, ROWS, PRELOAD, True, walk)
    OUT_WIDTH: tl.constexpr = PER_WARP // 2 if PAIRED else PER_WARP
    out_lane = tl.arange(0, WARPS)[:, None] * OUT_WIDTH + tl.arange(0, OUT_WIDTH)[None, :]
    for row in tl.static_range(ROWS):
        y = tl.sum(accs[row], axis=2)
        if bias_ptr is not None:
            y += bias
        if ADAPTER is not None:
            scale = tl.reshape(scales[row], [WARPS, 1, 1]) if NORM else 1.0
            y += held_delta(ADAPTER, held[row], first + row, rows, w_rows, w_live, n, scale)
        store_tile(y, residuals[row], out_lane, row, out_ptr, rows, pid, n_out, BLOCK_N, PAIRED)


def walk_constants(weight: Tensor, config: GemmConfig, num_experts: int = 1) -> dict[str, Any]:
    """Constants of a kernel whose programs go along rows of a weight [.., N, K], of so many experts one after the
    other."""
    n, k = weight.shape[-2:]
    steps = triton.cdiv(k, config.block_k)
    return {
        "K": k, "BLOCK_N": config.block_n, "CHUNKS": config.block_k // LANE_SPAN.value, "STEPS": steps,
        "PRELOAD": min(config.stages, steps * num_experts), "EVEN_K": k == steps * config.block_k,
        "EVEN_N": n % config.block_n == 0, "WARPS": config.num_warps, "num_warps": config.num_warps,
        "maxnreg": config.max_registers or None,
    }  # fmt: skip


def linear(
    x: Tensor, weight: Tensor, config: GemmConfig, *, norm: Norm | None = None, gated: bool = False,
    residual: Tensor | None = None, out_dtype: torch.dtype | None = None, delta: Shrunk | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [M <= 4, K] @ weight [N, K]^T -> [M, N] of x's dtype or of `out_dtype`.

    norm: of kind "rms", before it. gated: the weight is [2 I, K], gates first, and the result silu(gate) * up, [M, I].
    residual [M, N]: the product is added to it in place, rounded once, and it is returned. delta: of adapters, which
    is added to the product before anything else; see shrink for the norm. bias [N]: likewise.
    """
    rows, n = x.shape[0], weight.shape[0]
    n_out = checked_width(config, x.shape, weight.shape, residual, gated=gated)
    if not (x.is_contiguous() and weight.is_contiguous()) or x.dtype != weight.dtype:
        raise ValueError(f"contiguous tensors of one dtype expected, got {x.dtype} and {weight.dtype}")
    out = x.new_empty(rows, n_out, dtype=out_dtype) if residual is None else residual
    fma_kernel[(triton.cdiv(n, config.block_n),)](
        x, weight, norm and norm.weight, bias, out, residual, delta and delta.operands, rows=rows, n_out=n_out,
        eps=norm.eps if norm else 0.0, ROWS=triton.next_power_of_2(rows), PAIRED=gated,
        **walk_constants(weight, config), **pdl_options(x.device),
    )  # fmt: skip
    return out


def linear_reference(
    x: Tensor, weight: Tensor, *, norm: Norm | None = None, gated: bool = False, residual: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Plain twin of `linear`; like the kernels it rounds after the norm, and the result."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (x if norm is None else norm_reference(x, norm)).to(wide) @ weight.to(wide).T
    y = y if bias is None else y + bias.to(wide)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y.to(x.dtype) if residual is None else residual.copy_(residual.to(wide) + y)
