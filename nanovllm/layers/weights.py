"""How a parameter gets its shard: as data.

Every layer lists the checkpoint tensors that it is made of and, for each, which range of it lands where in this rank's
parameters. Loading, checking for missing or surplus names, dummy weights and live weight updates all walk this list.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

PIECE_BYTES = 4 << 20
"""Copied between two reports of progress. 32 readers of one disk (4 ranks) pass 128 MB before the first of them has
anything to report, so 60 s without progress means less than 2 MB/s."""


class TensorSource(Protocol):
    """A whole checkpoint tensor of which ranges can be read: a torch.Tensor, or one in a file."""

    @property
    def shape(self) -> torch.Size: ...

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Shard:
    """`target` takes [start, start + length) along `dim` of the checkpoint tensor.

    A target with one dimension more than that tensor has `dim` cut in two, so that rows may land in another order: see
    deinterleaved.
    """

    target: torch.Tensor
    dim: int
    start: int

    def length(self, num_dims: int) -> int:
        """Of the range, in a checkpoint tensor with `num_dims` dimensions."""
        extra = self.target.dim() - num_dims
        return self.target.shape[self.dim : self.dim + extra + 1].numel()


def deinterleaved(shard: Shard, head_dim: int, rotary_dim: int) -> Iterator[Shard]:
    """The same for rows of whole heads that a checkpoint rotates in pairs (2i, 2i + 1), one shard after the other: the
    first elements of a head's pairs land before the second ones, as our rotation pairs i with i + rotary_dim / 2."""
    for first in range(0, shard.target.shape[0], head_dim):
        head = shard.target[first : first + head_dim]
        pairs = head[:rotary_dim].unflatten(0, (2, -1)).transpose(0, 1)
        yield Shard(pairs, 0, shard.start + first)
        if rotary_dim < head_dim:
            yield Shard(head[rotary_dim:], 0, shard.start + first + rotary_dim)


@dataclass(frozen=True)
class CheckpointWeight:
    """One tensor of the checkpoint, and where this rank keeps its parts."""

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    offset: float = 0.0
    """What is added after the copy: 1 where a checkpoint holds weight - 1."""

    def check(self, source: TensorSource) -> None:
        """Raises ValueError where the shape is not the one the configuration gives."""
        if tuple(source.shape) != self.shape:
            found = tuple(source.shape)
            raise ValueError(f"weight {self.name!r} has shape {found}, the configuration needs {self.shape}")

    def parts(self, source: TensorSource) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's targets in pieces of about PIECE_BYTES, each with its range of `source`; after `check`."""
        self.check(source)
        for shard in self.shards:
            length = shard.length(len(self.shape))
            if length:
                part = source.narrow(shard.dim, shard.start, length).view(shard.target.shape)
                rows = max(1, PIECE_BYTES // max(1, part[0].nbytes))
                yield from zip(shard.target.split(rows), part.split(rows), strict=True)

    def contiguous_target(self) -> torch.Tensor | None:
        """The whole tensor as it is in this rank's parameters; None where it is there in part, in another order, with
        padding between its rows, or with an offset."""
        first, rows = self.shards[0].target, 0
        for shard in self.shards:
            target = shard.target
            if target.shape[1:] != self.shape[1:] or not target.is_contiguous() or self.offset:
                return None
            follows = target.storage_offset() == first.storage_offset() + rows * first[:1].numel()
            if not follows or (shard.dim == 0 and shard.start != rows):
                return None
            rows += target.shape[0]
        return first.as_strided(self.shape, first.stride()) if rows == self.shape[0] else None

    def load(
        self,
        source: TensorSource,
        progress: Callable[[], None] = lambda: None,
        stage: Callable[[torch.Tensor], torch.Tensor] = lambda piece: piece,
    ) -> None:
        """Copies this rank's parts, after `check`; each piece passes through `stage`. `progress`: called after each."""
        for target, piece in self.parts(source):
            target.copy_(stage(piece), non_blocking=True)
            progress()
        if self.offset:
            for shard in self.shards:
                shard.target.add_(self.offset)


def whole(name: str, parameter: torch.Tensor, offset: float = 0.0) -> CheckpointWeight:
    """A tensor that every rank keeps whole."""
    return CheckpointWeight(name, tuple(parameter.shape), (Shard(parameter, 0, 0),), offset)


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class WeightedModule(nn.Module):
    """A layer that knows its checkpoint tensors."""

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """The tensors under `prefix` (a module path as in the checkpoint, without the trailing dot)."""
        raise NotImplementedError
