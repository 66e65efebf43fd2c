"""Linear layers split over ranks, after Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3).

Column-parallel: each rank holds a range of the outputs, and needs no communication. Row-parallel: each rank holds a
range of the inputs and yields a partial sum, which its consumer adds up over the ranks (see layers/norm.py).

A share of a width that is no multiple of 8 is padded at its end with weights of zero, which change no sum: SiLU(0) * 0
is 0. So any width is served, and a rank's rows start where the hardware's copies may.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from nanovllm.kernels import Kernels
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.gemm import decode, skinny
from nanovllm.kernels.gemm.dispatch import matmul
from nanovllm.kernels.plan.config import LIBRARY, Gemm, GemmConfig, Ranges
from nanovllm.kernels.pointwise.norm import Norm, add_up
from nanovllm.layers.context import LayerContext
from nanovllm.layers.heads import HeadSplit
from nanovllm.layers.int4 import Int4Matrix
from nanovllm.layers.quantized import FP8Matrix, column_multiple, quantized_matrix
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, Shard, WeightedModule, parameter
from nanovllm.model_config import Quantization
from nanovllm.parallel.group import TensorParallelGroup


class ParallelLinear(WeightedModule):
    """x [T, in] @ weight [out, in]^T + bias [out], whatever in and out are of the whole.

    It is found by a walk over model.modules(): `kind` and its shape say which entry of the GEMM table it takes
    (kernels/plan/rules.py), and `configs` holds what was chosen. The fused forms do the same as separate kernels,
    and take these where the choice for that number of rows cannot fuse or, but for `add_to`, the layer has a bias.
    """

    weight: torch.Tensor
    """Of a layer that is not quantised, [out, in]."""

    def __init__(
        self, context: LayerContext, kind: str, rows: int, columns: int, *, pieces: Iterable[Piece],
        bias: bool = False, adds_bias: bool = True, precision: Quantization | None = None,
    ) -> None:  # fmt: skip
        """kind: one of choice.KINDS. rows, columns: of this rank's weight, of which `pieces` fill all but the padding.
        bias [rows]. adds_bias: False leaves `bias` to the consumer of the result. precision: None: a weight of the
        context's dtype."""
        super().__init__()
        dtype, device = context.dtype, context.device
        self.kind, self.pieces = kind, tuple(pieces)
        self.quantized: FP8Matrix | Int4Matrix | None = None
        if precision is None:
            self.weight = parameter(rows, columns, dtype=dtype, device=device)
        else:
            self.quantized = quantized_matrix(precision, rows, columns, self.pieces, dtype, device)
        self.bias = parameter(rows, dtype=dtype, device=device) if bias else None
        self._zero_padding()
        self.adds_bias = adds_bias
        self.takes_parts = True
        """The consumer adds up sums over parts of K; where it is not a ReduceAddNorm the model says False."""
        self.configs: Mapping[int, GemmConfig] = {}
        """Numbers of rows that have a choice of their own; all others go to the library."""
        self.ranges: Ranges = ()
        """Where it is not empty, the choices for all numbers of rows, in place of `configs`."""
        self.pdl_rows: set[int] = set()
        """Numbers of rows that a kernel of our own multiplies, after which PDL gains. One set for
        the layer's life: the norm that consumes its result holds it too."""

    def _zero_padding(self) -> None:
        cuts = [cut for piece in self.pieces for cut in piece.cuts]
        by_columns = any(cut.dim for cut in cuts)
        if self.quantized is None and sum(cut.length for cut in cuts) < self.weight.shape[by_columns]:
            self.weight.zero_()
        if self.bias is not None and not by_columns:
            self.bias.zero_()

    def gemm(self, fused: bool) -> Gemm:
        """Its name in the GEMM table. fused: see Gemm."""
        if self.quantized is not None:
            return Gemm(self.kind, *self.quantized.table_key, fused)
        n, k = self.weight.shape
        return Gemm(self.kind, n, k, str(self.weight.dtype).removeprefix("torch."), fused)

    def use(self, configs: Mapping[int, GemmConfig]) -> None:
        """Takes what is chosen, by the number of rows; the library where the consumer takes no parts of a sum."""
        configs = {rows: config for rows, config in configs.items() if self.takes_parts or config.parts == 1}
        if self.quantized is not None:
            configs = {rows: config for rows, config in configs.items() if self.quantized.takes(config)}
        self.configs = configs
        self.pdl_rows.clear()
        self.pdl_rows.update(rows for rows, config in configs.items() if config.is_own)

    def choice(self, rows: int) -> GemmConfig:
        """What multiplies so many rows."""
        if self.ranges and rows:
            return next(config for most, config in self.ranges if rows <= most)
        return self.configs.get(rows, LIBRARY)

    @property
    def takes_rounded(self) -> bool:
        """Whoever makes the inputs may round them to e4m3 (kernels/fp8/)."""
        return isinstance(self.quantized, FP8Matrix) and self.quantized.takes_rounded

    def matmul(self, x: torch.Tensor | FP8Rows) -> torch.Tensor:
        """x [T, in] @ weight^T: [T, out], or [parts, T, out], sums over parts of `in`, in float32 but for its `nodes`,
        where the choice says so: only layers whose result goes to a ReduceAddNorm have such a choice."""
        config = self.choice(x.shape[0])
        if self.quantized is not None:
            # only FP8 is handed FP8Rows, and only with the activation it makes some
            return self.quantized.matmul(x, config)  # type: ignore[arg-type, return-value]
        assert isinstance(x, torch.Tensor)
        return matmul(x, self.weight, config)

    def forward(self, x: torch.Tensor | FP8Rows) -> torch.Tensor:
        """[T, in] -> [T, out], or [parts, T, out] as `matmul`."""
        y = self.matmul(x)
        if self.bias is not None and self.adds_bias:
            (y if y.dim() == 2 else y[0]).add_(self.bias)
        return y

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for index, piece in enumerate(self.pieces):
            path = piece.path(prefix)
            if self.quantized is not None:
                yield from self.quantized.checkpoint_weights(path, piece.shape, piece.cuts, index)
            else:
                shards = tuple(cut.shard(self.weight) for cut in piece.cuts)
                yield CheckpointWeight(f"{path}.weight", piece.shape, shards)
            if self.bias is not None:
                yield self._bias_weight(f"{path}.bias", self.bias, piece)

    def _bias_weight(self, name: str, bias: torch.Tensor, piece: Piece) -> CheckpointWeight:
        shards = (Shard(bias, 0, 0),) if any(cut.dim for cut in piece.cuts) else (cut.shard(bias) for cut in piece.cuts)
        return CheckpointWeight(name, piece.shape[:1], tuple(shards))

    def fuses(self, rows: int) -> GemmConfig | None:
        """The choice for so many rows where it computes norm, activation and residual too."""
        config = self.choice(rows)
        if not config.is_skinny or (self.bias is not None and self.adds_bias):
            return None
        return config

    def _fused(self, x: torch.Tensor | FP8Rows, config: GemmConfig, **around: Any) -> torch.Tensor:
        """With what is `around` the product; see kernels/gemm/skinny.py."""
        if self.quantized is not None:
            return self.quantized.few_rows.linear(x, self.quantized.for_kernel(), config, **around)  # type: ignore[arg-type]
        return skinny.linear(x, self.weight, config, **around)  # type: ignore[arg-type]  # only FP8 is handed FP8Rows

    def forward_normed(self, x: torch.Tensor, norm: Norm, kernels: Kernels) -> torch.Tensor:
        """RMSNorm of x [T, in], then this layer: [T, out]."""
        config = self.fuses(x.shape[0])
        if config is None:
            return self(kernels.add_norms(x, None, norm)[0])
        return self._fused(x, config, norm=norm)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor | FP8Rows) -> torch.Tensor:
        """residual [T, out] += this layer of x [T, in], in place; returns residual. For one rank alone."""
        config = self.choice(x.shape[0])
        if self.bias is not None and self.adds_bias:
            residual.add_(self.bias)
        if config.is_skinny:
            return self._fused(x, config, residual=residual)
        if config == LIBRARY and self.quantized is None:
            assert isinstance(x, torch.Tensor)
            return residual.addmm_(x, self.weight.t())
        y = self.matmul(x)
        return residual.add_(y if y.dim() == 2 else add_up(y, residual.dtype))


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
        precision: Quantization | None = None, multiple: int = 1,
    ) -> None:  # fmt: skip
        """`outputs`: name in the checkpoint -> whole number of outputs, in the order of the result's columns. multiple:
        of which a rank's share of each is, beside what `precision` asks."""
        pieces, rows = [], 0
        for name, width in outputs.items():
            size, begin, valid = part_of(width, context.group, max(multiple, column_multiple(precision)))
            pieces.append(Piece(name, (width, in_features), (Cut(0, rows, begin, valid),)))
            rows += size
        super().__init__(context, "gate_up", rows, in_features, pieces=pieces, bias=bias, precision=precision)

    def forward_normed_silu_mul(self, x: torch.Tensor, norm: Norm, kernels: Kernels) -> torch.Tensor | FP8Rows:
        """RMSNorm of x [T, in], this layer as gate and up, SiLU(gate) * up: [T, out / 2]."""
        config = self.fuses(x.shape[0])
        if config is None:
            return self.forward_silu_mul(kernels.add_norms(x, None, norm)[0], kernels)
        return self._fused(x, config, norm=norm, gated=True)

    def forward_silu_mul(
        self, x: torch.Tensor | FP8Rows, kernels: Kernels, rounds: bool = False
    ) -> torch.Tensor | FP8Rows:
        """This layer as gate and up, SiLU(gate) * up: [T, in] -> [T, out / 2]. rounds: the kernel of the activation may
        round it to e4m3."""
        config = self.choice(x.shape[0])
        whole = config.is_own and (rounds or config.kernel != "specialized")  # which rounds
        if not whole or self.bias is not None:
            product = self(x)
            return kernels.silu_mul_fp8(product) if rounds else kernels.activation(product, "silu", True)
        if self.quantized is not None:
            return self.quantized.matmul(x, config, gated=True)  # type: ignore[arg-type]
        assert isinstance(x, torch.Tensor)
        return (skinny if config.is_skinny else decode).linear(x, self.weight, config, gated=True)


class QKVParallelLinear(ParallelLinear):
    """Query, key and value projections as one matrix: [T, in] -> [T, (heads + 2 * kv_heads) * head_dim] of this
    rank. Attention adds the bias."""

    def __init__(
        self, context: LayerContext, in_features: int, heads: HeadSplit, head_dim: int, *, bias: bool,
        precision: Quantization | None,
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
            context, "qkv", rows, in_features, pieces=pieces, bias=bias, adds_bias=False, precision=precision
        )


class RowParallelLinear(ParallelLinear):
    """Inputs split over the ranks: [T, in of this rank] -> [T, out], a partial sum that is not reduced yet, and is for
    the next ReduceAddNorm. Rank 0 alone adds the bias."""

    def __init__(
        self, context: LayerContext, in_features: int, out_features: int, *, kind: str = "down", bias: bool = False,
        pads: bool = True, precision: Quantization | None = None, multiple: int = 1,
    ) -> None:  # fmt: skip
        """pads: a rank's share of the inputs may be padded, to `multiple` or what `precision` asks; False: the ranks
        divide them."""
        group = context.group
        size, begin, valid = part_of(in_features, group, max(multiple, column_multiple(precision)) if pads else 1)
        if valid and begin % column_multiple(precision) and precision is not None:
            found = f"{kind}: {size} of {in_features} inputs for each rank"
            bound = f"a multiple of {column_multiple(precision)} in {precision.method}"
            raise ValueError(f"tensor_parallel_size={group.size}: {found}: must be {bound}")
        pieces = (Piece("", (out_features, in_features), (Cut(1, 0, begin, valid),)),)
        super().__init__(
            context, kind, out_features, size, pieces=pieces, bias=bias, adds_bias=group.rank == 0, precision=precision
        )
