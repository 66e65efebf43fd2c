"""Split of a layer's attention heads over the ranks."""

import math
from dataclasses import dataclass, replace

import torch

from nanovllm.layers.weights import CheckpointWeight, Cut
from nanovllm.model_config import LayerSpec, ModelConfig


@dataclass(frozen=True)
class HeadSplit:
    """Attention heads that a rank computes, when `num_heads` query heads share `num_kv_heads` key/value heads.

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
        """Flag for each of this rank's key/value heads: True where this is the first copy of that head over all ranks,
        so that sums count it once."""
        before = -1 if self.rank == 0 else replace(self, rank=self.rank - 1).kv_head(self.local_kv_heads - 1)
        heads = [self.kv_head(local) for local in range(self.local_kv_heads)]
        return [head > held for head, held in zip(heads, [before, *heads], strict=False)]

    def query_cuts(self, rows: int) -> tuple[Cut, ...]:
        """This rank's range of the rows of all query heads, `rows` for each head."""
        return (Cut(0, 0, self.first_head * rows, self.local_heads * rows),)

    def part_cuts(self, rows: int, part: int, parts: int) -> tuple[Cut, ...]:
        """This rank's heads of a projection that has `parts` parts of `rows` rows for each query head: part `part`."""
        heads = range(self.local_heads)
        return tuple(Cut(0, i * rows, ((self.first_head + i) * parts + part) * rows, rows) for i in heads)

    def kv_cuts(self, rows: int, place: int = 0) -> tuple[Cut, ...]:
        """This rank's ranges of the rows of all key/value heads, `rows` for each head; its own begin at row `place`."""
        runs = self.kv_head_runs()
        return tuple(Cut(0, place + local * rows, head * rows, count * rows) for local, head, count in runs)

    def query_weight(self, name: str, target: torch.Tensor) -> CheckpointWeight:
        """A checkpoint tensor [rows of all query heads, ...], of which `target` holds this rank's heads."""
        rows = target.shape[0] // self.local_heads
        shape = (self.num_heads * rows, *target.shape[1:])
        return CheckpointWeight(name, shape, tuple(cut.shard(target) for cut in self.query_cuts(rows)))

    def kv_weight(self, name: str, target: torch.Tensor) -> CheckpointWeight:
        """A checkpoint tensor [rows of all key/value heads, ...], of which `target` holds this rank's heads."""
        rows = target.shape[0] // self.local_kv_heads
        shape = (self.num_kv_heads * rows, *target.shape[1:])
        return CheckpointWeight(name, shape, tuple(cut.shard(target) for cut in self.kv_cuts(rows)))


def heads_of(config: ModelConfig, layer: LayerSpec, rank: int, size: int) -> HeadSplit:
    """Heads of one of `size` ranks in this layer."""
    return HeadSplit(layer.num_heads or config.num_attention_heads, layer.num_kv_heads, rank, size)
