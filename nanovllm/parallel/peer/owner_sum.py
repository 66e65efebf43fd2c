"""The kernels of a sum whose rows are moved by copies (parallel/peer/copy_engine.py).

Rounding is that of `all_reduce.py`. Flags and rows are written by other GPUs while a kernel waits: flags are
polled by volatile loads and then read once more with acquire semantics, and rows come from the L2 cache, where those
writes arrive. A wait looks at `abort` of the local device memory each time round, and is bounded by `max_spins`.
"""

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.parallel.peer.kernels import float_or_zeros


@triton.jit
def _await_flags(flags, epoch, abort, rank, max_spins, WORLD: tl.constexpr, WORLD_BLOCK: tl.constexpr):
    """Returns when the flags of all other ranks equal `epoch`. All warps leave the loop by what they read themselves:
    nothing in it may be a barrier for some and not for others."""
    source = tl.arange(0, WORLD_BLOCK)
    others = (source < WORLD) & (source != rank)
    missing = 1
    spins = 0
    while missing > 0:
        stop = tl.load(abort + tl.zeros_like(source), volatile=True)
        seen = tl.load(flags + source, mask=others, other=0, volatile=True)
        missing = tl.max(tl.where(others & (seen != epoch) & (stop == 0), 1, 0))
        spins += 1
        if spins >= max_spins:
            tl.store(abort, 2)
    tl.atomic_add(flags + source, 0, mask=others, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rows", "rank", "max_spins"])
def sum_owned_rows_kernel(partial, inbox, residual, residual_out, weight, out, flags, epoch, abort, rows, rank, eps,
                          max_spins, CAPACITY: tl.constexpr, WORLD: tl.constexpr, WORLD_BLOCK: tl.constexpr,
                          HIDDEN: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr):  # fmt: skip
    """Waits for the other ranks' rows, then computes the sums and norms of rows p, p + programs, ...

    partial, residual, residual_out, out [rows, HIDDEN]; inbox [WORLD, CAPACITY, HIDDEN], where this rank's own part is
    not used: its addend is `partial`. flags int32 [WORLD], awaited at the value of epoch int32 [1].
    """
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    _await_flags(flags, tl.load(epoch), abort, rank, max_spins, WORLD, WORLD_BLOCK)
    row = tl.program_id(0)
    while row < rows:
        at = row.to(tl.int64) * HIDDEN + cols
        kept = float_or_zeros(residual + at, mask, RESIDUAL)
        total = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(WORLD):
            addend = tl.where(rank == source, partial, inbox + source * CAPACITY * HIDDEN)
            total += tl.load(addend + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        x = (total + kept).to(out.dtype.element_ty)
        tl.store(residual_out + at, x, mask=mask)
        x32 = x.to(tl.float32)
        normed = (x32 * tl.math.rsqrt(tl.sum(x32 * x32, 0) / HIDDEN + eps)).to(out.dtype.element_ty)
        tl.store(out + at, (normed.to(tl.float32) * gain).to(out.dtype.element_ty), mask=mask)
        row += tl.num_programs(0)


@triton.jit(do_not_specialize=["rank", "max_spins"])
def await_rows_kernel(flags, epoch, abort, rank, max_spins, WORLD: tl.constexpr, WORLD_BLOCK: tl.constexpr):
    """One program: waits until flags int32 [WORLD] of the other ranks equal epoch int32 [1], which then goes on by one:
    the call is over."""
    now = tl.load(epoch)
    _await_flags(flags, now, abort, rank, max_spins, WORLD, WORLD_BLOCK)
    tl.store(epoch, now + 1)
