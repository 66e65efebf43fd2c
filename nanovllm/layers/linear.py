"""Linear layers split over ranks, after Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3).

Column-parallel: each rank holds a range of the outputs, and needs no communication. Row-parallel: each rank holds a
range of the inputs and yields a partial sum, which its consumer adds up over the ranks (see layers/norm.py).

A share of a width that is no multiple of 8 is padded at its end with weights of zero, which change no sum: SiLU(0) * 0
is 0. So any width is served, and a rank's rows start where the hardware's copies may.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from nanovllm.kernels import Kernels
from nanovllm.kernels.gemm import decode, skinny
from nanovllm.kernels.gemm.choice import LIBRARY, Gemm, GemmConfig
from nanovllm.kernels.gemm.dispatch import matmul
from nanovllm.layers.weights import CheckpointWeight, Shard, WeightedModule, parameter, whole
from nanovllm.parallel.group import TensorParallelGroup


class ParallelLinear(WeightedModule):
    """x [T, in] @ weight [out, in]^T + bias [out], whatever in and out are of the whole.

    It is found by a walk over model.modules(): `kind` and its shape say which entry of the GEMM table it takes
    (kernels/gemm/choice.py), and `configs` holds what was chosen. The fused forms do the same as separate kernels,
    and take these where the layer has a bias or the choice for that number of rows cannot fuse.
    """

    def __init__(
        self, kind: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device, *,
        bias: bool = False, adds_bias: bool = True,
    ) -> None:  # fmt: skip
        """kind: one of choice.KINDS. weight [rows, columns], bias [rows]. adds_bias: False leaves `bias` to the
        consumer of the result."""
        super().__init__()
        self.kind = kind
        self.weight = parameter(rows, columns, dtype=dtype, device=device)
        self.bias = parameter(rows, dtype=dtype, device=device) if bias else None
        self.adds_bias = adds_bias
        self.takes_parts = True
        """The consumer adds up sums over parts of K; where it is not a ReduceAddNorm the model says False."""
        self.configs: Mapping[int, GemmConfig] = {}
        """Numbers of rows that have a choice of their own; all others go to the library."""
        self.pdl_rows: set[int] = set()
        """Numbers of rows that a kernel of our own multiplies, after which PDL gains. One set for
        the layer's life: the norm that consumes its result holds it too."""

    def gemm(self, fused: bool) -> Gemm:
        """Its name in the GEMM table. fused: see Gemm."""
        n, k = self.weight.shape
        return Gemm(self.kind, n, k, str(self.weight.dtype).removeprefix("torch."), fused)

    def use(self, configs: Mapping[int, GemmConfig]) -> None:
        """Takes what is chosen, by the number of rows; the library where the consumer takes no parts of a sum."""
        configs = {rows: config for rows, config in configs.items() if self.takes_parts or config.parts == 1}
        self.configs = configs
        self.pdl_rows.clear()
        self.pdl_rows.update(rows for rows, config in configs.items() if config.is_own)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] @ weight^T: [T, out], or float32 [parts, T, out], sums over parts of `in`, where the choice says
        so: only layers whose result goes to a ReduceAddNorm have such a choice."""
        return matmul(x, self.weight, self.configs.get(x.shape[0], LIBRARY))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out], or float32 [parts, T, out] as `matmul`."""
        y = self.matmul(x)
        if self.bias is not None and self.adds_bias:
            (y if y.dim() == 2 else y[0]).add_(self.bias)
        return y

    def fuses(self, rows: int) -> GemmConfig | None:
        """The choice for so many rows where it computes norm, activation and residual too."""
        config = self.configs.get(rows)
        if config is None or not config.is_skinny or (self.bias is not None and self.adds_bias):
            return None
        return config

    def forward_normed(self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, kernels: Kernels) -> torch.Tensor:
        """RMSNorm of x [T, in] with norm_weight [in], then this layer: [T, out]."""
        config = self.fuses(x.shape[0])
        if config is None:
            return self(kernels.rms_norm(x, norm_weight, eps))
        return skinny.norm_linear(x, norm_weight, eps, self.weight, config)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual [T, out] += this layer of x [T, in], in place; returns residual. For one rank alone."""
        config = self.fuses(x.shape[0])
        if config is not None:
            return skinny.linear_residual(x, self.weight, residual, config)
        if self.bias is not None and self.adds_bias:
            residual.add_(self.bias)
        return residual.addmm_(x, self.weight.t())


_ALIGNMENT = 8
"""Elements; what our kernels ask of the inputs of a layer."""


def part_of(width: int, group: TensorParallelGroup, multiple: int = _ALIGNMENT) -> tuple[int, int, int]:
    """A rank's part of a split width: its size (the same on all ranks, of this `multiple`), where it begins, how much
    of it is no padding."""
    size = -(-width // (group.size * multiple)) * multiple
    begin = min(width, group.rank * size)
    return size, begin, min(size, width - begin)


class MergedColumnParallelLinear(ParallelLinear):
    """Several column-parallel projections of the same input as one matrix, each split over the ranks.

    [T, in] -> [T, sum of this rank's share of each output].
    """

    def __init__(
        self, in_features: int, outputs: dict[str, int], group: TensorParallelGroup, dtype: torch.dtype,
        device: torch.device, *, kind: str = "gate_up", bias: bool = False,
    ) -> None:  # fmt: skip
        """`outputs`: name in the checkpoint -> whole number of outputs, in the order of the result's columns."""
        self.outputs = outputs
        self.parts = [part_of(width, group) for width in outputs.values()]
        super().__init__(kind, sum(size for size, _, _ in self.parts), in_features, dtype, device, bias=bias)
        for tensor in (self.weight, self.bias):
            for target, (_, _, valid) in self._targets(tensor):
                target[valid:].zero_()

    def forward_normed_silu_mul(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, kernels: Kernels
    ) -> torch.Tensor:
        """RMSNorm of x [T, in] with norm_weight [in], this layer as gate and up, SiLU(gate) * up: [T, out / 2]."""
        config = self.fuses(x.shape[0])
        if config is None:
            return self.forward_silu_mul(kernels.rms_norm(x, norm_weight, eps), kernels)
        return skinny.norm_linear_silu_mul(x, norm_weight, eps, self.weight, config)

    def forward_silu_mul(self, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """This layer as gate and up, SiLU(gate) * up: [T, in] -> [T, out / 2]."""
        config = self.configs.get(x.shape[0], LIBRARY)
        if config.kernel == "decode" and self.bias is None:
            return decode.linear_silu_mul(x, self.weight, config)
        return kernels.silu_mul(self(x))

    def _targets(self, tensor: torch.Tensor | None) -> Iterator[tuple[torch.Tensor, tuple[int, int, int]]]:
        """Of weight or bias this rank's rows of each output, and which part they are."""
        if tensor is not None:
            yield from zip(tensor.split([size for size, _, _ in self.parts]), self.parts, strict=True)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is None:
                continue
            for (name, width), (target, (_, begin, valid)) in zip(
                self.outputs.items(), self._targets(tensor), strict=True
            ):
                shape = (width, *target.shape[1:])
                yield CheckpointWeight(f"{prefix}.{name}.{kind}", shape, (Shard(target[:valid], 0, begin),))


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
        self, in_features: int, heads: HeadSplit, head_dim: int, dtype: torch.dtype, device: torch.device, *,
        bias: bool = False, adds_bias: bool = True,
    ) -> None:  # fmt: skip
        rows = (heads.local_heads + 2 * heads.local_kv_heads) * head_dim
        super().__init__("qkv", rows, in_features, dtype, device, bias=bias, adds_bias=adds_bias)
        self.heads = heads
        self.head_dim = head_dim

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
    the next ReduceAddNorm. Rank 0 alone adds the bias."""

    def __init__(
        self, in_features: int, out_features: int, group: TensorParallelGroup, dtype: torch.dtype,
        device: torch.device, *, kind: str = "down", bias: bool = False, multiple: int = _ALIGNMENT,
    ) -> None:  # fmt: skip
        """multiple: of which a rank's share of the inputs is; 1 where the ranks divide them and none may be padded."""
        size, self.begin, self.valid = part_of(in_features, group, multiple)
        super().__init__(kind, out_features, size, dtype, device, bias=bias, adds_bias=group.rank == 0)
        self.in_features = in_features
        self.weight[:, self.valid :].zero_()

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        shard = Shard(self.weight[:, : self.valid], 1, self.begin)
        yield CheckpointWeight(f"{prefix}.weight", (self.weight.shape[0], self.in_features), (shard,))
        if self.bias is not None:
            yield whole(f"{prefix}.bias", self.bias)
