"""All-reduce + residual + RMSNorm whose rows travel by the GPUs' copy engines, beside the other half's work.

Of R rows, rank r of W owns the block of ceil(R / W) that begins at r * ceil(R / W). Each rank sends the others theirs,
sums its own in one kernel, and sends the finished rows to all. Flags order the ranks and events the two streams, so a
CUDA graph holds it all. docs/peer-memory.md shows the steps and why one inbox, one `gathered` and one flag of each kind
suffice for a half of a step.

After an abort (parallel/peer/memory.py) every wait ends at once, and all later results are garbage.
"""

from collections.abc import Iterator

import torch

from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.pointwise.norm import Norm
from nanovllm.parallel.peer.all_reduce import MAX_SPINS, num_warps
from nanovllm.parallel.peer.memory import FLAG_STRIDE, PeerMemory
from nanovllm.parallel.peer.owner_sum import await_rows_kernel, sum_owned_rows_kernel

Owned = tuple[int, int]
"""First row of a rank's block, and the one after its last; equal where nothing is left for it."""


def owned_rows(rows: int, world_size: int) -> list[Owned]:
    """Every rank's block of `rows` rows."""
    units = -(-rows // world_size)
    return [(min(rank * units, rows), min((rank + 1) * units, rows)) for rank in range(world_size)]


class CopyEngineSums:
    """The sums of one rank. `max_spins`: rounds of a wait before it gives up and sets the abort word to 2."""

    programs = 128
    """Programs of the kernel of step 2; any number is right."""

    def __init__(self, memory: PeerMemory, max_spins: int = MAX_SPINS) -> None:
        self.memory, self.max_spins = memory, max_spins
        layout, block = memory.layout, memory.block
        world, hidden = layout.world_size, layout.hidden_size
        self._row_bytes = hidden * layout.itemsize
        self.max_rows = layout.half_rows
        """Rows that one half holds."""
        self.enabled = True
        """False: nothing is sent, in a dry run, which rank 0 makes alone."""
        rows = block[layout.inbox : layout.inbox + 2 * world * layout.half_units * self._row_bytes]
        self._inbox = rows.view(memory.dtype).view(2, world, layout.half_units, hidden)
        rows = block[layout.gathered : layout.gathered + 2 * layout.half_rows * self._row_bytes]
        self._gathered = rows.view(memory.dtype).view(2, layout.half_rows, hidden)
        flags = block[layout.flags : layout.flags + 2 * 2 * FLAG_STRIDE * 4]
        self._flags = flags.view(torch.int32).view(2, 2, FLAG_STRIDE)
        self._epochs = torch.ones(2, FLAG_STRIDE, dtype=torch.int32, device=block.device)[:, :1]
        self._shape = {"WORLD": world, "WORLD_BLOCK": triton.next_power_of_2(world)}

    def empty_residual(self, partial: torch.Tensor) -> torch.Tensor:
        """Memory for the residual rows that this rank owns of partial [R, hidden]: [rows, hidden]."""
        begin, end = owned_rows(partial.shape[0], self.memory.world_size)[self.memory.rank]
        return torch.empty_like(partial[begin:end])

    def start(
        self, half: int, partial: torch.Tensor, residual: torch.Tensor | None, residual_out: torch.Tensor, norm: Norm
    ) -> None:
        """Steps 1 to 3 for half 0 or 1, in the current stream. partial [R, hidden]; residual, residual_out [rows that
        this rank owns, hidden], which may be one tensor; residual None: zeros. All contiguous."""
        memory, layout, rows = self.memory, self.memory.layout, partial.shape[0]
        if rows > self.max_rows or not partial.is_contiguous() or partial.dtype != memory.dtype:
            raise ValueError(f"half a step: {partial.dtype} {tuple(partial.shape)}: the block is laid out for {layout}")
        blocks = owned_rows(rows, memory.world_size)
        begin, end = blocks[memory.rank]
        inbox = layout.inbox + (half * memory.world_size + memory.rank) * layout.half_units * self._row_bytes
        for peer in self._peers():
            self._send(peer, inbox, partial[slice(*blocks[peer])], half, 0)
        out = self._gathered[half, begin:end]
        block = triton.next_power_of_2(layout.hidden_size)
        sum_owned_rows_kernel[(max(1, min(end - begin, self.programs)),)](
            partial[begin:end], self._inbox[half], residual_out if residual is None else residual, residual_out,
            norm.weight, out, self._flags[half, 0], self._epochs[half], memory.abort_word, end - begin, memory.rank,
            norm.eps, self.max_spins, CAPACITY=layout.half_units, HIDDEN=layout.hidden_size, BLOCK=block,
            RESIDUAL=residual is not None, num_warps=num_warps(block), **self._shape,
        )  # fmt: skip
        gathered = layout.gathered + (half * layout.half_rows + begin) * self._row_bytes
        for peer in self._peers():
            self._send(peer, gathered, out, half, 1)

    def finish(self, half: int, rows: int) -> torch.Tensor:
        """Once after each `start`: waits, in the current stream, for the normalised rows [rows, hidden]. They
        are in this rank's block until the next call for this half."""
        memory = self.memory
        flags, epoch = self._flags[half, 1], self._epochs[half]
        await_rows_kernel[(1,)](
            flags, epoch, memory.abort_word, memory.rank, self.max_spins, num_warps=1, **self._shape
        )
        return self._gathered[half, :rows]

    def _peers(self) -> Iterator[int]:
        """The other ranks; each rank starts with another one, so that no link is crowded."""
        for step in range(1, self.memory.world_size):
            yield (self.memory.rank + step) % self.memory.world_size

    def _send(self, peer: int, offset: int, rows: torch.Tensor, half: int, kind: int) -> None:
        """Copies rows to byte `offset` of the peer's block, then the epoch to its flag of that half and kind."""
        if not self.enabled:
            return
        if rows.shape[0]:
            self.memory.send(peer, offset, rows)
        flag = (half * 2 + kind) * FLAG_STRIDE + self.memory.rank
        self.memory.send(peer, self.memory.layout.flags + flag * 4, self._epochs[half])
