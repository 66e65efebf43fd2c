"""The two-shot sum through peer memory. Rows may be cut into column parts, so that few still occupy the whole chip.

A whole row is normalised by its owner before it is sent. All programs of a row that is cut must know its sum of
squares. It travels with the row: the owner sends sums that are rounded but not yet normalised, and with every part that
part's sum of squares; who receives them adds those up, in order, and normalises. That costs no wait of its own, and
lets all ranks, owner included, normalise by the same code, so that their bits are equal. Every part of a row needs all
of its sums of squares and cleans what it reads: they are sent once for each reader.
"""

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.parallel.peer.kernels import (
    begin_call,
    end_call,
    finished_row,
    float_or_zeros,
    load_addend,
    receive,
    rounded,
)
from nanovllm.parallel.peer.memory import MAX_SPLIT

_SPLITS = tl.constexpr(MAX_SPLIT)
_SQUARES_SENTINEL = tl.constexpr(-(2**31))


@triton.jit
def _look(pointers, mask, squares, squares_mask, stop, SENTINEL: tl.constexpr):
    """Loads what `pointers` and `squares` point to (0 where not mask), and says whether some of it is missing; with
    `stop` nothing is. The sentinels are the smallest integers.

    Every warp reads `stop`, and the few squares, for itself and may see another state of them. Whether to look again is
    for the whole program: so what a warp saw enters its own elements of the tile, and the minimum is over all of them.
    """
    bits = tl.load(pointers, mask=mask, other=0, volatile=True)
    found = tl.load(squares, mask=squares_mask, other=0, volatile=True)
    some_missing = tl.min(tl.min(found, 1), 0) == _SQUARES_SENTINEL
    seen = tl.where(some_missing, tl.full(bits.shape, SENTINEL, bits.dtype), bits)
    seen = tl.where(stop != 0, tl.zeros(bits.shape, bits.dtype), seen)
    return bits, found, tl.min(tl.min(seen, 0).to(tl.int32), 0) == SENTINEL


@triton.jit
def _receive_both(pointers, mask, squares, squares_mask, abort, max_spins, SENTINEL: tl.constexpr):
    """The values at `pointers` and `squares` (0 where not mask) once all have arrived; their slots are clean again."""
    bits, found, missing = _look(pointers, mask, squares, squares_mask, 0, SENTINEL)
    spins = 0
    while missing:
        stop = tl.load(abort, volatile=True)
        bits, found, missing = _look(pointers, mask, squares, squares_mask, stop, SENTINEL)
        spins += 1
        if spins >= max_spins:
            tl.store(abort, 2)
    tl.store(pointers, tl.full(bits.shape, SENTINEL, bits.dtype), mask=mask)
    tl.store(squares, tl.full(found.shape, _SQUARES_SENTINEL, tl.int32), mask=squares_mask)
    return bits, found


@triton.jit
def _item(item, first_row, WORLD: tl.constexpr, SPLIT: tl.constexpr, HIDDEN: tl.constexpr):
    """unit, its row `first_row` (a number, or a vector of them), where that row's part begins, and which part it is."""
    unit = item // SPLIT
    part = item % SPLIT
    row = unit * WORLD + first_row
    return unit, row, row.to(tl.int64) * HIDDEN + part * (HIDDEN // SPLIT), part


@triton.jit
def _sum_item(item, rank, rows, residual, residual_out, weight, out, own, theirs, scatter_half, gather_half,
              squares_half, abort, eps, max_spins, WORLD: tl.constexpr, WORLD_BLOCK: tl.constexpr,
              UNITS: tl.constexpr, HIDDEN: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
              RESIDUAL: tl.constexpr, NORM: tl.constexpr, ROUND_SUMS: tl.constexpr, INT: tl.constexpr,
              SENTINEL: tl.constexpr):  # fmt: skip
    """Computes this rank's part of an item, if the row is there: waits for all ranks' addends, then sends a whole row's
    result to the others, or a part's sum to all and, once for each reader, its sum of squares."""
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN // SPLIT
    source = tl.arange(0, WORLD_BLOCK)
    is_rank = source < WORLD
    tile_mask = is_rank[:, None] & mask[None, :]
    unit, row, at, part = _item(item, rank, WORLD, SPLIT, HIDDEN)
    if row < rows:
        gain = float_or_zeros(weight + cols, mask, NORM and SPLIT == 1)
        kept_before = float_or_zeros(residual + at + cols, mask, RESIDUAL)
        place = own + scatter_half + unit.to(tl.int64) * HIDDEN + part * (HIDDEN // SPLIT)
        tile = place + (source * UNITS * HIDDEN)[:, None] + cols[None, :]
        arrived = receive(tile, tile_mask, abort, max_spins, SENTINEL)
        if SPLIT == 1:
            result = finished_row(arrived, kept_before, gain, at + cols, residual_out, mask, eps, HIDDEN, NORM,
                                  ROUND_SUMS, INT, SENTINEL)  # fmt: skip
            tl.store(out + at + cols, result.to(out.dtype.element_ty, bitcast=True), mask=mask)
            to = tile_mask & (source < WORLD - 1)[:, None]  # this rank comes last
        else:
            total = tl.sum(arrived.to(out.dtype.element_ty, bitcast=True).to(tl.float32), 0) + kept_before
            result = rounded(total, out, INT, SENTINEL)
            to = tile_mask
            x = result.to(out.dtype.element_ty, bitcast=True)
            tl.store(residual_out + at + cols, x, mask=mask)
            x32 = x.to(tl.float32)
            square = tl.sum(x32 * x32, 0).to(tl.int32, bitcast=True)  # at least +0.0: never the sentinel
            place = squares_half + (row.to(tl.int64) * _SPLITS + part) * _SPLITS
            reader = tl.arange(0, SPLIT)
            tl.store(theirs.to(tl.pointer_type(tl.int32), bitcast=True) + (place + reader)[None, :],
                     square, mask=is_rank[:, None])  # fmt: skip
        tl.store(theirs + (gather_half + at + cols)[None, :], tl.broadcast_to(result[None, :], to.shape), mask=to)


@triton.jit
def _take_item(item, rank, rows, weight, out, own, gather_half, squares_half, abort, eps, max_spins,
               WORLD: tl.constexpr, WORLD_BLOCK: tl.constexpr, HIDDEN: tl.constexpr, SPLIT: tl.constexpr,
               BLOCK: tl.constexpr, SENTINEL: tl.constexpr):  # fmt: skip
    """An item into `out`: the others' results, or all ranks' sums, once they and their sums of squares have arrived,
    normalised."""
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN // SPLIT
    source = tl.arange(0, WORLD_BLOCK)
    _, row, at, part = _item(item, source, WORLD, SPLIT, HIDDEN)
    exists = (source < WORLD) & (row < rows) & ((source != rank) | (SPLIT > 1))
    exists_tile = exists[:, None] & mask[None, :]
    at = at[:, None] + cols[None, :]
    tile = own + gather_half + at
    if SPLIT == 1:
        bits = receive(tile, exists_tile, abort, max_spins, SENTINEL)
        result = bits.to(out.dtype.element_ty, bitcast=True)
    else:
        gain = tl.load(weight + part * (HIDDEN // SPLIT) + cols, mask=mask, other=0.0).to(tl.float32)
        reader = tl.arange(0, SPLIT)
        own_squares = own.to(tl.pointer_type(tl.int32), bitcast=True) + squares_half
        # the transpose, so that looking reduces over what a thread has of it
        small = own_squares + (row.to(tl.int64) * (_SPLITS * _SPLITS) + part)[None, :] + (reader * _SPLITS)[:, None]
        small_mask = exists[None, :] & (reader < SPLIT)[:, None]
        bits, found = _receive_both(tile, exists_tile, small, small_mask, abort, max_spins, SENTINEL)
        total = bits.to(out.dtype.element_ty, bitcast=True).to(tl.float32)
        scale = tl.math.rsqrt(tl.sum(found.to(tl.float32, bitcast=True), 0) / HIDDEN + eps)
        normed = (total * scale[:, None]).to(out.dtype.element_ty)
        result = (normed.to(tl.float32) * gain[None, :]).to(out.dtype.element_ty)
    tl.store(out + at, result, mask=exists_tile)


@triton.jit(do_not_specialize=["rows", "rank", "max_spins"])
def two_shot_kernel(partial, residual, residual_out, weight, out, peers, parity_state, abort, rows, rank, eps,
                    max_spins, scatter, gather, squares, WORLD: tl.constexpr, WORLD_BLOCK: tl.constexpr,
                    UNITS: tl.constexpr, HIDDEN: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
                    RESIDUAL: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, ROUND_SUMS: tl.constexpr,
                    INT: tl.constexpr, SENTINEL: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Row unit * WORLD + r is summed by rank r and sent to everyone. Item unit * SPLIT + s is part s of a unit's rows,
    the columns from s * (HIDDEN // SPLIT) on; program p takes items p, p + programs, ...

    Operands as in one_shot_kernel, but `residual_out` is written at this rank's own rows only, and rows that are cut
    have a NORM and no ROUND_SUMS. Places: scatter + [2, WORLD (source), UNITS, HIDDEN], gather + [2, UNITS * WORLD,
    HIDDEN]; squares (an offset in int32) + [2, UNITS * WORLD, _SPLITS (part), _SPLITS (reader)] float32.
    The argument of all_reduce.py holds: a rank that has finished item 0 has row 0's part, made from all ranks' data.
    Programs also wait for others of the same row, but send all that does not depend on a wait before their first.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN // SPLIT
    source = tl.arange(0, WORLD_BLOCK)
    is_rank = source < WORLD
    to = (rank + 1 + source) % WORLD  # each rank starts with another peer, so that no link is crowded
    blocks = tl.load(peers + to, mask=is_rank, other=0)  # never written after the start, so read before any wait
    own_block = tl.load(peers + rank)
    theirs = tl.multiple_of(blocks.to(tl.pointer_type(INT), bitcast=True), 16)[:, None]
    own = tl.multiple_of(own_block.to(tl.pointer_type(INT)), 16)
    tile_mask = is_rank[:, None] & mask[None, :]
    parity = begin_call(parity_state, PDL)
    half = parity.to(tl.int64) * (WORLD * UNITS * HIDDEN)
    items = (rows + WORLD - 1) // WORLD * SPLIT
    item = pid
    while item < items:
        unit, row, at, part = _item(item, to, WORLD, SPLIT, HIDDEN)
        exists = tile_mask & (row < rows)[:, None]
        bits = load_addend(partial, at[:, None] + cols[None, :], rows, exists, out, PARTS, HIDDEN, INT, SENTINEL,
                           ROUND_SUMS)  # fmt: skip
        place = scatter + half + (rank * UNITS + unit).to(tl.int64) * HIDDEN + part * (HIDDEN // SPLIT)
        tl.store(theirs + (place + cols)[None, :], bits, mask=exists)
        item += programs
    scatter_half, gather_half = scatter + half, gather + half
    squares_half = squares + parity.to(tl.int64) * (WORLD * UNITS * _SPLITS * _SPLITS)
    item = pid
    while item < items:
        _sum_item(item, rank, rows, residual, residual_out, weight, out, own, theirs, scatter_half, gather_half,
                  squares_half, abort, eps, max_spins, WORLD, WORLD_BLOCK, UNITS, HIDDEN, SPLIT, BLOCK, RESIDUAL, NORM,
                  ROUND_SUMS, INT, SENTINEL)  # fmt: skip
        item += programs
    item = pid
    while item < items:
        _take_item(item, rank, rows, weight, out, own, gather_half, squares_half, abort, eps, max_spins, WORLD,
                   WORLD_BLOCK, HIDDEN, SPLIT, BLOCK, SENTINEL)  # fmt: skip
        item += programs
    end_call(parity_state, parity)
