"""The ranks of one engine, and what they say to each other: two reductions and a gather.

No default process group is used: engines in one program must not meet. Each engine builds its own communicator over a
store of its own.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nanovllm.kernels.plan.order import LEAF_MULTIPLE, LEAVES
from nanovllm.kernels.pointwise.norm import add_up
from nanovllm.parallel.host_memory import HostMemory
from nanovllm.parallel.two_batch import Overlap, first_half

if TYPE_CHECKING:
    from nanovllm.parallel.peer.all_reduce import PeerAllReduce

logger = logging.getLogger(__name__)

_NO_TIMEOUT = timedelta(days=1)  # hangs are noticed by the processes' watcher, which knows when a rank compiles


class TensorParallelGroup:
    """One rank's view of the group. With one rank every operation is the identity."""

    def __init__(
        self, rank: int, size: int, device: torch.device, store: dist.Store | None, overlap: bool = False,
        share_gpus: bool = False, exact_bits: str | None = None,
    ) -> None:  # fmt: skip
        """`store`: where the ranks meet; None for one rank. Where it has an attribute `unwatched`, that is the same
        store without Python: NCCL's threads outlive the interpreter, so they must not call into it.
        `overlap`: large steps may all-reduce beside their GEMMs. `share_gpus`: ranks may sit on one GPU, which NCCL
        refuses. `exact_bits`: see EngineConfig; sums then have one order, that of ranks or a tree."""
        self.rank = rank
        self.size = size
        self.device = device
        self.exact_bits = exact_bits
        self._store = store
        self._share_gpus = share_gpus
        self._library = "host memory" if device.type == "cpu" or share_gpus else "nccl"
        self._group: Any = None
        """ProcessGroupNCCL or HostMemory; None with one rank."""
        self._peer: PeerAllReduce | None = None
        self._overlaps = overlap and size > 1
        self.overlap = Overlap(None) if self._overlaps and device.type == "cpu" else None
        if size > 1:
            assert store is not None
            if self._library == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = _NO_TIMEOUT
                native = dist.PrefixStore("nccl", getattr(store, "unwatched", store))
                self._group = dist.ProcessGroupNCCL(native, rank, size, options)
            else:
                self._group = HostMemory(store, rank, size)

    def use_peer_memory(self, max_rows: int, hidden_size: int, dtype: torch.dtype, max_keys: int) -> None:
        """Lets sums of up to `max_rows` rows go through memory that the GPUs map from each other, where they can; see
        parallel/peer/memory.py. Where they cannot, all stays with NCCL and the log says so, but ranks that share GPUs
        raise. All ranks call it."""
        from nanovllm.parallel.peer.all_reduce import PeerAllReduce
        from nanovllm.parallel.peer.copy_engine import CopyEngineSums
        from nanovllm.parallel.peer.memory import Layout, PeerMemory, PeerMemoryUnavailable

        assert self._store is not None and self.size > 1
        half_rows = first_half(max_rows) if self._overlaps else 0
        layout = Layout.for_limits(self.size, hidden_size, dtype, max_rows, max_keys, half_rows)
        try:
            memory = PeerMemory(self._store, self.rank, self.device, layout, allow_shared_device=self._share_gpus)
            one_order, round_sums = self.exact_bits is not None, self.exact_bits == "tp"
            self._peer = PeerAllReduce(memory, one_order=one_order, round_sums=round_sums)
            if self._overlaps:
                self.overlap = Overlap(CopyEngineSums(memory))
        except PeerMemoryUnavailable as reason:
            if self._share_gpus:
                raise  # graphs cannot hold sums over the host
            if self.rank == 0:
                logger.warning("all-reduce uses %s only: %s", self._library, reason)

    @property
    def peer_bytes(self) -> int:
        """Bytes of this rank's GPU that are mapped for the others, outside of torch's allocator."""
        return 0 if self._peer is None else self._peer.memory.layout.nbytes

    @property
    def all_reduce_name(self) -> str:
        """Name of the all-reduce, for reports."""
        if self.size == 1:
            return "none"
        return self._library if self._peer is None else f"peer memory, {self._library} for large sums"

    @property
    def width_multiple(self) -> int:
        """Multiple that a rank's share of a padded width must be: whole leaves of the sum over K (kernels/gemm)."""
        return LEAVES * LEAF_MULTIPLE // self.size if self.exact_bits == "tp" else 1

    def fused_all_reduce(self, num_rows: int) -> "PeerAllReduce | None":
        """The kernel that sums, adds and normalises [num_rows, hidden] at once; None if there is none."""
        return self._peer if self._peer is not None and self._peer.takes(num_rows) else None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x`, of any shape, over the ranks, in place; returns it. Every rank ends with the same bits."""
        if self._group is not None and self.exact_bits is not None:
            return x.copy_(add_up(self.all_gather(x), x.dtype, self.exact_bits == "tp"))
        if isinstance(self._group, HostMemory):
            if x.is_cuda:  # of ranks that share a GPU
                return x.copy_(self.all_reduce(x.cpu()))
            self._group.all_reduce(x)
        elif self._group is not None:
            self._group.allreduce([x]).wait()
        return x

    def all_reduce_max(self, keys: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum of int64 keys [B] over the ranks, in place; returns them."""
        if self._peer is not None:
            return self._peer.all_reduce_max(keys)
        if isinstance(self._group, HostMemory):
            if keys.is_cuda:  # of ranks that share a GPU
                return keys.copy_(self.all_reduce_max(keys.cpu()))
            self._group.all_reduce_max(keys)
        elif self._group is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
            self._group.allreduce([keys], options).wait()
        return keys

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x` [...], of one shape, to every rank: [ranks, ...]."""
        if self._group is None:
            return x.unsqueeze(0)
        if isinstance(self._group, HostMemory) and x.is_cuda:
            return self.all_gather(x.cpu()).to(x.device)
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        if isinstance(self._group, HostMemory):
            self._group.all_gather(x, out)
        else:
            self._group._allgather_base(out, x).wait()
        return out

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Context in which this rank is on its own: reductions through the library are the identity, whatever others
        do, and copy engines do nothing."""
        group, self._group = self._group, None
        sums = None if self.overlap is None else self.overlap.sums
        if sums is not None:
            sums.enabled = False
        try:
            yield
        finally:
            self._group = group
            if sums is not None:
                sums.enabled = True

    def abort(self) -> None:
        """Ends collectives in flight whose peers are gone (they spin on the device otherwise). From any thread."""
        if self._peer is not None:
            self._peer.memory.abort()
        if self._group is not None:
            self._group.abort()

    def close(self, failed: bool) -> None:
        """Leaves the group. `failed`: some rank is gone, so it waits for none."""
        if failed:
            self.abort()
        if self._peer is not None:
            self._peer.memory.close()
            self._peer = self.overlap = None
        if self._group is not None and self._library == "nccl" and not failed:
            self._group.shutdown()
        self._group = self._store = None
