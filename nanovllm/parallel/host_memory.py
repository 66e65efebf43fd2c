"""Communication of ranks on a CPU, or on a GPU that they share: memory that all of them map, without a network."""

import mmap
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from nanovllm.processes.fence import Fence

SLOT = 1 << 20
"""Bytes of a rank's slot: longer tensors go in pieces."""
_LINE = 8
"""Words of a counter: a cache line of its own."""
_LOOKS, _YIELDS, _REST = 20, 200, 50e-6
"""Polling of the other ranks: polls without a pause, then polls that yield the core, then seconds of sleep between
polls."""


class HostMemory:
    """One rank's view. All ranks make the same calls, in the same order.

    A call puts its tensor into this rank's slot, counts one up, and waits until all have. There are two slots for each
    rank, used in turn: who has counted n + 1 has read what was put in at n, so slot n may be written again at n + 2.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        """`store`: where the ranks meet."""
        self._rank, self._count, self._is_aborted, self._fence = rank, 0, False, Fence()
        counters = mmap.PAGESIZE
        nbytes = counters + 2 * size * SLOT
        keys = [f"host memory of {each}" for each in range(size)]
        maker = size - 1  # not rank 0: a user's program that was root once has files that no other process may open
        if rank == maker:
            file = os.memfd_create("nanovllm-ranks")
            os.truncate(file, nbytes)
            store.set(keys[maker], f"/proc/{os.getpid()}/fd/{file}")
        else:
            file = os.open(store.get(keys[maker]).decode(), os.O_RDWR)
        try:
            memory = mmap.mmap(file, nbytes)
            if rank == maker:
                store.wait(keys)
            else:
                store.set(keys[rank], "mapped")
        finally:
            os.close(file)
        self._counters = memoryview(memory)[:counters].cast("q")[: size * _LINE : _LINE]
        self._slots = torch.frombuffer(memory, dtype=torch.uint8)[counters:].view(2, size, SLOT)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x` [n] of at most SLOT bytes: [ranks, n], to be read before the call after the next."""
        self._count += 1
        slots = self._slots[self._count % 2, :, : x.nbytes]
        slots[self._rank] = x.view(torch.uint8)
        self._fence()
        self._counters[self._rank] = self._count
        self._wait()
        self._fence()
        return slots.view(x.dtype)

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sums contiguous `x` over the ranks, in their order, in place."""
        for piece, shards in self._pieces(x):
            torch.add(shards[0], shards[1], out=piece)
            for shard in shards[2:]:
                piece += shard

    def all_reduce_max(self, x: torch.Tensor) -> None:
        """Element-wise maximum of contiguous `x` over the ranks, in place."""
        for piece, shards in self._pieces(x):
            torch.amax(shards, 0, out=piece)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Every rank's contiguous `x` into contiguous `out` [ranks, ...]."""
        places = out.view(len(out), -1).split(SLOT // x.element_size(), 1)
        for place, (_, shards) in zip(places, self._pieces(x), strict=True):
            place.copy_(shards)

    def _pieces(self, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of `x`, flat, each with every rank's: [n] and [ranks, n]."""
        for piece in x.view(-1).split(SLOT // x.element_size()):
            yield piece, self._gather(piece)

    def abort(self) -> None:
        """Ends waits for ranks that are gone. From any thread."""
        self._is_aborted = True

    def _wait(self) -> None:
        looks = 0
        while min(self._counters.tolist()) < self._count:
            looks += 1
            if self._is_aborted:
                raise RuntimeError("another rank has died")
            if looks > _YIELDS:
                time.sleep(_REST)
            elif looks > _LOOKS:
                os.sched_yield()
