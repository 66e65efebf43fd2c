"""Sums that LoRA adapters add to a product: delta = (x A^T) B^T in float32, of each row by its own A and B.

A kernel that multiplies by the base's weight adds them to its float32 sum, before anything else becomes of that: of a
young adapter most would be lost in a result that is rounded already. Rows without an adapter get -0.0, which changes
no number.

Tokens are taken in tiles as they come, and a tile is multiplied by the adapters of its rows one after the other, of
which each row keeps its own: neighbours of one text have one, and decodes stand by adapter (StepPlan.sort_decodes). K
is cut into pieces of PIECE columns, whose sums are added in their order: a row's bits depend on nothing but the row and
its adapter.
"""

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options, prefetch_tile
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.pointwise.norm import Norm, norm_reference

PIECE = 512
MOST_PARTS = 4
_FEW_ROWS, _PROGRAMS = 256, 132
"""Rows up to which tiles have 16; programs of whole rows of x, from which on its pieces need none of their own."""
_NONE: tl.constexpr = tl.constexpr(1 << 30)
_EARLY_RANK: tl.constexpr = tl.constexpr(32)  # up to which registers hold a tile of B early


@triton.jit
def _next_adapter(slots, before):
    """The lowest of these slots above `before`; _NONE: there is none."""
    return tl.min(tl.where(slots > before, slots, _NONE), 0)


@triton.jit
def _slot_of(b_ptrs, slot, stride, inside):
    """Rows of B of one slot, where `inside` and where there is such an adapter."""
    own = b_ptrs + tl.where(slot < _NONE, slot, 0).to(tl.int64) * stride
    return tl.load(own, mask=(inside & (slot < _NONE))[:, None], other=0.0)


@triton.jit(do_not_specialize=["rows"])
def shrink_kernel(
    X, SLOTS, A, GAIN, H, SQUARES, rows, k, x_stride,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECE: tl.constexpr, EACH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, sums over EACH pieces of k, parts). X [rows, x_stride]; SLOTS int32 [rows]; A [slots, parts
    * RANK, k] -> H float32 [sums, rows, parts * RANK], of rows with an adapter alone. With GAIN [k] A is multiplied by
    it, and SQUARES float32 [sums, rows] are of x: the rest of its norm is a factor of the sum. With PDL SLOTS and A are
    read before gdc_wait: an ordinary kernel at the beginning of the step writes the slots."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    place, part, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    slots = tl.load(SLOTS + row, mask=row < rows, other=-1)
    slot = _next_adapter(slots, -1)
    if PDL:
        if slot < _NONE:
            first = (slot * parts + part).to(tl.int64) * RANK
            prefetch_tile(A, first, first + RANK, place * EACH * PIECE, k, RANK, PIECE)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_ptrs = X + row.to(tl.int64)[:, None] * x_stride
    rank = tl.arange(0, RANK)
    h, squares = tl.zeros([BLOCK_M, RANK], dtype=tl.float32), tl.zeros([BLOCK_M], dtype=tl.float32)
    while slot < _NONE:
        a_ptrs = A + (slot * parts + part).to(tl.int64) * RANK * k + rank[:, None] * k
        sums, squares = tl.zeros([BLOCK_M, RANK], dtype=tl.float32), tl.zeros([BLOCK_M], dtype=tl.float32)
        for piece in tl.range(place * EACH, place * EACH + EACH, num_stages=1):
            products = tl.zeros([BLOCK_M, RANK], dtype=tl.float32)
            for begin in tl.range(piece * PIECE, piece * PIECE + PIECE, BLOCK_K):
                col = begin + tl.arange(0, BLOCK_K)
                x = tl.load(x_ptrs + col[None, :], mask=(slots >= 0)[:, None] & (col < k)[None, :], other=0.0)
                a = tl.load(a_ptrs + col[None, :], mask=(col < k)[None, :], other=0.0)
                if GAIN is not None:
                    gain = tl.load(GAIN + col, mask=col < k, other=0.0)
                    a = (a.to(tl.float32) * gain.to(tl.float32)[None, :]).to(x.dtype)
                    squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
                products = tl.dot(x, a.T, products, input_precision="ieee")
            sums = sums + products if EACH > 1 else products
        h = tl.where((slots == slot)[:, None], sums, h)
        slot = _next_adapter(slots, slot)
    at = (place * rows + row).to(tl.int64)[:, None] * (parts * RANK) + part * RANK + rank[None, :]
    tl.store(H + at, h, mask=(slots >= 0)[:, None])
    if GAIN is not None:
        tl.store(SQUARES + place * rows + row, squares, mask=(slots >= 0) & (part == 0))


@triton.jit(do_not_specialize=["rows"])
def expand_kernel(
    H, SQUARES, SLOTS, B, DELTA, rows, n, k, eps, second, third, fourth,
    RANK: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of n). H and SQUARES, which may be None, as shrink_kernel writes them in PIECES sums;
    SLOTS int32 [rows], B [slots, n, RANK] -> DELTA [rows, n]. Part 1 of H is for the columns from `second` on, part 2
    for those from `third` on, part 3 for those from `fourth` on. PDL: see shrink_kernel."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    col, rank = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, RANK)
    slots = tl.load(SLOTS + row, mask=row < rows, other=-1)
    first_slot = _next_adapter(slots, -1)
    b_ptrs = B + col[:, None] * RANK + rank[None, :]
    if RANK <= _EARLY_RANK:
        first_b = _slot_of(b_ptrs, first_slot, n * RANK, col < n)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    last_col = tl.minimum(col, n - 1)
    part_of_col = (last_col >= second).to(tl.int32) + (last_col >= third).to(tl.int32)
    part_of_col += (last_col >= fourth).to(tl.int32)
    first_part, last_part = tl.min(part_of_col, 0), tl.max(part_of_col, 0)
    has_adapter = (slots >= 0)[:, None]
    scale = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    if SQUARES is not None:
        squares = tl.zeros([BLOCK_M], dtype=tl.float32)
        for number in tl.static_range(PIECES):
            squares += tl.load(SQUARES + number * rows + row, mask=slots >= 0, other=0.0)
        scale = tl.rsqrt(squares / k + eps)
    delta = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for part in tl.range(first_part, last_part + 1, num_stages=1):
        sums = tl.zeros([BLOCK_M, RANK], dtype=tl.float32)
        for piece in tl.range(0, PIECES, num_stages=1, loop_unroll_factor=8 if RANK <= 32 else 2):
            at = (piece * rows + row).to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK + rank[None, :]
            sums += tl.load(H + at, mask=has_adapter, other=0.0)
        h = (sums * scale[:, None]).to(B.dtype.element_ty)
        slot = first_slot
        b = first_b if RANK <= _EARLY_RANK else _slot_of(b_ptrs, first_slot, n * RANK, col < n)
        while slot < _NONE:
            of_part = tl.where((part_of_col == part)[:, None], b, 0.0)
            delta = tl.where((slots == slot)[:, None], tl.dot(h, of_part.T, delta, input_precision="ieee"), delta)
            slot = _next_adapter(slots, slot)
            b = _slot_of(b_ptrs, slot, n * RANK, col < n)
    minus_zero = tl.zeros(delta.shape, dtype=tl.float32) * -1.0  # the constant -0.0 is 0.0 to Triton
    delta = tl.where(has_adapter, delta, minus_zero)
    live = (row < rows)[:, None] & (col < n)[None, :]
    tl.store(DELTA + row.to(tl.int64)[:, None] * n + col[None, :], delta.to(DELTA.dtype.element_ty), mask=live)


def adapter_delta(
    x: Tensor, slots: Tensor, a: Tensor, b: Tensor, starts: tuple[int, ...], norm: Norm | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """x [T, K], of which the rows with an adapter have it in slot slots[t] (int32, -1: none); a [slots, parts * R, K]
    and b [slots, N, R] in x's dtype, R a power of two >= 16 -> dtype [T, N]. starts: first column of each part, at
    most MOST_PARTS, which has rows of `a` of its own. norm: of kind "rms", of x. x A^T is rounded to x's dtype."""
    (rows, k), (_, n, rank), parts = x.shape, b.shape, len(starts)
    block_m, block_n = (16, 64) if rows <= _FEW_ROWS else (64, 128 if rank <= 32 else 64)
    tiles, pieces = triton.cdiv(rows, block_m), triton.cdiv(k, PIECE)
    each = 1 if norm or rank > 128 or tiles * parts < _PROGRAMS else pieces
    h = torch.empty(pieces // each, rows, parts * rank, dtype=torch.float32, device=x.device)
    squares = torch.empty(pieces, rows, dtype=torch.float32, device=x.device) if norm else None
    delta = torch.empty(rows, n, dtype=dtype, device=x.device)
    num_warps, pdl = 4 if rank <= 128 else 8, pdl_options(x.device)
    shrink_kernel[(tiles, pieces // each, parts)](
        x, slots, a, norm and norm.weight, h, squares, rows, k, x.stride(0), RANK=rank, BLOCK_M=block_m,
        BLOCK_K=64 if rank > 64 else 128, PIECE=PIECE, EACH=each, num_warps=num_warps, **pdl,
    )  # fmt: skip
    expand_kernel[(tiles, triton.cdiv(n, block_n))](
        h, squares, slots, b, delta, rows, n, k, norm.eps if norm else 0.0, *(*starts[1:], n, n, n)[:3], RANK=rank,
        PARTS=parts, PIECES=pieces // each, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps, **pdl,
    )  # fmt: skip
    return delta


def adapter_delta_reference(
    x: Tensor, slots: Tensor, a: Tensor, b: Tensor, starts: tuple[int, ...], norm: Norm | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Plain twin of `adapter_delta`."""
    x = x if norm is None else norm_reference(x, norm)
    rank, ends = b.shape[2], (*starts[1:], b.shape[1])
    delta = torch.full((x.shape[0], b.shape[1]), -0.0, device=x.device)
    for slot in filter(lambda slot: slot >= 0, slots.unique().tolist()):
        own = (slots == slot).nonzero().squeeze(1)
        h = (x[own].float() @ a[slot].float().T).to(x.dtype).float()
        for part, (begin, end) in enumerate(zip(starts, ends, strict=True)):
            delta[own, begin:end] = h[:, part * rank : (part + 1) * rank] @ b[slot, begin:end].float().T
    return delta.to(dtype)
