"""All-reduce + residual + RMSNorm whose rows travel by the GPUs' copy engines, in a stream of its own beside the other
half's work.

Of R rows, rank r of W owns the block of ceil(R / W) that begins at r * ceil(R / W). Each rank sends the others theirs,
sums its own in one kernel, and sends the finished rows to all. Flags order the ranks and events the two streams, so a
CUDA graph holds it all. docs/peer-memory.md shows the steps and why one inbox, one `gathered` and one flag of each kind
suffice for a half of a step.

Rounding is that of all_reduce.py. Flags and rows are written by other GPUs while a kernel waits: flags are polled by
volatile loads and then read once more with acquire semantics, and rows come from the L2 cache, where those writes
arrive. After an abort (parallel/peer/memory.py) every wait ends at once, and all later results are garbage.
"""

from collections.abc import Callable, Iterator

import torch

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.pointwise.norm import Norm
from nanovllm.parallel.peer.all_reduce import MAX_SPINS, num_warps
from nanovllm.parallel.peer.kernels import float_or_zeros, normalised
from nanovllm.parallel.peer.memory import PeerMemory


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
        normed = normalised(x, gain, eps, HIDDEN)
        tl.store(out + at, normed.to(out.dtype.element_ty), mask=mask)
        row += tl.num_programs(0)


@triton.jit(do_not_specialize=["rank", "max_spins"])
def await_rows_kernel(flags, epoch, abort, rank, max_spins, WORLD: tl.constexpr, WORLD_BLOCK: tl.constexpr):
    """One program: waits until flags int32 [WORLD] of the other ranks equal epoch int32 [1], which then goes on by one:
    the call is over."""
    now = tl.load(epoch)
    _await_flags(flags, now, abort, rank, max_spins, WORLD, WORLD_BLOCK)
    tl.store(epoch, now + 1)


def owned_rows(rows: int, world_size: int) -> list[slice]:
    """Every rank's block of `rows` rows; empty where nothing is left for it."""
    units = -(-rows // world_size)
    return [slice(min(rank * units, rows), min((rank + 1) * units, rows)) for rank in range(world_size)]


class CopyEngineSums:
    """The sums of one rank, in a side stream.

    Order: the side stream waits for what the main stream has launched before each sum, and the main stream for each
    sum before the step ends. So sums follow one another in one order, the same on all ranks. In a capture these events
    are edges of the graph, and the side stream is part of it from the first wait to the last.

    Memory: all of it is allocated by the main stream. So the allocator hands a freed block to the main stream alone,
    and takes for granted that this stream's order keeps old and new use apart. It does: what a sum reads and writes is
    held by the function that waits for it, so it is freed after the main stream has waited, and the block's next use
    comes after that wait. The other way round, a sum that writes a block which the main stream had freed waits for
    everything that was launched there before. All this is about the order of launches, so it holds in the pool of a
    graph as well (where record_stream would keep every block until the capture ends).
    """

    programs = 128
    """Programs of sum_owned_rows_kernel; any number is right."""

    max_spins = MAX_SPINS
    """Looks of a wait before it gives up and sets the abort word to 2."""

    def __init__(self, memory: PeerMemory) -> None:
        self.memory = memory
        layout, block = memory.layout, memory.block
        self.max_rows = layout.half_rows
        """Rows that one half holds."""
        self.enabled = True
        """False: nothing is sent, in a dry run, which rank 0 makes alone."""
        self._inbox, self._gathered, self._flags = (
            layout.regions[name].of(block) for name in ("inbox", "gathered", "flags")
        )
        self._epochs = torch.ones(2, self._flags.shape[-1], dtype=torch.int32, device=block.device)[:, :1]
        self._shape = {"WORLD": layout.world_size, "WORLD_BLOCK": triton.next_power_of_2(layout.world_size)}
        self._stream: torch.cuda.Stream | None = None
        if block.is_cuda:  # its kernel goes first where it and a GEMM wait for a multiprocessor
            self._stream = torch.cuda.Stream(block.device, priority=-1)

    def start(
        self, half: int, partial: torch.Tensor, residual: torch.Tensor | None, norm: Norm
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Begins the sum of half 0 or 1, partial [R, hidden], beside what the current stream does next. residual [rows
        that this rank owns, hidden] is updated in place; None: zeros. All contiguous, and not to be touched until the
        sum is waited for.

        Returns what has the current stream wait for it (the host does not), to be called once: -> (normalised rows
        [R, hidden], which are in this rank's block until the next call for this half; residual)."""
        layout, rows = self.memory.layout, partial.shape[0]
        if rows > self.max_rows or not partial.is_contiguous() or partial.dtype != layout.dtype:
            raise ValueError(f"half a step: {partial.dtype} {tuple(partial.shape)}: the block is laid out for {layout}")
        own = owned_rows(rows, layout.world_size)[self.memory.rank]
        kept = torch.empty_like(partial[own]) if residual is None else residual
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._sum(half, partial, residual, kept, norm)
        done = None if self._stream is None else self._stream.record_event()

        def wait() -> tuple[torch.Tensor, torch.Tensor]:
            if done is not None:
                torch.cuda.current_stream().wait_event(done)
            return self._await(half, partial), kept

        return wait

    def _sum(
        self, half: int, partial: torch.Tensor, residual: torch.Tensor | None, kept: torch.Tensor, norm: Norm
    ) -> None:
        """Sends the others their rows, sums this rank's own and sends the result to all, in the current stream. The
        residual's new rows go to `kept`."""
        memory, layout, rank = self.memory, self.memory.layout, self.memory.rank
        blocks = owned_rows(partial.shape[0], layout.world_size)
        own, out = partial[blocks[rank]], self._gathered[half, blocks[rank]]
        for peer in self._peers():
            self._send(peer, partial[blocks[peer]], self._inbox[half, rank], half, 0)
        block = triton.next_power_of_2(layout.hidden_size)
        sum_owned_rows_kernel[(max(1, min(len(own), self.programs)),)](
            own, self._inbox[half], kept if residual is None else residual, kept, norm.weight, out,
            self._flags[half, 0], self._epochs[half], memory.abort_word, len(own), rank, norm.eps, self.max_spins,
            CAPACITY=layout.half_units, HIDDEN=layout.hidden_size, BLOCK=block, RESIDUAL=residual is not None,
            num_warps=num_warps(block), **self._shape,
        )  # fmt: skip
        for peer in self._peers():
            self._send(peer, out, out, half, 1)

    def _await(self, half: int, partial: torch.Tensor) -> torch.Tensor:
        """The half's normalised rows, for which the current stream waits."""
        flags, epoch, memory = self._flags[half, 1], self._epochs[half], self.memory
        await_rows_kernel[(1,)](
            flags, epoch, memory.abort_word, memory.rank, self.max_spins, num_warps=1, **self._shape
        )
        return self._gathered[half, : partial.shape[0]]

    def _peers(self) -> Iterator[int]:
        """The other ranks; each rank starts with another one, so that no link is crowded."""
        world = self.memory.layout.world_size
        return ((self.memory.rank + step) % world for step in range(1, world))

    def _send(self, peer: int, rows: torch.Tensor, place: torch.Tensor, half: int, kind: int) -> None:
        """Copies rows to `place` in the peer's block, then the epoch to its flag of that half and kind."""
        if self.enabled:
            if len(rows):
                self.memory.send(peer, rows, place)
            self.memory.send(peer, self._epochs[half], self._flags[half, kind, self.memory.rank])
