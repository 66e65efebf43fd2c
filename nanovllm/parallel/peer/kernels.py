"""The Triton kernels of the sums through peer memory; all_reduce.py launches them, and says why they are right."""

from nanovllm.kernels.base.device import start_early
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.quantize import store_rounded
from nanovllm.kernels.pointwise.norm import in_pairs, sum_in_pairs
from nanovllm.parallel.peer.memory import MAX_PROGRAMS

_PARITIES = tl.constexpr(MAX_PROGRAMS)


@triton.jit
def _peer_pointer(peers, rank, offset, INT: tl.constexpr):
    """Pointer to element `offset` of `rank`'s block; blocks and regions are 16-byte aligned."""
    base = tl.load(peers + rank).to(tl.pointer_type(INT))
    return tl.multiple_of(base, 16) + offset


@triton.jit
def begin_call(parity_state, PDL: tl.constexpr):
    """The parity of this call. With PDL the next kernel is let in here, once all programs of this one are resident, so
    it cannot keep one of them out whose peers wait for it."""
    start_early(PDL)
    return tl.load(parity_state + tl.program_id(0))


@triton.jit
def end_call(parity_state, parity):
    """The end of a call: entries pid, pid + programs, ... of `parity_state` become the other parity."""
    entry = tl.arange(0, _PARITIES)
    mine = entry % tl.num_programs(0) == tl.program_id(0)
    tl.store(parity_state + entry, tl.zeros(entry.shape, tl.int32) + (1 - parity), mask=mine)


@triton.jit
def _without_sentinel(bits, SENTINEL: tl.constexpr, SUBSTITUTE: tl.constexpr):
    """Bits that may be sent: the sentinel itself becomes its equal (+0.0; for keys the next larger integer)."""
    return tl.where(bits == SENTINEL, tl.full(bits.shape, SUBSTITUTE, bits.dtype), bits)


@triton.jit
def receive(pointers, mask, abort, max_spins, SENTINEL: tl.constexpr):
    """The values at `pointers` (where mask; 0 elsewhere) once all have arrived; their slots are clean again."""
    bits = tl.load(pointers, mask=mask, other=0, volatile=True)
    missing = tl.max(tl.where(bits == SENTINEL, 1, 0))
    spins = 0
    while missing > 0:
        stop = tl.load(abort, volatile=True)  # every warp for itself: so it enters the maximum over all of them
        bits = tl.load(pointers, mask=mask, other=0, volatile=True)
        missing = tl.max(tl.where((bits == SENTINEL) & (stop == 0), 1, 0))
        spins += 1
        if spins >= max_spins:
            tl.store(abort, 2)
    tl.store(pointers, tl.full(bits.shape, SENTINEL, bits.dtype), mask=mask)
    return bits


@triton.jit
def rounded(x, out, INT: tl.constexpr, SENTINEL: tl.constexpr):
    """x float32 -> the bits of `out`'s dtype, free of the sentinel, so that sender and receivers hold the same."""
    return _without_sentinel(x.to(out.dtype.element_ty).to(INT, bitcast=True), SENTINEL, 0)


@triton.jit
def load_addend(partial, at, rows, mask, out, PARTS: tl.constexpr, HIDDEN: tl.constexpr, INT: tl.constexpr,
            SENTINEL: tl.constexpr, ROUND_SUMS: tl.constexpr = False):  # fmt: skip
    """Bits that this rank sends of the elements `at`: those of `partial`; if that has several parts their sum, with
    ROUND_SUMS each sum of two rounded."""
    if PARTS == 1:
        return _without_sentinel(tl.load(partial + at, mask=mask, other=0), SENTINEL, 0)
    else:
        parts = ()
        for part in tl.static_range(PARTS):
            addend = tl.load(partial + part * (rows.to(tl.int64) * HIDDEN) + at, mask=mask, other=0.0)
            parts = parts + (addend.to(tl.float32),)
        return rounded(in_pairs(parts, out.dtype.element_ty if ROUND_SUMS else tl.float32), out, INT, SENTINEL)


@triton.jit
def _sum_by_tree(addends, dtype: tl.constexpr):
    """Float32 addends [a power of two, BLOCK] -> their sum [BLOCK], in pairs, that of each two rounded to dtype."""
    for _ in tl.static_range(3):
        if addends.shape[0] > 1:
            pairs = tl.reshape(addends, [addends.shape[0] // 2, 2, addends.shape[1]])
            addends = tl.sum(pairs, 1).to(dtype).to(tl.float32)
    return tl.sum(addends, 0)


@triton.jit
def normalised(x, gain, eps, HIDDEN: tl.constexpr, IN_PAIRS: tl.constexpr = False):
    """RMSNorm of one row x [BLOCK], of the model's dtype, with its gain: float32. IN_PAIRS: with norm.py's order of the
    squares."""
    x32 = x.to(tl.float32)
    squares = sum_in_pairs(x32 * x32) if IN_PAIRS else tl.sum(x32 * x32, 0)
    return (x32 * tl.math.rsqrt(squares / HIDDEN + eps)).to(x.dtype).to(tl.float32) * gain


@triton.jit
def finished_row(arrived, kept_before, gain, at, residual_out, mask, eps, HIDDEN: tl.constexpr, NORM: tl.constexpr,
                 ROUND_SUMS: tl.constexpr, INT: tl.constexpr, SENTINEL: tl.constexpr):  # fmt: skip
    """arrived INT [sources, BLOCK]: one row of every rank. Sums, adds the residual, stores that at `at` of
    residual_out, normalises; returns the bits. Without NORM those of the sum itself, and nothing is stored. ROUND_SUMS:
    with the bits of norm.py."""
    dtype: tl.constexpr = residual_out.dtype.element_ty
    addends = arrived.to(dtype, bitcast=True).to(tl.float32)
    total = _sum_by_tree(addends, dtype) if ROUND_SUMS else tl.sum(addends, 0)
    result = rounded(total + kept_before, residual_out, INT, SENTINEL)
    if NORM:
        x = result.to(dtype, bitcast=True)
        tl.store(residual_out + at, x, mask=mask)
        result = rounded(normalised(x, gain, eps, HIDDEN, ROUND_SUMS), residual_out, INT, SENTINEL)
    return result


@triton.jit
def float_or_zeros(pointers, mask, WANTED: tl.constexpr):
    """The values at `pointers` as float32, asked for before a wait so that its latency is hidden; or zeros."""
    if WANTED:
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.zeros(mask.shape, tl.float32)


@triton.jit(do_not_specialize=["rows", "rank", "max_spins", "scale_stride"])
def one_shot_kernel(partial, residual, residual_out, weight, out, peers, parity_state, abort, rows, rank, eps,
                    max_spins, SCALES, scale_stride, WORLD: tl.constexpr, WORLD_BLOCK: tl.constexpr,
                    CAPACITY: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
                    NORM: tl.constexpr, PARTS: tl.constexpr, ROUND_SUMS: tl.constexpr, INT: tl.constexpr,
                    SENTINEL: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Every rank sends its rows to all ranks (itself too, which keeps the code one) and sums all that arrive.

    partial INT [rows, HIDDEN] (the bits of the model's dtype), or float32 or with ROUND_SUMS that dtype [PARTS, rows,
    HIDDEN], which are added up and rounded before they are sent. residual, residual_out, out [rows, HIDDEN]; weight
    [HIDDEN]; without NORM out is the sum, and residual_out and weight are not touched. Places: [2, WORLD (source),
    CAPACITY, HIDDEN], where the block begins. Program p takes rows p, p + programs, ... Where there are SCALES [groups,
    scale_stride], out is rounded to e4m3 (kernels/fp8/).
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    blocks = ()  # never written after the start, so read before any wait
    for step in tl.static_range(WORLD):  # each rank starts with another peer, so that no link is crowded
        blocks = blocks + (_peer_pointer(peers, (rank + 1 + step) % WORLD, 0, INT),)
    parity = begin_call(parity_state, PDL)
    half = parity.to(tl.int64) * (WORLD * CAPACITY * HIDDEN)
    row = pid
    while row < rows:
        at = row.to(tl.int64) * HIDDEN + cols
        bits = load_addend(partial, at, rows, mask, residual_out, PARTS, HIDDEN, INT, SENTINEL, ROUND_SUMS)
        place = half + (rank * CAPACITY + row).to(tl.int64) * HIDDEN
        for step in tl.static_range(WORLD):
            tl.store(blocks[step] + place + cols, bits, mask=mask)
        row += programs
    gain = float_or_zeros(weight + cols, mask, NORM)  # before a wait, which hides its latency
    source = tl.arange(0, WORLD_BLOCK)
    tile = (source * CAPACITY * HIDDEN)[:, None] + cols[None, :]
    tile_mask = (source < WORLD)[:, None] & mask[None, :]
    row = pid
    while row < rows:
        at = row.to(tl.int64) * HIDDEN
        kept = float_or_zeros(residual + at + cols, mask, RESIDUAL)
        arrived = receive(blocks[WORLD - 1] + half + at + tile, tile_mask, abort, max_spins, SENTINEL)
        bits = finished_row(arrived, kept, gain, at + cols, residual_out, mask, eps, HIDDEN, NORM, ROUND_SUMS, INT,
                            SENTINEL)  # fmt: skip
        result = bits.to(residual_out.dtype.element_ty, bitcast=True)
        if SCALES is not None:
            result = tl.where(mask, result.to(tl.float32), 0.0)
            store_rounded(result, out, SCALES, row, 0, scale_stride, HIDDEN, BLOCK)
        else:
            tl.store(out + at + cols, result, mask=mask)
        row += programs
    end_call(parity_state, parity)


@triton.jit(do_not_specialize=["count", "rank", "max_spins"])
def max_keys_kernel(keys, peers, parity_state, abort, count, rank, max_spins, region, WORLD: tl.constexpr,
                    WORLD_BLOCK: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
                    SENTINEL: tl.constexpr):  # fmt: skip
    """keys int64 [count] becomes its maximum over the ranks. Places: region + [2, WORLD (source), CAPACITY] int64.
    SENTINEL, the smallest int64, is sent as the one above it. Program p takes keys p * BLOCK ..."""
    pid = tl.program_id(0)
    at = pid * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    parity = tl.load(parity_state + pid)
    half = region + parity.to(tl.int64) * (WORLD * CAPACITY)
    mine = _without_sentinel(tl.load(keys + at, mask=mask, other=0), SENTINEL, SENTINEL + 1)
    for step in tl.static_range(WORLD):
        to = (rank + 1 + step) % WORLD
        tl.store(_peer_pointer(peers, to, half + rank * CAPACITY, tl.int64) + at, mine, mask=mask)
    source = tl.arange(0, WORLD_BLOCK)
    tile_mask = (source < WORLD)[:, None] & mask[None, :]
    theirs = _peer_pointer(peers, rank, half, tl.int64) + (source * CAPACITY)[:, None] + at[None, :]
    arrived = receive(theirs, tile_mask, abort, max_spins, SENTINEL)
    best = tl.max(tl.where(tile_mask, arrived, tl.full(arrived.shape, SENTINEL, tl.int64)), 0)
    tl.store(keys + at, best, mask=mask)
    end_call(parity_state, parity)
