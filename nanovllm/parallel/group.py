"""The ranks of one engine, and the two sums they need.

No default process group is used: engines in one program must not meet. Each engine builds its own communicator over a
TCPStore whose port the operating system chose.
"""

from datetime import timedelta

import torch
import torch.distributed as dist


class TensorParallelGroup:
    """One rank's view of the group. With one rank every operation is the identity."""

    def __init__(self, rank: int, size: int, device: torch.device, store: dist.Store | None, timeout: float) -> None:
        """`store`: where the ranks meet; None for one rank. `timeout`: seconds for a rank to join."""
        self.rank = rank
        self.size = size
        self.device = device
        self._group: dist.ProcessGroup | None = None
        if size > 1:
            assert store is not None
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(days=1)  # hangs are noticed by the executor, which knows when it compiles
                self._group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
            else:
                self._group = dist.ProcessGroupGloo(
                    dist.PrefixStore("gloo", store), rank, size, timedelta(seconds=max(timeout, 600.0))
                )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over the ranks, in place; returns it. Every rank ends with the same bits."""
        if self._group is not None:
            self._group.allreduce([x]).wait()
        return x

    def all_reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum of `x` over the ranks, in place; returns it."""
        if self._group is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            self._group.allreduce([x], options).wait()
        return x

    def abort(self) -> None:
        """Ends collectives in flight whose peers are gone (NCCL kernels spin otherwise)."""
        if self._group is not None and self.device.type == "cuda":
            self._group.abort()

    def close(self) -> None:
        if self._group is not None and self.device.type == "cuda":
            self._group.shutdown()
        self._group = None
