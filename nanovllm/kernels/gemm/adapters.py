"""Sums that LoRA adapters add to a product: delta = (x A^T) B^T in float32, of each row by its own A and B.

A kernel that multiplies by the base's weight adds them to its float32 sum, before anything else becomes of that: of a
young adapter most would be lost in a result that is rounded already. Kernels of our own get x A^T, which `shrink`
computes, and multiply by B themselves (expand.py), as the activation behind the library does. Other products of the
library, and kernels for experts, get the whole delta, of rows without an adapter -0.0, which changes no number.

Tokens are taken in tiles as they come, and a tile is multiplied by the adapters of its rows one after the other, of
which each row keeps its own: neighbours of one text have one, and decodes stand by adapter (Schedule.sort_decodes). K
is cut into PIECES of columns, whose sums are added in their order: a row's bits depend on nothing but the row and its
adapter. Ahead of kernels for few rows, which have sums of their own order, programs have a row each: the kernel
that waits for them reads the fewer pieces the sooner. A tile does not wait: `shrink` lets it start when x is there, and
what it adds is ready behind its products.
"""

from itertools import pairwise

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options, prefetch_tile, start_early
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.expand import (
    EARLY_RANK,
    NONE,
    Shrunk,
    column_groups,
    delta_reference,
    ends_of_part,
    next_adapter,
    product_of_slot,
    slots_of,
    sums_of_part,
)
from nanovllm.kernels.pointwise.norm import Norm

PIECES, ROW_PIECES = (512, 1024), (1024, 2048)
"""Columns of a piece of K, and of one where programs have a row each: the first that leaves few pieces."""
_FEW_PIECES = 8, 4
_FEW_ROWS, _PROGRAMS = 256, 132
"""Rows up to which tiles have 16; programs of whole rows of x, from which on its pieces need none of their own."""
_RANKS: tl.constexpr = tl.constexpr(16)  # of a program that has a row


@triton.jit
def shrink_row_kernel(X, SLOTS, A, GAIN, H, k, x_stride, PIECE: tl.constexpr, PDL: tl.constexpr):
    """Grid (rows, pieces of k, 16s of rows of A). X [rows, x_stride]; SLOTS int32 [rows]; A [slots, rows of A, k] -> H
    float32 [pieces, rows, rows of A], of rows with an adapter alone. With GAIN [k] x is multiplied by it: what else its
    norm does is a factor of the sum. With PDL SLOTS, A and GAIN are read before gdc_wait: see expand.py."""
    row, piece, ranks = tl.program_id(0), tl.program_id(1), tl.num_programs(2) * _RANKS
    slot = tl.load(SLOTS + row)
    col, rank = piece * PIECE + tl.arange(0, PIECE), tl.program_id(2) * _RANKS + tl.arange(0, _RANKS)
    live = (col < k) & (slot >= 0)
    a_ptrs = A + (tl.where(slot >= 0, slot, 0) * ranks + rank).to(tl.int64)[:, None] * k + col[None, :]
    a = tl.load(a_ptrs, mask=live[None, :], other=0.0)
    if GAIN is not None:
        gain = tl.load(GAIN + col, mask=live, other=0.0).to(tl.float32)
    start_early(PDL)
    x = tl.load(X + row.to(tl.int64) * x_stride + col, mask=live, other=0.0).to(tl.float32)
    if GAIN is not None:
        x *= gain
    h = tl.sum(a.to(tl.float32) * x[None, :], 1)
    tl.store(H + (piece * tl.num_programs(0) + row) * ranks + rank, h, mask=slot >= 0)


@triton.jit
def _tiles(ptrs, live, first_col, k, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tiles [rows, BLOCK_K] of COLUMNS from first_col on, of live rows at `ptrs` [rows, 1]."""
    tiles = ()
    for begin in tl.static_range(0, COLUMNS, BLOCK_K):
        col = (first_col + begin + tl.arange(0, BLOCK_K))[None, :]
        tiles = tiles + (tl.load(ptrs + col, mask=live & (col < k), other=0.0),)
    return tiles


@triton.jit(do_not_specialize=["rows"])
def shrink_kernel(
    X, TOKENS, SLOTS, A, H, rows, k, x_stride,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PIECE: tl.constexpr, EACH: tl.constexpr,
    EARLY: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, sums over EACH pieces of k, parts). X, SLOTS, PDL: see shrink_row_kernel; A [slots, parts *
    RANK, k] -> H float32 [sums, rows, parts * RANK], of rows with an adapter alone. TOKENS int32 [rows]: rows of X that
    are its rows; None: one after the other. EARLY: a sum is of one piece, whose first A is in registers before
    gdc_wait."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    place, part, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    slots = tl.load(SLOTS + row, mask=row < rows, other=-1)
    slot, rank, first_col = next_adapter(slots, -1), tl.arange(0, RANK), place * EACH * PIECE
    a_ptrs = A + rank[:, None] * k
    if EARLY:
        own = (slot % NONE * parts + part).to(tl.int64) * RANK * k  # of none: slot 0
        a = _tiles(a_ptrs + own, slot < NONE, first_col, k, PIECE, BLOCK_K)
    elif PDL:  # noqa: SIM102 (a constant)
        if slot < NONE:
            first = (slot * parts + part).to(tl.int64) * RANK
            prefetch_tile(A, first, first + RANK, first_col, k, RANK, PIECE)
    if PDL and LATE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    else:
        start_early(PDL)
    of_x = row if TOKENS is None else tl.load(TOKENS + row, mask=slots >= 0, other=0)
    x_ptrs, has_adapter = X + of_x.to(tl.int64)[:, None] * x_stride, (slots >= 0)[:, None]
    h = tl.zeros([BLOCK_M, RANK], dtype=tl.float32)
    if EARLY:
        x = _tiles(x_ptrs, has_adapter, first_col, k, PIECE, BLOCK_K)
    while slot < NONE:
        sums = tl.zeros([BLOCK_M, RANK], dtype=tl.float32)
        if EARLY:
            for step in tl.static_range(PIECE // BLOCK_K):
                sums = tl.dot(x[step], a[step].T, sums, input_precision="ieee")
        else:
            own = (slot * parts + part).to(tl.int64) * RANK * k
            for piece in tl.range(0, EACH, num_stages=1):
                products = tl.zeros([BLOCK_M, RANK], dtype=tl.float32)
                for col in tl.range(first_col + piece * PIECE, first_col + piece * PIECE + PIECE, BLOCK_K):
                    tile_of_x = _tiles(x_ptrs, has_adapter, col, k, BLOCK_K, BLOCK_K)[0]
                    tile_of_a = _tiles(a_ptrs + own, True, col, k, BLOCK_K, BLOCK_K)[0]
                    products = tl.dot(tile_of_x, tile_of_a.T, products, input_precision="ieee")
                sums = sums + products if EACH > 1 else products
        h = tl.where((slots == slot)[:, None], sums, h)
        slot = next_adapter(slots, slot)
        if EARLY:
            own = (slot % NONE * parts + part).to(tl.int64) * RANK * k
            a = _tiles(a_ptrs + own, slot < NONE, first_col, k, PIECE, BLOCK_K)
    at = (place * rows + row).to(tl.int64)[:, None] * (parts * RANK) + part * RANK + rank[None, :]
    tl.store(H + at, h, mask=has_adapter)


@triton.jit(do_not_specialize=["rows"])
def expand_kernel(
    ADAPTER, DELTA, rows, n, groups,
    EACH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, parts * groups of EACH tiles of a part's columns): DELTA [rows, n]. ADAPTER: see expand.py,
    of shrink_kernel's H."""
    row, part = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) // groups
    slots = slots_of(ADAPTER, row, rows)
    start, end = ends_of_part(ADAPTER, part, n)
    first = start + tl.program_id(1) % groups * (EACH * BLOCK_N)
    start_early(PDL)
    slot = tl.min(slots, 0)
    while slot < NONE:
        mine = (slots == slot) & (row < rows)
        h = sums_of_part(ADAPTER, mine & (slots >= 0), row, rows, part)
        for w_row in tl.range(first, tl.minimum(first + EACH * BLOCK_N, end), BLOCK_N, num_stages=STAGES):
            col = w_row + tl.arange(0, BLOCK_N)
            delta = product_of_slot(ADAPTER, h, slot, slots, col, end, n).to(DELTA.dtype.element_ty)
            at = row.to(tl.int64)[:, None] * n + col[None, :]
            tl.store(DELTA + at, delta, mask=mine[:, None] & (col < end)[None, :])
        slot = next_adapter(slots, slot)


def shrink(
    x: Tensor, slots: Tensor, a: Tensor, b: Tensor, starts: tuple[int, ...], *, few: bool = False,
    norm: Norm | None = None, late: bool = False, tokens: Tensor | None = None,
) -> Shrunk:  # fmt: skip
    """Operands as of adapter_delta -> x A^T, float32 [pieces of K, T, parts * R]. few: for a kernel for few rows
    (GemmConfig.is_skinny), which may compute `norm` of x, of kind "rms", too, and then multiplies these sums by what it
    multiplies x by, beside the norm's weight. late: see Shrunk.is_late."""
    rows, k, ranks, parts = len(slots), x.shape[1], a.shape[1], len(starts)
    if few:
        piece = ROW_PIECES[k > _FEW_PIECES[1] * ROW_PIECES[0]]
        h = torch.empty(triton.cdiv(k, piece), rows, ranks, dtype=torch.float32, device=x.device)
        shrink_row_kernel[(rows, h.shape[0], ranks // _RANKS.value)](
            x, slots, a, norm and norm.weight, h, k, x.stride(0), PIECE=piece, num_warps=piece // 128,
            **pdl_options(x.device),
        )  # fmt: skip
        return Shrunk(h, slots, b, starts)
    assert norm is None
    rank, block_m, piece = ranks // parts, 16 if rows <= _FEW_ROWS else 64, PIECES[k > _FEW_PIECES[0] * PIECES[0]]
    tiles, pieces = triton.cdiv(rows, block_m), triton.cdiv(k, piece)
    each = 1 if rank > 128 or tiles * parts < _PROGRAMS else pieces
    early = block_m == 16 and rank <= EARLY_RANK.value and each == 1 and piece == PIECES[0]
    h = torch.empty(pieces // each, rows, ranks, dtype=torch.float32, device=x.device)
    shrink_kernel[(tiles, pieces // each, parts)](
        x, tokens, slots, a, h, rows, k, x.stride(0), RANK=rank, BLOCK_M=block_m, BLOCK_K=64 if rank > 64 else 128,
        PIECE=piece, EACH=each, EARLY=early, LATE=late, num_warps=4 if rank <= 128 else 8, **pdl_options(x.device),
    )  # fmt: skip
    return Shrunk(h, slots, b, starts, late)


def expand(shrunk: Shrunk, out: Tensor) -> Tensor:
    """Fills and returns `out` [T, N] with what adapters add; see adapter_delta."""
    (rows, n), starts = out.shape, shrunk.starts
    widest = max(end - start for start, end in pairwise((*starts, n)))
    tiles, groups, options = column_groups(rows, widest, len(starts), shrunk.b.shape[2])
    expand_kernel[(tiles, len(starts) * groups)](
        shrunk.operands, out, rows, n, groups, **options, **pdl_options(out.device)
    )
    return out


def adapter_delta(
    x: Tensor, slots: Tensor, a: Tensor, b: Tensor, starts: tuple[int, ...], dtype: torch.dtype = torch.float32,
    tokens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [T, K], of which the rows with an adapter have it in slot slots[t] (int32, -1: none); a [slots, parts * R, K]
    and b [slots, N, R] in x's dtype, R a power of two >= 16 -> dtype [T, N]. starts: first column of each part,
    which has rows of `a` of its own. x A^T is rounded to x's dtype. tokens: with them row t is x[tokens[t]] (int32)."""
    delta = torch.empty(len(slots), b.shape[1], dtype=dtype, device=x.device)
    return expand(shrink(x, slots, a, b, starts, tokens=tokens), delta)


def adapter_delta_reference(
    x: Tensor, slots: Tensor, a: Tensor, b: Tensor, starts: tuple[int, ...], dtype: torch.dtype = torch.float32,
    tokens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Plain twin of `adapter_delta`."""
    x = x if tokens is None else x[tokens]
    sums = torch.zeros(1, x.shape[0], a.shape[1], device=x.device)
    for slot in filter(lambda slot: slot >= 0, slots.unique().tolist()):
        sums[0, slots == slot] = x[slots == slot].float() @ a[slot].float().T
    return delta_reference(Shrunk(sums, slots, b, starts)).to(dtype)
