"""How a parameter gets its shard: as data.

Every layer lists the checkpoint tensors that it is made of and, for each, which range of it lands where in this rank's
parameters. Loading, checking for missing or surplus names, dummy weights and live weight updates all walk this list.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn


class TensorSource(Protocol):
    """A whole checkpoint tensor of which ranges can be had: a torch.Tensor, or one that lies in a file."""

    @property
    def shape(self) -> torch.Size: ...

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Shard:
    """`target` takes [start, start + target.shape[dim]) along `dim` of the checkpoint tensor."""

    target: torch.Tensor
    dim: int
    start: int


@dataclass(frozen=True)
class CheckpointWeight:
    """One tensor of the checkpoint, and where this rank keeps its parts."""

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    def check(self, source: TensorSource) -> None:
        """Raises ValueError where the shape is not the one the configuration gives."""
        if tuple(source.shape) != self.shape:
            found = tuple(source.shape)
            raise ValueError(f"weight {self.name!r} has shape {found}, the configuration needs {self.shape}")

    def parts(self, source: TensorSource) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each of this rank's targets that holds anything, and its range of `source`; after `check`."""
        self.check(source)
        for shard in self.shards:
            length = shard.target.shape[shard.dim]
            if length:
                yield shard.target, source.narrow(shard.dim, shard.start, length)

    def load(self, source: TensorSource) -> None:
        """Copies this rank's parts, after `check`."""
        for target, part in self.parts(source):
            target.copy_(part, non_blocking=True)


def whole(name: str, parameter: torch.Tensor) -> CheckpointWeight:
    """A tensor that every rank keeps whole."""
    return CheckpointWeight(name, tuple(parameter.shape), (Shard(parameter, 0, 0),))


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class WeightedModule(nn.Module):
    """A layer that knows its checkpoint tensors."""

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """The tensors under `prefix` (a module path as in the checkpoint, without the trailing dot)."""
        raise NotImplementedError
