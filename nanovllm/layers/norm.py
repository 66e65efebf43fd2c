"""RMSNorm, and the joint where the ranks' partial sums meet the residual stream."""

from collections.abc import Iterator

import torch

from nanovllm.kernels import Kernels
from nanovllm.kernels.gemm.push import Partial, Pushed
from nanovllm.kernels.pointwise.norm import add_up
from nanovllm.layers.weights import CheckpointWeight, WeightedModule, parameter, whole
from nanovllm.parallel.group import TensorParallelGroup
from nanovllm.parallel.two_batch import UnderWay

Normed = tuple[torch.Tensor, torch.Tensor]
"""(normalised [T, hidden], residual [T, hidden])"""


class ReduceAddNorm(WeightedModule):
    """Sum of the ranks' partials, added to the residual stream, normalised: what stands before every block of the
    model.

    (partial [T, hidden], residual [T, hidden] or None at the start) -> (normalised [T, hidden], residual [T, hidden]).
    A partial may also be float32 [parts, T, hidden], sums over parts of K that make it (decode.py), or be on
    its way to the ranks already (kernels/gemm/push.py).
    The residual is for the next ReduceAddNorm of the same step alone: with several ranks, rows of it may be another's,
    or missing.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        group: TensorParallelGroup,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group = group
        self.kernels = kernels
        self.weight = parameter(hidden_size, dtype=dtype, device=device)
        self.dependent_rows: frozenset[int] = frozenset()
        """Numbers of rows whose partial comes from a kernel of our own, which lets a sum over ranks be launched
        dependently; set with the kernels' choices (runner/tuning.py)."""

    def forward(self, partial: Partial, residual: torch.Tensor | None) -> Normed:
        rows = partial.rows if isinstance(partial, Pushed) else partial.shape[-2]
        fused = self.group.fused_all_reduce(rows)
        if fused is not None:
            dependent = rows in self.dependent_rows
            return fused.all_reduce_add_rms_norm(partial, residual, self.weight, self.eps, dependent=dependent)
        assert isinstance(partial, torch.Tensor), "only peer memory has places to push to"
        if self.group.size > 1 and partial.dim() == 3:
            partial = add_up(partial, self.weight.dtype)
        return self._add_norm(self.group.all_reduce(partial), residual)

    def start(self, partial: Partial, residual: torch.Tensor | None, half: int) -> UnderWay[Normed]:
        """The same for half 0 or 1 of a step, beside what this stream does next. Nobody may touch `partial` and
        `residual` until it is waited for. With peer memory the norm is done with the sum, on a CPU when it is waited
        for."""
        overlap = self.group.overlap
        assert overlap is not None and isinstance(partial, torch.Tensor)
        sums = overlap.sums
        if sums is None:
            overlap.fork()
            with overlap.side():
                self.group.all_reduce(partial)
            return overlap.under_way(lambda: self._add_norm(partial, residual), partial, residual)
        kept = sums.empty_residual(partial) if residual is None else residual
        overlap.fork()
        with overlap.side():
            sums.start(half, partial, residual, kept, self.weight, self.eps)
        return overlap.under_way(lambda: (sums.finish(half, partial.shape[0]), kept), partial, kept)

    def _add_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> Normed:
        if residual is None:
            return self.kernels.rms_norm(x, self.weight, self.eps), x
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield whole(f"{prefix}.weight", self.weight)
