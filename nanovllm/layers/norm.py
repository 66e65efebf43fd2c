"""Norms, and ReduceAddNorm, where the ranks' partial sums meet the residual stream."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.pointwise.norm import Norm, add_up
from nanovllm.layers.context import LayerContext, Stream
from nanovllm.layers.weights import CheckpointWeight, WeightedModule, parameter, whole


class RowNorm(WeightedModule):
    """The weights of one norm over the hidden size; see kernels/pointwise/norm.py for its kinds."""

    def __init__(
        self, context: LayerContext, hidden_size: int, eps: float, *, kind: str = "rms", adds_one: bool = False,
        has_bias: bool = False,
    ) -> None:  # fmt: skip
        """adds_one: the checkpoint holds weight - 1; the weight is kept in float32, where the sum is exact, as is one
        that multiplies in float32."""
        super().__init__()
        self.eps, self.kind, self.adds_one = eps, kind, adds_one
        self.kernels, dtype, device = context.kernels, context.dtype, context.device
        is_wide = adds_one or kind == "rms_float32"
        self.weight = parameter(hidden_size, dtype=torch.float32 if is_wide else dtype, device=device)
        self.bias = parameter(hidden_size, dtype=dtype, device=device) if has_bias else None

    def forward(self, x: torch.Tensor) -> Any:
        """[T, hidden] -> normalised rows, a tensor of their own."""
        return self.kernels.add_norms(x, None, self.for_kernel())[0]

    def for_kernel(self) -> Norm:
        return Norm(self.weight, self.eps, self.kind, self.bias)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield whole(f"{prefix}.weight", self.weight, offset=float(self.adds_one))
        if self.bias is not None:
            yield whole(f"{prefix}.bias", self.bias)


class StreamScalar(WeightedModule):
    """A number, `weight` [1], that the residual stream is multiplied by."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.weight = parameter(1, dtype=context.dtype, device=context.device)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield whole(prefix, self.weight)


class ReduceAddNorm(WeightedModule):
    """Sum of the ranks' partials, added to the residual stream, normalised: what comes before every block of the
    model. Stream -> (normalised [T, hidden], residual [T, hidden]); the residual is for the next ReduceAddNorm of the
    same step alone.
    """

    def __init__(
        self, context: LayerContext, norm: RowNorm | None, after: RowNorm | None = None, multiplier: float = 1.0,
        scalar: StreamScalar | None = None, part_norms: tuple[RowNorm, ...] = (),
    ) -> None:  # fmt: skip
        """norm: of the new residual; None leaves it as it is. after: norm of the complete partial sum, before it is
        multiplied and added; scalar: of the new residual. part_norms: of so many partial sums, [parts, T, hidden],
        which are added up then. These belong to the block that the sum comes from."""
        super().__init__()
        self.norm, self.after, self.multiplier, self.scalar = norm, after, multiplier, scalar
        self.part_norms = nn.ModuleList(part_norms)
        self.group, self.kernels = context.group, context.kernels
        is_add = after is None and multiplier == 1.0 and scalar is None
        self.is_add_rms_norm = is_add and norm is not None and norm.kind == "rms"
        """Only a sum, an addition and an RMSNorm: what peer memory and fused GEMMs do in one kernel."""
        self.round_sums = context.group.exact_bits == "tp"
        """Sums over parts of K are rounded, and so is the sum of any two (kernels/plan/order.py)."""

    @property
    def row_norm(self) -> Norm:
        assert self.norm is not None
        return self.norm.for_kernel()

    def forward(self, stream: Stream, rounds: bool = False) -> tuple[torch.Tensor | FP8Rows, torch.Tensor]:
        """rounds: normalised rows are rounded to e4m3, as the consumer's launch says (Launch.rounded)."""
        residual, partial, is_early = stream
        if partial is None:
            assert residual is not None
            return self.add_norm(residual, None, rounds)
        peers = self.group.fused_all_reduce(stream.num_rows * max(1, len(self.part_norms)))
        if peers is not None and self.is_add_rms_norm:
            return peers.all_reduce_add_rms_norm(partial, residual, self.row_norm, dependent=is_early, rounds=rounds)
        if peers is not None:
            partial = peers.all_reduce(self.side_by_side(partial))
        elif self.group.size > 1:
            partial = self.group.all_reduce(self.whole(partial, residual))
        return self.add_norm(partial, residual, rounds)

    def start(
        self, partial: torch.Tensor, residual: torch.Tensor | None, half: int
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """See parallel/two_batch.py."""
        assert self.group.overlap is not None
        partial = self.whole(partial, residual)
        if (sums := self.group.overlap.sums) is not None:
            assert self.is_add_rms_norm
            return sums.start(half, partial, residual, self.row_norm)
        total = self.group.all_reduce(partial)
        return lambda: self.add_norm(total, residual)

    def whole(self, partial: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
        """A partial sum as one addend [T, hidden] in the dtype of `like`, where it comes in parts of a sum."""
        partial = self.side_by_side(partial)
        return partial if partial.dim() == 2 or like is None else add_up(partial, like.dtype, self.round_sums)

    def side_by_side(self, partial: torch.Tensor) -> torch.Tensor:
        """Partial sums [parts, T, hidden] that have norms of their own as one matrix; others as they are."""
        return partial.flatten(0, -2) if self.part_norms else partial

    def add(self, stream: Stream) -> torch.Tensor:
        """The complete residual stream, not normalised; on one rank, where is_add_rms_norm holds."""
        residual, partial, _ = stream
        assert residual is not None
        return residual if partial is None else self.kernels.add_norms(partial, residual, None)[1]

    def complete(self, residual: torch.Tensor) -> torch.Tensor:
        """The residual stream that `forward` has returned, [T, hidden], with all rows on every rank."""
        peers = self.group.fused_all_reduce(residual.shape[0])
        if peers is None or not self.is_add_rms_norm or peers.path(residual.shape[0]) == "one_shot":
            return residual
        return self.group.all_reduce(peers.own_rows(residual))

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, rounds: bool = False
    ) -> tuple[Any, torch.Tensor]:
        """Adds x [T, hidden], complete on this rank (or in parts), to the residual and normalises. residual None:
        zeros. Returns the normalised rows, with `rounds` as FP8Rows, and the new residual."""
        if self.part_norms:
            parts = x.view(len(self.part_norms), -1, x.shape[-1])
            normed = [norm(part) for norm, part in zip(self.part_norms, parts, strict=True)]
            x = sum(normed[1:], normed[0])
        norm, after = (None if n is None else n.for_kernel() for n in (self.norm, self.after))
        scalar = None if self.scalar is None else self.scalar.weight
        return self.kernels.add_norms(x, residual, norm, after, self.multiplier, self.round_sums, rounds, scalar)
