"""Sums that LoRA adapters add to a product: delta = (x A^T) B^T in float32, of each row by its own A and B.

A kernel that multiplies by the base's weight adds them to its float32 sum, before anything else becomes of that: of a
young adapter most would be lost in a result that is rounded already. Rows without an adapter get -0.0, which changes
no number.

Each program finds its tile among the rows of its group: those of one adapter, in their order, and those of the next. K
is cut into pieces of PIECE columns, whose sums are added in their order: a row's bits depend on nothing but the row and
its adapter.
"""

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.pointwise.norm import Norm, norm_reference

PIECE = 512
MOST_PARTS = 3
_GROUP = 256
"""Maximum rows among which those of one adapter are searched."""
_MANY = 64
"""More adapters than so many share few rows each: theirs are searched in a tile alone."""
_NONE: tl.constexpr = tl.constexpr(1 << 30)


@triton.jit
def _tile_of(SLOTS, rows, first, index, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, LEAST: tl.constexpr):
    """Tile `index` of the rows first .. first + GROUP, by their slots from LEAST on: the slot (_NONE: there is no such
    tile), and up to BLOCK_M rows, with a mask."""
    group = first + tl.arange(0, GROUP)
    slots = tl.load(SLOTS + group, mask=group < rows, other=_NONE)
    slots = tl.where(slots >= LEAST, slots, _NONE)
    slot = tl.min(slots, 0)
    tiles = tl.cdiv(tl.sum((slots == slot).to(tl.int32), 0), BLOCK_M)
    while (slot < _NONE) & (index >= tiles):
        index -= tiles
        slot = tl.min(tl.where(slots > slot, slots, _NONE), 0)
        tiles = tl.cdiv(tl.sum((slots == slot).to(tl.int32), 0), BLOCK_M)
    own = slots == slot
    place = tl.cumsum(own.to(tl.int32), 0) - 1 - index * BLOCK_M
    hits = own[None, :] & (place[None, :] == tl.arange(0, BLOCK_M)[:, None])
    return slot, tl.sum(tl.where(hits, group[None, :], 0), 1), tl.sum(hits.to(tl.int32), 1) > 0


@triton.jit(do_not_specialize=["rows", "tiles"])
def shrink_kernel(
    X, SLOTS, A, GAIN, H, SQUARES, rows, k, x_stride, tiles,
    RANK: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (groups of rows x tiles, pieces of k, parts). X [rows, x_stride]; SLOTS int32 [rows]; A [slots, parts *
    RANK, k] -> H float32 [pieces, rows, parts * RANK], of rows with an adapter alone. With GAIN [k] A is multiplied by
    it, and SQUARES float32 [pieces, rows] are of x: the rest of its norm is a factor of the sum."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first, index = tl.program_id(0) // tiles * GROUP, tl.program_id(0) % tiles
    piece, part, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    rank = tl.arange(0, RANK)
    slot, row, live = _tile_of(SLOTS, rows, first, index, GROUP, BLOCK_M, 0)
    while slot < _NONE:
        x_ptrs = X + row.to(tl.int64)[:, None] * x_stride
        a_ptrs = A + (slot * parts + part).to(tl.int64) * RANK * k + rank[:, None] * k
        h, squares = tl.zeros([BLOCK_M, RANK], dtype=tl.float32), tl.zeros([BLOCK_M], dtype=tl.float32)
        for begin in tl.range(piece * PIECE, piece * PIECE + PIECE, BLOCK_K):
            col = begin + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptrs + col[None, :], mask=live[:, None] & (col < k)[None, :], other=0.0)
            a = tl.load(a_ptrs + col[None, :], mask=(col < k)[None, :], other=0.0)
            if GAIN is not None:
                gain = tl.load(GAIN + col, mask=col < k, other=0.0)
                a = (a.to(tl.float32) * gain.to(tl.float32)[None, :]).to(x.dtype)
                squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
            h = tl.dot(x, a.T, h, input_precision="ieee")
        at = (piece * rows + row)[:, None] * (parts * RANK) + part * RANK + rank[None, :]
        tl.store(H + at, h, mask=live[:, None])
        if GAIN is not None:
            tl.store(SQUARES + piece * rows + row, squares, mask=live & (part == 0))
        index += tiles
        slot, row, live = _tile_of(SLOTS, rows, first, index, GROUP, BLOCK_M, 0)


@triton.jit(do_not_specialize=["rows", "tiles"])
def expand_kernel(
    H, SQUARES, SLOTS, B, DELTA, rows, n, k, eps, second, third, tiles,
    RANK: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (groups of rows x tiles, tiles of n). H and SQUARES, which may be None, as shrink_kernel writes them; SLOTS
    int32 [rows], B [slots, n, RANK] -> DELTA float32 [rows, n]. Part 1 of H is for the columns from `second` on, part
    2 for those from `third` on."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first, index = tl.program_id(0) // tiles * GROUP, tl.program_id(0) % tiles
    col, rank = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, RANK)
    last_col = tl.minimum(col, n - 1)
    part_of_col = (last_col >= second).to(tl.int32) + (last_col >= third).to(tl.int32)
    first_part, last_part = tl.min(part_of_col, 0), tl.max(part_of_col, 0)
    slot, row, live = _tile_of(SLOTS, rows, first, index, GROUP, BLOCK_M, -1)
    while slot < _NONE:
        delta = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        if slot < 0:
            delta *= -1.0  # the constant -0.0 is 0.0 to Triton
        else:
            scale = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
            if SQUARES is not None:
                squares = tl.zeros([BLOCK_M], dtype=tl.float32)
                for number in tl.static_range(PIECES):
                    squares += tl.load(SQUARES + number * rows + row, mask=live, other=0.0)
                scale = tl.rsqrt(squares / k + eps)
            b_ptrs = B + slot.to(tl.int64) * n * RANK + col[:, None] * RANK + rank[None, :]
            for part in tl.range(first_part, last_part + 1, num_stages=1):
                b = tl.load(b_ptrs, mask=((col < n) & (part_of_col == part))[:, None], other=0.0)
                h = tl.zeros([BLOCK_M, RANK], dtype=tl.float32)
                for piece in tl.range(0, PIECES, num_stages=1, loop_unroll_factor=8 if RANK <= 32 else 2):
                    at = (piece * rows + row)[:, None] * (PARTS * RANK) + part * RANK + rank[None, :]
                    h += tl.load(H + at, mask=live[:, None], other=0.0)
                delta = tl.dot((h * scale[:, None]).to(b.dtype), b.T, delta, input_precision="ieee")
        at = row.to(tl.int64)[:, None] * n + col[None, :]
        tl.store(DELTA + at, delta, mask=live[:, None] & (col < n)[None, :])
        index += tiles
        slot, row, live = _tile_of(SLOTS, rows, first, index, GROUP, BLOCK_M, -1)


def adapter_delta(
    x: Tensor, slots: Tensor, a: Tensor, b: Tensor, starts: tuple[int, ...], norm: Norm | None = None
) -> Tensor:
    """x [T, K], of which the rows with an adapter have it in slot slots[t] (int32, -1: none); a [slots, parts * R, K]
    and b [slots, N, R] in x's dtype, R a power of two >= 16 -> float32 [T, N]. starts: first column of each part, at
    most MOST_PARTS, which has rows of `a` of its own. norm: of kind "rms", of x. x A^T is rounded to x's dtype."""
    (rows, k), (count, n, rank), parts = x.shape, b.shape, len(starts)
    pieces, block_m = triton.cdiv(k, PIECE), 16 if rows <= _GROUP else 64
    group = block_m if count > _MANY else min(_GROUP, max(block_m, triton.next_power_of_2(rows)))
    tiles = group // block_m + (min(count, rows - 1) if rows <= group else 0)  # no more than so many are not full
    grid = triton.cdiv(rows, group) * tiles
    h = torch.empty(pieces, rows, parts * rank, dtype=torch.float32, device=x.device)
    squares = torch.empty(pieces, rows, dtype=torch.float32, device=x.device) if norm else None
    delta = torch.empty(rows, n, dtype=torch.float32, device=x.device)
    shared = {
        "RANK": rank, "GROUP": group, "BLOCK_M": block_m, "num_warps": 4 if rank <= 128 else 8,
        **pdl_options(x.device),
    }  # fmt: skip
    shrink_kernel[(grid, pieces, parts)](
        x, slots, a, norm and norm.weight, h, squares, rows, k, x.stride(0), tiles,
        BLOCK_K=64 if rank > 64 else 128, PIECE=PIECE, **shared,
    )  # fmt: skip
    expand_kernel[(grid, triton.cdiv(n, 64))](
        h, squares, slots, b, delta, rows, n, k, norm.eps if norm else 0.0, *(*starts[1:], n, n)[:2], tiles,
        PARTS=parts, PIECES=pieces, BLOCK_N=64, **shared,
    )  # fmt: skip
    return delta


def adapter_delta_reference(
    x: Tensor, slots: Tensor, a: Tensor, b: Tensor, starts: tuple[int, ...], norm: Norm | None = None
) -> Tensor:
    """Plain twin of `adapter_delta`."""
    x = x if norm is None else norm_reference(x, norm)
    rank, ends = b.shape[2], (*starts[1:], b.shape[1])
    delta = torch.full((x.shape[0], b.shape[1]), -0.0, device=x.device)
    for slot in filter(lambda slot: slot >= 0, slots.unique().tolist()):
        own = (slots == slot).nonzero().squeeze(1)
        h = (x[own].float() @ a[slot].float().T).to(x.dtype).float()
        for part, (begin, end) in enumerate(zip(starts, ends, strict=True)):
            delta[own, begin:end] = h[:, part * rank : (part + 1) * rank] @ b[slot, begin:end].float().T
    return delta
