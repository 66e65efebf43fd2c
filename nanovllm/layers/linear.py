"""Linear layers split over ranks, after Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3).

Column-parallel: each rank holds a range of the outputs, and needs no communication. Row-parallel: each rank holds a
range of the inputs and yields a partial sum, which its consumer adds up over the ranks (see layers/norm.py).

A share of a width that is no multiple of 8 is padded at its end with weights of zero, which change no sum: SiLU(0) * 0
is 0. So any width is served, and a rank's rows start where the hardware's copies may.
"""

import math
from collections.abc import Iterable, Iterator

import torch

from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.plan.config import LIBRARY
from nanovllm.kernels.plan.plan import Launch
from nanovllm.kernels.plan.product import ANYTHING, SUMMED_AFTER, Around, Choice, Product
from nanovllm.kernels.pointwise.norm import add_up
from nanovllm.layers.context import LayerContext
from nanovllm.layers.heads import HeadSplit
from nanovllm.layers.matrix import Weight
from nanovllm.layers.quantized import column_multiple
from nanovllm.layers.step import Call, wanted_rows
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, Shard, WeightedModule, parameter
from nanovllm.model_config import Quantization
from nanovllm.parallel.group import TensorParallelGroup


class Operation(WeightedModule):
    """Weight that a layer multiplies by. `product` tells the planner what it is and what stands around it. The planner
    says for each number of rows which kernel runs, and what this computes besides (kernels/plan/plan.py)."""

    def __init__(self, context: LayerContext, product: Product, matrix: Weight) -> None:
        super().__init__()
        self.product, self.matrix = product, matrix
        launches = context.planner.launches
        self._chained, self._apart = map(launches, (product, product.apart))
        adapted = product if context.adapters is None else product.adapted
        self._adapted = tuple(map(launches, (adapted, adapted.apart)))

    def launch(self, rows: int, call: Call) -> Launch:
        """Kernel that runs for so many rows."""
        chained, apart = self._adapted if call.has_adapters else (self._chained, self._apart)
        found: Launch = (apart if call.residual is None else chained)[rows]
        return found

    def forward(self, x: torch.Tensor | FP8Rows, call: Call) -> torch.Tensor | FP8Rows:
        """x by what is launched, for experts by the number of tokens; see Weight.multiply."""
        rows = x.shape[0] if call.routing is None else call.routing.num_tokens
        return self.matrix.multiply(x, self.launch(rows, call), call)


class ParallelLinear(Operation):
    """x [T, in] @ weight [out, in]^T + bias [out], whatever in and out are of the whole. What the kernel of its launch
    does not compute of the things around it, other kernels do."""

    def __init__(
        self, context: LayerContext, name: str, rows: int, columns: int, *, pieces: Iterable[Piece],
        bias: bool = False, adds_bias: bool = True, precision: Quantization | None = None, around: Around = ANYTHING,
    ) -> None:  # fmt: skip
        """name: see Product. rows, columns: of this rank's weight, of which `pieces` fill all but the padding. bias
        [rows]. adds_bias: False leaves `bias` to the consumer of the result. precision: None: a weight of the context's
        dtype."""
        pieces = tuple(pieces)
        matrix = context.matrix(precision, rows, columns, pieces)
        has_bias = bias and (adds_bias or around.after == "gate")
        super().__init__(context, product_of(context, name, matrix, rows, columns, around, has_bias), matrix)
        self.pieces = pieces
        self.bias = parameter(rows, dtype=context.dtype, device=context.device) if bias else None
        cuts = [cut for piece in self.pieces for cut in piece.cuts]
        if self.bias is not None and not any(cut.dim for cut in cuts):
            self.bias.zero_()
        self.adds_bias, self._adds_residual = adds_bias, around.after == "residual"

    @property
    def weight(self) -> torch.Tensor:
        """Weight [out, in] of a layer that is not quantised."""
        return self.matrix.weight

    def forward(self, x: torch.Tensor | FP8Rows, call: Call) -> torch.Tensor:
        """[T, in] -> [T, out], or [parts, T, out], sums over parts of `in` that its consumer adds up, float32 but with
        exact_bits="tp". Where it stands before an addition to the residual stream, and the call has one: that."""
        launch, call = self.launch(x.shape[0], call), call._replace(bias=self.bias)
        residual = call.residual if self._adds_residual else None
        bias = self.bias if self.adds_bias and not launch.bias else None
        if residual is not None and bias is not None:
            residual.add_(bias)
        if residual is not None and launch.config == LIBRARY and not call.has_adapters:
            assert isinstance(x, torch.Tensor)
            return residual.addmm_(x, self.weight.t())
        y = self.matrix.multiply(x, launch, call)
        assert isinstance(y, torch.Tensor)
        if residual is not None:
            return residual if launch.residual else residual.add_(y if y.dim() == 2 else add_up(y, residual.dtype))
        if bias is not None:
            (y if y.dim() == 2 else y[0]).add_(bias)
        return y

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for index, piece in enumerate(self.pieces):
            path = piece.path(prefix)
            yield from self.matrix.checkpoint_weights(path, piece.shape, piece.cuts, index)
            if (bias := self.bias) is not None:
                is_whole = any(cut.dim for cut in piece.cuts)  # where columns are cut
                shards = (Shard(bias, 0, 0),) if is_whole else tuple(cut.shard(bias) for cut in piece.cuts)
                yield CheckpointWeight(f"{path}.bias", piece.shape[:1], shards)


def product_of(
    context: LayerContext, name: str, matrix: Weight, rows: int, columns: int, around: Around, has_bias: bool = False,
    choice: Choice | None = None,
) -> Product:  # fmt: skip
    """The product of rows by a weight [rows, columns], or by those of experts."""
    x_dtype = str(context.dtype).removeprefix("torch.")
    return Product(
        name, rows, columns, matrix.type_name, x_dtype, around, has_bias, matrix.scale_rows, matrix.has_static_inputs,
        choice,
    )  # fmt: skip


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
        adds_bias: bool = True, precision: Quantization | None = None, multiple: int = 1, around: Around = ANYTHING,
        name: str = "gate_up",
    ) -> None:  # fmt: skip
        """`outputs`: name in the checkpoint -> whole number of outputs, in the order of the result's columns. multiple:
        of which a rank's share of each is, beside what `precision` asks."""
        pieces, rows = [], 0
        for output, width in outputs.items():
            size, begin, valid = part_of(width, context.group, max(multiple, column_multiple(precision)))
            pieces.append(Piece(output, (width, in_features), (Cut(0, rows, begin, valid),)))
            rows += size
        super().__init__(
            context, name, rows, in_features, pieces=pieces, bias=bias, adds_bias=adds_bias, precision=precision,
            around=around,
        )  # fmt: skip


class QKVParallelLinear(ParallelLinear):
    """Query, key and value projections as one matrix: [T, in] -> [T, (heads + 2 * kv_heads) * head_dim] of this
    rank. Attention adds the bias."""

    def __init__(
        self, context: LayerContext, in_features: int, heads: HeadSplit, head_dim: int, *, bias: bool,
        precision: Quantization | None, around: Around = ANYTHING, query_parts: int = 1,
        others: tuple[str, ...] = ("k_proj", "v_proj"),
    ) -> None:  # fmt: skip
        """query_parts: parts of head_dim rows that q_proj has for a head, of which the first is the query. others:
        projections beside it, of key/value heads."""
        q_rows, kv_rows = heads.local_heads * head_dim, heads.local_kv_heads * head_dim
        counts = (heads.num_heads * query_parts, heads.num_kv_heads)
        q_shape, kv_shape = ((count * head_dim, in_features) for count in counts)
        q_cuts = heads.query_cuts(head_dim) if query_parts == 1 else heads.part_cuts(head_dim, 0, query_parts)
        pieces = (
            Piece("q_proj", q_shape, q_cuts),
            *(
                Piece(name, kv_shape, heads.kv_cuts(head_dim, q_rows + place * kv_rows))
                for place, name in enumerate(others)
            ),
        )
        rows = q_rows + len(others) * kv_rows
        super().__init__(
            context, "qkv", rows, in_features, pieces=pieces, bias=bias, adds_bias=False, precision=precision,
            around=around,
        )  # fmt: skip


class RowParallelLinear(ParallelLinear):
    """Inputs split over the ranks: [T, in of this rank] -> [T, out], a partial sum that is not reduced yet, and is for
    the next ReduceAddNorm. Rank 0 alone adds the bias."""

    def __init__(
        self, context: LayerContext, in_features: int, out_features: int, *, name: str = "down", bias: bool = False,
        pads: bool = True, precision: Quantization | None = None, multiple: int = 1, around: Around = SUMMED_AFTER,
    ) -> None:  # fmt: skip
        """pads: a rank's share of the inputs may be padded, to `multiple` or what `precision` asks; False: the ranks
        divide them."""
        group = context.group
        whole = column_multiple(precision)
        size, begin, valid = part_of(in_features, group, max(multiple, whole) if pads else 1)
        if valid and begin % whole and precision is not None:
            found = f"{name}: {size} of {in_features} inputs for each rank"
            fits = next(n for n in range(group.size - 1, 0, -1) if n == 1 or in_features % (n * whole) == 0)
            bound = f"a multiple of {whole} in {precision.method}, as with tensor_parallel_size={fits}"
            raise ValueError(f"tensor_parallel_size={group.size}: {found}: must be {bound}")
        pieces = (Piece("", (out_features, in_features), (Cut(1, 0, begin, valid),)),)
        super().__init__(
            context, name, out_features, size, pieces=pieces, bias=bias, adds_bias=group.rank == 0,
            precision=precision, around=around,
        )  # fmt: skip

    def of_wanted(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        """The result of the wanted tokens of x [T, in], [N, out]."""
        assert call.step is not None
        if (wanted := call.step.wanted) is not None:
            call, x = call._replace(rows=wanted), wanted_rows(x, wanted)
        if not x.shape[0]:  # GEMMs take one row or more
            return x.new_empty(0, self.product.n)
        return self(x, call)
