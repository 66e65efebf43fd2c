"""Products by adapters' B inside other kernels: y += h B^T in float32, where h is a row's x A^T, rounded to B's dtype
(adapters.py).

A kernel takes the operands of a Shrunk as one tuple, ADAPTER: pointers to the sums, the slots and B, then as constants
the rank, the pieces, is_late and the first rows of all parts but the first. It may read slots and B before gdc_wait: an
ordinary kernel at the beginning of the step writes the slots. Rows without an adapter keep their bits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.base.triton_import import tl, triton

NONE: tl.constexpr = tl.constexpr(1 << 30)
FIELDS: tl.constexpr = tl.constexpr(6)  # of ADAPTER ahead of the first rows
EARLY_RANK: tl.constexpr = tl.constexpr(32)  # up to which registers hold a tile of B early

_PROGRAMS = 512
"""About how many column_groups makes."""


class Shrunk(NamedTuple):
    """x A^T of a step's rows, and what it is multiplied by."""

    sums: Tensor
    """float32 [pieces of k, rows, parts * rank], which are added in their order; of rows without an adapter any."""
    slots: Tensor
    """int32 [rows]; -1: no adapter."""
    b: Tensor
    """[slots, n, rank]"""
    starts: tuple[int, ...]
    """First row of B of each part."""
    is_late: bool = False
    """The kernel that takes it, the next one, may start when x is there, and must call gdc_wait for the sums."""

    @property
    def operands(self) -> tuple[Any, ...]:
        """ADAPTER."""
        numbers = self.b.shape[2], self.sums.shape[0], self.is_late, *self.starts[1:]
        return self.sums, self.slots, self.b, *map(tl.constexpr, numbers)


@triton.jit
def next_adapter(slots, before):
    """The lowest of these slots above `before`; NONE: there is none."""
    return tl.min(tl.where(slots > before, slots, NONE), 0)


@triton.jit
def slots_of(ADAPTER, row, rows):
    """Slots of rows; where programs have parts of K, of those of the first alone, which adds for all."""
    return tl.load(ADAPTER[1] + row, mask=(row < rows) & (tl.program_id(2) == 0), other=-1)


@triton.jit
def _part_of(ADAPTER, w_row):
    """Number of the part that has a row of B."""
    part = w_row * 0
    for number in tl.static_range(FIELDS, len(ADAPTER)):
        part += (w_row >= ADAPTER[number]).to(tl.int32)
    return part


@triton.jit
def b_of_rows(ADAPTER, slot, w_row, live, rank, n):
    """B of weight rows w_row and slots, which broadcast to [.., 1], at `rank` [.., RANK]; zeros where there is none."""
    at = (tl.where(slot >= 0, slot, 0).to(tl.int64) * n + w_row) * ADAPTER[3] + rank
    return tl.load(ADAPTER[2] + at, mask=live & (slot >= 0), other=0.0)


@triton.jit
def sums_of_rows(ADAPTER, slot, row, rows, w_row, rank):
    """Loads all pieces of x A^T for such a tile: of few rows `row`, which broadcasts as `slot` does. They are added
    later, behind what need not wait for them."""
    WIDTH: tl.constexpr = (len(ADAPTER) - FIELDS + 1) * ADAPTER[3]
    at, pieces = row * WIDTH + _part_of(ADAPTER, w_row) * ADAPTER[3] + rank, ()
    for piece in tl.static_range(ADAPTER[4]):
        pieces = pieces + (tl.load(ADAPTER[0] + piece * rows * WIDTH + at, mask=slot >= 0, other=0.0),)
    return pieces


@triton.jit
def delta_of_rows(pieces, b, scale):
    """h B^T, float32 [..], of sums_of_rows' pieces and b_of_rows' tile [.., RANK]. scale: on x A^T."""
    h = pieces[0]
    for piece in tl.static_range(1, len(pieces)):
        h += pieces[piece]
    h = (h * scale).to(b.dtype).to(tl.float32)
    return tl.sum(h * b.to(tl.float32), axis=len(b.shape) - 1)


@triton.jit
def of_adapters(delta, slot):
    """delta where slots have an adapter, elsewhere -0.0, which changes no number."""
    return tl.where(slot >= 0, delta, slot.to(tl.float32) * 0.0)  # the constant -0.0 is 0.0 to Triton


@triton.jit
def hold(ADAPTER, slot, row, rows, w_row, live, n, EARLY: tl.constexpr):
    """Slots of few rows, and if EARLY what they and live weight rows multiply, loaded ahead of other products that need
    not wait for it. slot, row and w_row are 2-dimensional and broadcast to what held_delta returns."""
    return (slot,) + (_operands(ADAPTER, slot, row, rows, w_row, live, 0, ADAPTER[3], n) if EARLY else ())


@triton.jit
def held_delta(ADAPTER, held, row, rows, w_row, live, n, scale):
    """h B^T, float32, see of_adapters; `held` is of the same operands. Else the ranks come by 16. scale: on x A^T."""
    if len(held) > 1:
        delta = delta_of_rows(held[2], held[1], scale)
    else:
        delta = tl.zeros([w_row.shape[0], max(row.shape[1], w_row.shape[1])], tl.float32)
        for begin in tl.range(0, ADAPTER[3], 16, num_stages=1):
            b, pieces = _operands(ADAPTER, held[0], row, rows, w_row, live, begin, 16, n)
            delta += delta_of_rows(pieces, b, scale)
    return of_adapters(delta, held[0])


@triton.jit
def _operands(ADAPTER, slot, row, rows, w_row, live, begin, RANKS: tl.constexpr, n):
    slot, w_row, rank = slot[:, :, None], w_row[:, :, None], (begin + tl.arange(0, RANKS))[None, None, :]
    b = b_of_rows(ADAPTER, slot, w_row, live[:, :, None], rank, n)
    return b, sums_of_rows(ADAPTER, slot, row[:, :, None], rows, w_row, rank)


@triton.jit
def first_b(ADAPTER, slots, w_row, end, n):
    """Rows w_row, before `end`, of B of the lowest of these slots, [BLOCK_N, RANK], where tile_delta wants them early;
    else anything."""
    return _tile_of_b(ADAPTER, next_adapter(slots, -1), w_row, end, n) if ADAPTER[3] <= EARLY_RANK else 0.0


@triton.jit
def _tile_of_b(ADAPTER, slot, w_row, end, n):
    slot = tl.where(slot < NONE, slot, -1)
    return b_of_rows(ADAPTER, slot, w_row[:, None], (w_row < end)[:, None], tl.arange(0, ADAPTER[3])[None, :], n)


@triton.jit
def sums_of_part(ADAPTER, mine, row, rows, part):
    """x A^T of a part, [BLOCK_M, RANK] in B's dtype, of rows that are `mine`; of others 0."""
    RANK: tl.constexpr = ADAPTER[3]
    WIDTH: tl.constexpr = (len(ADAPTER) - FIELDS + 1) * RANK
    UNROLL: tl.constexpr = max(2, min(8, 4096 // (RANK * row.shape[0])))
    sums = tl.zeros([row.shape[0], RANK], dtype=tl.float32)
    for piece in tl.range(0, ADAPTER[4], num_stages=1, loop_unroll_factor=UNROLL):
        at = (piece * rows + row).to(tl.int64)[:, None] * WIDTH + part * RANK + tl.arange(0, RANK)[None, :]
        sums += tl.load(ADAPTER[0] + at, mask=mine[:, None], other=0.0)
    return sums.to(ADAPTER[2].dtype.element_ty)


@triton.jit
def tile_delta(ADAPTER, b, slots, row, rows, w_row, end, n, X_LEFT: tl.constexpr):
    """h B^T of rows [BLOCK_M], with their slots, and weight rows w_row [BLOCK_N], before `end`: float32 [BLOCK_M,
    BLOCK_N], or transposed where not X_LEFT; see of_adapters. b: first_b's. Each slot's product has zeros for rows of
    others."""
    IS_ONE: tl.constexpr = len(ADAPTER) == FIELDS
    SHAPE: tl.constexpr = [row.shape[0], w_row.shape[0]] if X_LEFT else [w_row.shape[0], row.shape[0]]
    delta, first = tl.zeros(SHAPE, dtype=tl.float32), next_adapter(slots, -1)
    if first < NONE:
        part_of_row = _part_of(ADAPTER, tl.minimum(w_row, end - 1))
        first_part, last_part = (0, 0) if IS_ONE else (tl.min(part_of_row, 0), tl.max(part_of_row, 0))
        for part in tl.range(first_part, last_part + 1, num_stages=1):
            h, slot = sums_of_part(ADAPTER, slots >= 0, row, rows, part), first
            of_slot = b if ADAPTER[3] <= EARLY_RANK else _tile_of_b(ADAPTER, first, w_row, end, n)
            while slot < NONE:
                following = next_adapter(slots, slot)
                of_next = _tile_of_b(ADAPTER, following, w_row, end, n)  # on its way while of_slot is multiplied
                own = tl.where((slots == slot)[:, None], h, 0.0)
                if not IS_ONE:
                    of_slot = tl.where((part_of_row == part)[:, None], of_slot, 0.0)
                if X_LEFT:
                    delta = tl.dot(own, of_slot.T, delta, input_precision="ieee")
                else:
                    delta = tl.dot(of_slot, own.T, delta, input_precision="ieee")
                slot, of_slot = following, of_next
    return of_adapters(delta, slots[:, None] if X_LEFT else slots[None, :])


@triton.jit
def tile_deltas(ADAPTER, bs, slots, row, rows, col, n_out, X_LEFT: tl.constexpr, PDL: tl.constexpr):
    """tile_delta of weight rows `col`, and of the ups that belong to them, if there are as many of `bs`; () without
    ADAPTER. With PDL it waits for a Shrunk that is late."""
    deltas = ()
    if ADAPTER is not None:
        if PDL and ADAPTER[5]:
            tl.extra.cuda.gdc_wait()
        for half in tl.static_range(len(bs)):
            w_row, end = half * n_out + col, (half + 1) * n_out
            deltas = deltas + (tile_delta(ADAPTER, bs[half], slots, row, rows, w_row, end, len(bs) * n_out, X_LEFT),)
    return deltas


@triton.jit
def ends_of_part(ADAPTER, part, n):
    """First row of B of a part, and end."""
    start, end = 0, n
    for number in tl.static_range(FIELDS, len(ADAPTER)):
        start = tl.where(part > number - FIELDS, ADAPTER[number], start)
        end = tl.where(part == number - FIELDS, ADAPTER[number], end)
    return start, end


@triton.jit
def product_of_slot(ADAPTER, h, slot, slots, w_row, end, n):
    """h [BLOCK_M, RANK] by B of one slot and weight rows w_row, before `end`, float32 [BLOCK_M, BLOCK_N]; see
    of_adapters."""
    b = _tile_of_b(ADAPTER, slot, w_row, end, n)
    return of_adapters(tl.dot(h, b.T, input_precision="ieee", out_dtype=tl.float32), slots[:, None])


def column_groups(rows: int, columns: int, parts: int, rank: int) -> tuple[int, int, dict[str, Any]]:
    """Tiles of rows, groups of tiles of so many columns, and options of a kernel whose programs have a tile of rows and
    a group of each part: x A^T is read once for all of it."""
    block_m, block_n = 16 if rows <= 64 else 32 if rows <= 256 else 64, 64
    tiles, of_part = triton.cdiv(rows, block_m), triton.cdiv(columns, block_n)
    each = max(1, tiles * of_part * parts // _PROGRAMS)
    options = {"EACH": each, "BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": 3 if rank <= 64 else 1}
    return tiles, triton.cdiv(of_part, each), options | {"num_warps": 4 if rank <= 128 else 8}


def delta_reference(shrunk: Shrunk) -> Tensor:
    """Plain twin of adapters.expand: sums for each row, float32 [T, N]; of rows without an adapter -0.0."""
    _, slots, b, starts, _ = shrunk
    rank, ends = b.shape[2], (*starts[1:], b.shape[1])
    h = shrunk.sums.sum(0).to(b.dtype).float()
    delta = torch.full((len(slots), b.shape[1]), -0.0, device=b.device)
    for slot in filter(lambda slot: slot >= 0, slots.unique().tolist()):
        own = (slots == slot).nonzero().squeeze(1)
        for part, (begin, end) in enumerate(zip(starts, ends, strict=True)):
            delta[own, begin:end] = h[own, part * rank : (part + 1) * rank] @ b[slot, begin:end].float().T
    return delta
