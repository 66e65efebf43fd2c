"""Sums over the ranks whose bytes are moved by the GPUs' copy engines: while products run, they take no multiprocessor.

The rows of half a step are summed by their owners: of R rows, rank r of W owns the block of ceil(R / W) that begins at
r * ceil(R / W), as far as there are rows. In a stream of its own each rank

    1. copies every other rank's block of its partial rows into that rank's inbox, and its epoch into the flag there;
    2. runs one kernel, which waits for the flags of all, adds up this rank's block, adds the residual (kept by owners
       alone), rounds once, and writes the normalised rows into its own `gathered`;
    3. copies these into `gathered` of every other rank, and its epoch into the second flag there;

and in the main stream, when the rows are needed, one program waits for everyone's second flags and advances the epoch.
`gathered` itself, memory that the peers map, is what the products read.

Flags. Copies of a stream run one after another, so whoever sees a flag finds the rows that were sent before it. A flag
equals the receiver's epoch when the rows of this very call are there. It never runs ahead, by the argument below; so
equality is enough, and the int32 epoch may wrap around. Epochs are words of device memory, one for each half, that
begin at 1 (flags at 0) and are read and advanced by the device alone: graphs may be replayed in any order, mixed with
eager steps, the same on all ranks.

Why one inbox, one `gathered` and one flag of each kind suffice for a half. Let call k be a half's k-th, whatever step
and layer it belongs to. On each rank, in this order: the main stream launches what call k sums; 1, 2, 3 of k, behind it
(`Overlap.fork`); the wait of k, in the main stream and behind 3 (`UnderWay.wait`); what reads gathered(k); what call
k + 1 sums. Within a layer the last two are products that need each other; at the end of a step the rows are copied
out of `gathered`, and the next step's call comes after that in the main stream. Hence, of two ranks P and Q:

- P writes inbox and first flag of Q for k + 1 after its own wait of k, so after Q's second flag of k, which Q sent
  after its kernel of k had ended: it has read the inbox and no longer looks at the flag.
- P writes `gathered` and second flag of Q for k + 1 after its kernel of k + 1, so after Q's first flag of k + 1, which
  Q sent after its wait of k and after everything that its main stream had launched by then: what read gathered(k) is
  done. Q's own kernel of k + 1, which writes gathered too, comes behind the same.
- P changes its own epoch in the wait of k, behind 3 of k, the last copy that reads it.

All sums of one kind follow one another in the side stream, in the same order on all ranks, and a kernel of theirs waits
only for copies that stand before the same kernel in the streams of others: nobody waits in a circle, however many
multiprocessors a waiting kernel holds. Sums of other kinds use other memory, and may come in between.

After an abort (parallel/peer/memory.py) every wait ends at once, and everything that follows is garbage.
"""

from collections.abc import Iterator

import torch

from nanovllm.kernels.base.triton_import import triton
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
    """Of the kernel of step 2; any number is right."""

    def __init__(self, memory: PeerMemory, max_spins: int = MAX_SPINS) -> None:
        self.memory, self.max_spins = memory, max_spins
        layout, block = memory.layout, memory.block
        world, hidden = layout.world_size, layout.hidden_size
        self._row_bytes = hidden * layout.itemsize
        self.max_rows = layout.half_rows
        """Of a half."""
        self.enabled = True
        """False: nothing is sent, in a rehearsal that other ranks know nothing of."""
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
        self,
        half: int,
        partial: torch.Tensor,
        residual: torch.Tensor | None,
        residual_out: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> None:
        """Steps 1 to 3 for half 0 or 1, in the current stream. partial [R, hidden]; residual, residual_out [rows that
        this rank owns, hidden], which may be one tensor; residual None: zeros. weight [hidden]. All contiguous."""
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
            partial[begin:end], self._inbox[half], residual_out if residual is None else residual, residual_out, weight,
            out, self._flags[half, 0], self._epochs[half], memory.abort_word, end - begin, memory.rank, eps,
            self.max_spins, CAPACITY=layout.half_units, HIDDEN=layout.hidden_size, BLOCK=block,
            RESIDUAL=residual is not None, num_warps=num_warps(block), **self._shape,
        )  # fmt: skip
        gathered = layout.gathered + (half * layout.half_rows + begin) * self._row_bytes
        for peer in self._peers():
            self._send(peer, gathered, out, half, 1)

    def finish(self, half: int, rows: int) -> torch.Tensor:
        """Once for each `start`, behind it: waits, in the current stream, for the normalised rows [rows, hidden]. They
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
        """rows to byte `offset` of the peer's block, and behind them the epoch to its flag of that half and kind."""
        if not self.enabled:
            return
        if rows.shape[0]:
            self.memory.send(peer, offset, rows)
        flag = (half * 2 + kind) * FLAG_STRIDE + self.memory.rank
        self.memory.send(peer, self.memory.layout.flags + flag * 4, self._epochs[half])
