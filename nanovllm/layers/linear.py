"""Linear layers split over ranks, after Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3).

Column-parallel: each rank holds a range of the outputs, and needs no communication. Row-parallel: each rank holds a
range of the inputs and yields a partial sum, which its consumer adds up over the ranks (see layers/norm.py).

A share of a width that is no multiple of 8 is padded at its end with weights of zero, which change no sum: SiLU(0) * 0
is 0. So any width is served, and a rank's rows start where the hardware's copies may.
"""

import math
from collections.abc import Iterable, Iterator

import torch

from nanovllm.kernels import Kernels
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.plan.config import LIBRARY
from nanovllm.kernels.plan.plan import Launch, Product
from nanovllm.kernels.pointwise.norm import Norm, add_up
from nanovllm.layers.context import LayerContext
from nanovllm.layers.heads import HeadSplit
from nanovllm.layers.quantized import column_multiple
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, Shard, WeightedModule, parameter
from nanovllm.model_config import Quantization
from nanovllm.parallel.group import TensorParallelGroup


class ParallelLinear(WeightedModule):
    """x [T, in] @ weight [out, in]^T + bias [out], whatever in and out are of the whole.

    `product` says what it multiplies and what may stand around it; the planner says by which kernel, for each number
    of rows (kernels/plan/plan.py). What that kernel does not compute of the things around it, other kernels do.
    """

    def __init__(
        self, context: LayerContext, kind: str, rows: int, columns: int, *, pieces: Iterable[Piece],
        bias: bool = False, adds_bias: bool = True, precision: Quantization | None = None, before: str = "",
        after: str = "", adds_parts: bool = False, rounds: bool = False,
    ) -> None:  # fmt: skip
        """kind: one of plan.config.KINDS. rows, columns: of this rank's weight, of which `pieces` fill all but the
        padding. bias [rows]. adds_bias: False leaves `bias` to the consumer of the result. precision: None: a weight of
        the context's dtype. before, after, adds_parts, rounds: see Product."""
        super().__init__()
        self.kind, self.pieces = kind, tuple(pieces)
        self.matrix = context.matrix(precision, rows, columns, self.pieces)
        self.bias = parameter(rows, dtype=context.dtype, device=context.device) if bias else None
        cuts = [cut for piece in self.pieces for cut in piece.cuts]
        if self.bias is not None and not any(cut.dim for cut in cuts):
            self.bias.zero_()
        self.adds_bias = adds_bias
        self.product = Product(
            kind, rows, columns, self.matrix.type_name, str(context.dtype).removeprefix("torch."), before, after,
            adds_parts, bias and adds_bias, rounds, self.matrix.scale_rows,
        )  # fmt: skip
        self.launches = context.planner.launches(self.product)

    @property
    def weight(self) -> torch.Tensor:
        """Weight [out, in] of a layer that is not quantised."""
        return self.matrix.weight

    def forward(
        self, x: torch.Tensor | FP8Rows, *, norm: Norm | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, in] -> [T, out], or [parts, T, out], sums over parts of `in` that its consumer adds up, float32 but with
        exact_bits="tp". norm: of x, where the kernel for so many rows computes it (Launch.norm). residual [T, out]:
        the result is added to it in place, and it is returned; for one rank alone."""
        launch: Launch = self.launches[x.shape[0]]
        if residual is not None:
            return self._add_to(residual, x, launch)
        y = self.matrix.multiply(x, launch.config, norm=norm)
        assert isinstance(y, torch.Tensor)
        if self.bias is not None and self.adds_bias:
            (y if y.dim() == 2 else y[0]).add_(self.bias)
        return y

    def _add_to(self, residual: torch.Tensor, x: torch.Tensor | FP8Rows, launch: Launch) -> torch.Tensor:
        if self.bias is not None and self.adds_bias:
            residual.add_(self.bias)
        if launch.residual:
            self.matrix.multiply(x, launch.config, residual=residual)
            return residual
        if launch.config == LIBRARY:
            assert isinstance(x, torch.Tensor)
            return residual.addmm_(x, self.weight.t())
        y = self.matrix.multiply(x, launch.config)
        assert isinstance(y, torch.Tensor)
        return residual.add_(y if y.dim() == 2 else add_up(y, residual.dtype))

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for index, piece in enumerate(self.pieces):
            path = piece.path(prefix)
            yield from self.matrix.checkpoint_weights(path, piece.shape, piece.cuts, index)
            if self.bias is not None:
                yield self._bias_weight(f"{path}.bias", self.bias, piece)

    def _bias_weight(self, name: str, bias: torch.Tensor, piece: Piece) -> CheckpointWeight:
        shards = (Shard(bias, 0, 0),) if any(cut.dim for cut in piece.cuts) else (cut.shard(bias) for cut in piece.cuts)
        return CheckpointWeight(name, piece.shape[:1], tuple(shards))


def part_of(width: int, group: TensorParallelGroup, multiple: int) -> tuple[int, int, int]:
    """A rank's part of a split width: its size (the same on all ranks, of this `multiple`), where it begins, how much
    of it is no padding."""
    if multiple > 1:  # it may be padded
        multiple = math.lcm(multiple, group.width_multiple)
    size = -(-width // (group.size * multiple)) * multiple
    begin = min(width, group.rank * size)
    return size, begin, min(size, width - begin)


class MergedColumnParallelLinear(ParallelLinear):
    """Several column-parallel projections of the same input as one matrix, each split over the ranks.

    [T, in] -> [T, sum of this rank's share of each output].
    """

    def __init__(
        self, context: LayerContext, in_features: int, outputs: dict[str, int], *, bias: bool = False,
        precision: Quantization | None = None, multiple: int = 1, before: str = "", after: str = "",
        rounds: bool = False, kind: str = "gate_up",
    ) -> None:  # fmt: skip
        """`outputs`: name in the checkpoint -> whole number of outputs, in the order of the result's columns. multiple:
        of which a rank's share of each is, beside what `precision` asks. before, after, rounds, kind: see Product; a
        layer's operations have different kinds."""
        pieces, rows = [], 0
        for name, width in outputs.items():
            size, begin, valid = part_of(width, context.group, max(multiple, column_multiple(precision)))
            pieces.append(Piece(name, (width, in_features), (Cut(0, rows, begin, valid),)))
            rows += size
        super().__init__(
            context, kind, rows, in_features, pieces=pieces, bias=bias, precision=precision, before=before,
            after=after, rounds=rounds,
        )  # fmt: skip

    def silu_mul(
        self, x: torch.Tensor | FP8Rows, kernels: Kernels, *, norm: Norm | None = None
    ) -> torch.Tensor | FP8Rows:
        """Computes silu(gate) * up, with this layer as gate and up: [T, in] -> [T, out / 2], rounded to e4m3 where the
        consumer takes it so. norm: as in forward."""
        launch: Launch = self.launches[x.shape[0]]
        if launch.gate:
            return self.matrix.multiply(x, launch.config, gated=True, norm=norm)
        return kernels.activation(self(x, norm=norm), "silu", True, rounds=self.product.rounds)


class QKVParallelLinear(ParallelLinear):
    """Query, key and value projections as one matrix: [T, in] -> [T, (heads + 2 * kv_heads) * head_dim] of this
    rank. Attention adds the bias."""

    def __init__(
        self, context: LayerContext, in_features: int, heads: HeadSplit, head_dim: int, *, bias: bool,
        precision: Quantization | None, before: str = "",
    ) -> None:  # fmt: skip
        q_rows, kv_rows = heads.local_heads * head_dim, heads.local_kv_heads * head_dim
        q_shape, kv_shape = ((count * head_dim, in_features) for count in (heads.num_heads, heads.num_kv_heads))
        pieces = (
            Piece("q_proj", q_shape, heads.query_cuts(head_dim)),
            Piece("k_proj", kv_shape, heads.kv_cuts(head_dim, q_rows)),
            Piece("v_proj", kv_shape, heads.kv_cuts(head_dim, q_rows + kv_rows)),
        )
        rows = q_rows + 2 * kv_rows
        super().__init__(
            context, "qkv", rows, in_features, pieces=pieces, bias=bias, adds_bias=False, precision=precision,
            before=before,
        )  # fmt: skip


class RowParallelLinear(ParallelLinear):
    """Inputs split over the ranks: [T, in of this rank] -> [T, out], a partial sum that is not reduced yet, and is for
    the next ReduceAddNorm. Rank 0 alone adds the bias."""

    def __init__(
        self, context: LayerContext, in_features: int, out_features: int, *, kind: str = "down", bias: bool = False,
        pads: bool = True, precision: Quantization | None = None, multiple: int = 1, before: str = "",
        after: str = "", adds_parts: bool = True,
    ) -> None:  # fmt: skip
        """pads: a rank's share of the inputs may be padded, to `multiple` or what `precision` asks; False: the ranks
        divide them. before, after, adds_parts: see Product."""
        group = context.group
        size, begin, valid = part_of(in_features, group, max(multiple, column_multiple(precision)) if pads else 1)
        if valid and begin % column_multiple(precision) and precision is not None:
            found = f"{kind}: {size} of {in_features} inputs for each rank"
            bound = f"a multiple of {column_multiple(precision)} in {precision.method}"
            raise ValueError(f"tensor_parallel_size={group.size}: {found}: must be {bound}")
        pieces = (Piece("", (out_features, in_features), (Cut(1, 0, begin, valid),)),)
        super().__init__(
            context, kind, out_features, size, pieces=pieces, bias=bias, adds_bias=group.rank == 0, precision=precision,
            before=before, after=after, adds_parts=adds_parts,
        )  # fmt: skip
