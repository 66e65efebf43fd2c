"""Linear layers split over ranks, after Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3).

Column-parallel: each rank holds a range of the outputs, and needs no communication. Row-parallel: each rank holds a
range of the inputs and yields a partial sum; whoever consumes it adds the ranks' parts (see layers/norm.py).

A width that the ranks do not divide is padded at its end, with weights of zero, which change no sum: SiLU(0) * 0 is 0.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from nanovllm.kernels.gemm.cublas_lt_rule import MANY_ROWS
from nanovllm.kernels.gemm.lt_config import LtConfig
from nanovllm.kernels.gemm.push import Partial
from nanovllm.layers.few_rows import linear, many_rows_linear, pushed_linear
from nanovllm.layers.weights import CheckpointWeight, Shard, WeightedModule, parameter
from nanovllm.parallel.group import TensorParallelGroup

if TYPE_CHECKING:
    from nanovllm.kernels.gemm.decode import MidConfig, SplitConfig
    from nanovllm.kernels.gemm.skinny import GemmConfig
    from nanovllm.parallel.peer.all_reduce import PeerAllReduce


class ParallelLinear(WeightedModule):
    """x [T, in] @ weight [out, in]^T, whatever in and out are of the whole."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    """[out]: added by who takes the result, in a kernel that reads it anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.few_rows: dict[int, GemmConfig | MidConfig | SplitConfig | LtConfig] = {}
        """Numbers of rows for which something is faster than the library's plain product: see layers/few_rows.py."""
        self.many_rows: LtConfig | None = None
        """What multiplies MANY_ROWS and more, where it suits their number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, out]; or float32 [parts, T, out], sums over parts of `in`, where few_rows says so: only layers whose
        result goes to a ReduceAddNorm are given such a choice."""
        rows = x.shape[0]
        config = self.few_rows.get(rows)
        if config is not None:
            return linear(x, self.weight, config)
        if self.many_rows is not None and rows >= MANY_ROWS:
            return many_rows_linear(x, self.weight, self.many_rows)
        return F.linear(x, self.weight)


_ALIGNMENT = 8  # of a rank's part of a padded width: what kernels for few rows ask of their inputs


def _part_of(width: int, group: TensorParallelGroup) -> tuple[int, int, int]:
    """A rank's part of a split width: its size (the same on all ranks), where it begins, how much of it is no
    padding."""
    size = width // group.size
    if width % group.size:
        size = (size // _ALIGNMENT + 1) * _ALIGNMENT
    begin = min(width, group.rank * size)
    return size, begin, min(size, width - begin)


class MergedColumnParallelLinear(ParallelLinear):
    """Several column-parallel projections of the same input as one matrix, each split evenly over the ranks.

    [T, in] -> [T, sum of this rank's share of each output].
    """

    def __init__(
        self,
        in_features: int,
        outputs: dict[str, int],
        group: TensorParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`outputs`: name in the checkpoint -> whole number of outputs, in the order of the result's columns."""
        super().__init__()
        self.outputs = outputs
        self.parts = [_part_of(width, group) for width in outputs.values()]
        self.weight = parameter(sum(size for size, _, _ in self.parts), in_features, dtype=dtype, device=device)
        for target, (_, _, valid) in self._targets():
            target[valid:].zero_()

    def _targets(self) -> Iterator[tuple[torch.Tensor, tuple[int, int, int]]]:
        """This rank's rows of each output, and which part they are."""
        return zip(self.weight.split([size for size, _, _ in self.parts]), self.parts, strict=True)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for (name, width), (target, (_, begin, valid)) in zip(self.outputs.items(), self._targets(), strict=True):
            shape = (width, self.weight.shape[1])
            yield CheckpointWeight(f"{prefix}.{name}.weight", shape, (Shard(target[:valid], 0, begin),))


@dataclass(frozen=True)
class HeadSplit:
    """Which attention heads a rank computes, when `num_heads` query heads share `num_kv_heads` key/value heads.

    A rank takes a contiguous range of query heads and every key/value head that they need. Where the range cuts through
    a group, key/value heads are held twice, so that the rank's own query heads divide evenly over its own key/value
    heads (attention kernels want one group size). With more ranks than key/value heads each head is held by several
    ranks.
    """

    num_heads: int
    num_kv_heads: int
    rank: int
    size: int

    @property
    def local_heads(self) -> int:
        return self.num_heads // self.size

    @property
    def _local_group(self) -> int:
        return math.gcd(self.num_heads // self.num_kv_heads, self.local_heads)

    @property
    def local_kv_heads(self) -> int:
        return self.local_heads // self._local_group

    @property
    def first_head(self) -> int:
        return self.rank * self.local_heads

    def kv_head(self, local_index: int) -> int:
        """The whole model's key/value head that this rank holds as number `local_index`."""
        group = self.num_heads // self.num_kv_heads
        return (self.first_head + local_index * self._local_group) // group

    def kv_head_runs(self) -> list[tuple[int, int, int]]:
        """(first local number, first head of the whole model, count) of this rank's consecutive key/value heads."""
        runs: list[tuple[int, int, int]] = []
        for local in range(self.local_kv_heads):
            head = self.kv_head(local)
            if runs and head == runs[-1][1] + runs[-1][2]:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
            else:
                runs.append((local, head, 1))
        return runs

    @property
    def kv_heads_held_first(self) -> list[bool]:
        """For each of this rank's key/value heads whether no other place before it, on this or an earlier rank, holds
        the same one."""
        before = -1 if self.rank == 0 else replace(self, rank=self.rank - 1).kv_head(self.local_kv_heads - 1)
        heads = [self.kv_head(local) for local in range(self.local_kv_heads)]
        return [head > held for head, held in zip(heads, [before, *heads], strict=False)]

    def query_weight(self, name: str, target: torch.Tensor) -> CheckpointWeight:
        """A checkpoint tensor [rows of all query heads, ...], of which `target` holds this rank's heads."""
        rows = target.shape[0] // self.local_heads
        shape = (self.num_heads * rows, *target.shape[1:])
        return CheckpointWeight(name, shape, (Shard(target, 0, self.first_head * rows),))

    def kv_weight(self, name: str, target: torch.Tensor) -> CheckpointWeight:
        """A checkpoint tensor [rows of all key/value heads, ...], of which `target` holds this rank's heads."""
        rows = target.shape[0] // self.local_kv_heads
        shards = tuple(
            Shard(target[local * rows : (local + count) * rows], 0, whole_head * rows)
            for local, whole_head, count in self.kv_head_runs()
        )
        return CheckpointWeight(name, (self.num_kv_heads * rows, *target.shape[1:]), shards)


class QKVParallelLinear(ParallelLinear):
    """Query, key and value projections as one matrix: [T, in] -> [T, (heads + 2 * kv_heads) * head_dim] of this
    rank."""

    def __init__(
        self,
        in_features: int,
        heads: HeadSplit,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        rows = (heads.local_heads + 2 * heads.local_kv_heads) * head_dim
        self.weight = parameter(rows, in_features, dtype=dtype, device=device)
        self.bias = parameter(rows, dtype=dtype, device=device) if has_bias else None

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        heads = self.heads
        sizes = [count * self.head_dim for count in (heads.local_heads, heads.local_kv_heads, heads.local_kv_heads)]
        for kind, rows in (("weight", self.weight), ("bias", self.bias)):
            if rows is not None:
                q, k, v = rows.split(sizes)
                yield heads.query_weight(f"{prefix}.q_proj.{kind}", q)
                yield heads.kv_weight(f"{prefix}.k_proj.{kind}", k)
                yield heads.kv_weight(f"{prefix}.v_proj.{kind}", v)


class RowParallelLinear(ParallelLinear):
    """Inputs split over the ranks: [T, in of this rank] -> [T, out], a partial sum that is not reduced yet, and is for
    the next ReduceAddNorm."""

    def __init__(
        self, in_features: int, out_features: int, group: TensorParallelGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.in_features = in_features
        size, self.begin, self.valid = _part_of(in_features, group)
        self.weight = parameter(out_features, size, dtype=dtype, device=device)
        self.weight[:, self.valid :].zero_()
        self.pushes: dict[int, tuple[GemmConfig | MidConfig, PeerAllReduce]] = {}
        """Numbers of rows for which the product is stored straight into the sum's places (push.py), by what
        and for whom; set with the kernels' choices (runner/tuning.py)."""

    def forward(self, x: torch.Tensor) -> Partial:  # type: ignore[override]  # only a ReduceAddNorm takes it
        push = self.pushes.get(x.shape[0])
        return super().forward(x) if push is None else pushed_linear(x, self.weight, *push)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        shard = Shard(self.weight[:, : self.valid], 1, self.begin)
        yield CheckpointWeight(f"{prefix}.weight", (self.weight.shape[0], self.in_features), (shard,))
