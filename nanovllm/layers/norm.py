"""Norms, and the joint where the ranks' partial sums meet the residual stream."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import torch

from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.pointwise.norm import Norm, add_up
from nanovllm.layers.context import LayerContext
from nanovllm.layers.weights import CheckpointWeight, WeightedModule, parameter, whole
from nanovllm.parallel.two_batch import Normed


class RowNorm(WeightedModule):
    """The weights of one norm over the hidden size; see kernels/pointwise/norm.py for its kinds."""

    def __init__(
        self, context: LayerContext, hidden_size: int, eps: float, *, kind: str = "rms", adds_one: bool = False,
        has_bias: bool = False,
    ) -> None:  # fmt: skip
        """adds_one: the checkpoint holds weight - 1; the weight is kept in float32, where the sum is exact."""
        super().__init__()
        self.eps, self.kind, self.adds_one = eps, kind, adds_one
        dtype, device = context.dtype, context.device
        self.weight = parameter(hidden_size, dtype=torch.float32 if adds_one else dtype, device=device)
        self.bias = parameter(hidden_size, dtype=dtype, device=device) if has_bias else None

    def for_kernel(self) -> Norm:
        return Norm(self.weight, self.eps, self.kind, self.bias)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield whole(f"{prefix}.weight", self.weight, offset=float(self.adds_one))
        if self.bias is not None:
            yield whole(f"{prefix}.bias", self.bias)


class ReduceAddNorm(WeightedModule):
    """Sum of the ranks' partials, added to the residual stream, normalised: what comes before every block of the
    model.

    (partial [T, hidden], residual [T, hidden] or None at the start) -> (normalised [T, hidden], residual [T, hidden]).
    A partial may also be [parts, T, hidden], whose sum it is: over parts of K (kernels/gemm/decode.py), or of experts.
    The residual is for the next ReduceAddNorm of the same step alone: with several ranks, rows of it may be another's,
    or missing.
    """

    def __init__(
        self, context: LayerContext, norm: RowNorm | None, after: RowNorm | None = None, multiplier: float = 1.0
    ) -> None:
        """norm: of the new residual, for the next block; None: that takes the residual itself. after: of the complete
        sum, before multiplier * it is added; the owner is the block that the sum comes from."""
        super().__init__()
        self.norm, self.after, self.multiplier = norm, after, multiplier
        self.group, self.kernels = context.group, context.kernels
        self.is_plain = norm is not None and norm.kind == "rms" and after is None and multiplier == 1.0
        """Only a sum, an addition and an RMSNorm: what peer memory and fused GEMMs do in one kernel."""
        self.nodes = context.group.exact_bits == "tp"
        """Sums over parts of K are rounded, and so is the sum of any two (kernels/gemm/fixed_order.py)."""
        self.dependent_rows: AbstractSet[int] = frozenset()
        """Numbers of rows whose partial comes from a kernel of our own, after which the all-reduce is launched
        with PDL: `pdl_rows` of the layer before, which the model sets."""
        self.rounds = False
        """The normalised rows may be rounded to e4m3, since what takes them would do so. The model sets it. One row's
        product over several ranks does it in less time."""

    @property
    def row_norm(self) -> Norm:
        assert self.norm is not None
        return self.norm.for_kernel()

    def forward(
        self, partial: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | FP8Rows, torch.Tensor]:
        rows = partial.shape[-2]
        peers = self.group.fused_all_reduce(rows)
        if peers is not None and not self.is_plain:
            return self.add_norm(peers.all_reduce(partial), residual)
        if peers is not None:
            dependent = rows in self.dependent_rows
            return peers.all_reduce_add_rms_norm(
                partial, residual, self.row_norm, dependent=dependent, rounds=self.rounds and rows > 1
            )
        if self.group.size > 1 and partial.dim() == 3:
            assert residual is not None
            partial = add_up(partial, residual.dtype, self.nodes)
        if self.rounds and self.norm is not None and self.group.size == 1:
            after = None if self.after is None else self.after.for_kernel()
            return self.kernels.add_norms_fp8(partial, residual, self.row_norm, after, self.multiplier)
        return self.add_norm(self.group.all_reduce(partial), residual)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> Normed:
        """The same for x [T, hidden] (or in parts) that is complete."""
        norm, after = (None if n is None else n.for_kernel() for n in (self.norm, self.after))
        return self.kernels.add_norms(x, residual, norm, after, self.multiplier, self.nodes)
