"""Data that says how each parameter gets its shard of the checkpoint.

Every layer lists the checkpoint tensors that it is made of and, for each, which range of it lands where in this rank's
parameters. Loading, checking for missing or surplus names, dummy weights and live weight updates all walk this list.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from nanovllm.kernels.fp8.reference import BLOCK, quantize_blocks, quantize_channels

PIECE_BYTES = 4 << 20
"""Copied between two reports of progress. 32 readers of one disk (4 ranks) pass 128 MB before the first of them has
anything to report, so 60 s without progress means less than 2 MB/s."""


class TensorSource(Protocol):
    """A whole checkpoint tensor of which ranges can be read: a torch.Tensor, or one in a file."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor: ...


class DerivedTensor(NamedTuple):
    """A TensorSource that is computed in the ranges that are asked for."""

    shape: torch.Size
    dtype: torch.dtype
    narrow: Callable[[int, int, int], torch.Tensor]
    """(dim, start, length) -> that range."""


class Packing(NamedTuple):
    """Form in files of a part of a weight that ranks hold in another way (models/packed_tensors.py)."""

    dim: int
    """Dimension of its columns; those before it are the same."""
    tail: tuple[int, ...]
    """Dimensions in the file, from `dim` on."""
    dtype: torch.dtype
    each: int
    """Numbers of the file along `dim` that make one of ours."""
    pack: Callable[[torch.Tensor], torch.Tensor]
    """Rows [..., *tail], or a range of whole `each` of them -> ours."""
    fault: Callable[[torch.Tensor], str] = lambda part: ""
    """Fault of these values; "": none."""
    rounding: "Rounding | None" = None
    """None: it is not made of wide matrices."""


class Rounding(NamedTuple):
    """Rule by which a part of a packed weight is made of the matrix in a wide type."""

    columns: int
    """Columns of the matrix."""
    ends: tuple[str, str]
    """End of the part's name, and what the matrix has in its place."""
    of_wide: Callable[[torch.Tensor], torch.Tensor]
    """Rows [..., columns], or a range of whole 128 of them -> what a file has."""


class PackedTensor(NamedTuple):
    """A tensor of a checkpoint, of which a packed weight is made."""

    name: str
    held: torch.Tensor
    """View of the rank's, [rows, columns / each, ...]."""
    each: int | None
    """Columns of one; 0: all. None: it is one number, and `held` is [rows]."""
    packing: Packing | None = None
    is_scale: bool = False


def turned(source: TensorSource) -> DerivedTensor:
    """A tensor with three dimensions, of which the last two are exchanged."""
    shape = torch.Size((source.shape[0], *source.shape[:0:-1]))
    return DerivedTensor(
        shape, source.dtype, lambda dim, start, length: source.narrow((0, 2, 1)[dim], start, length).transpose(1, 2)
    )


class Cut(NamedTuple):
    """Range of a checkpoint's matrix [out, in] that a rank keeps, and its place in the rank's own matrix."""

    dim: int
    place: int
    """First row or column of the range in the rank's matrix, along `dim`."""
    start: int
    """First row or column of the range in the whole matrix."""
    length: int

    def shard(self, matrix: torch.Tensor, scales: "Scales | None" = None, lead: int = 0) -> "Shard":
        """The shard that loads this range of the rank's `matrix`, behind so many leading dimensions."""
        dim = lead + self.dim
        return Shard(matrix.narrow(dim, self.place, self.length), dim, self.start, scales)


def moved(cuts: Iterable[Cut], place: int, start: int) -> Iterator[Cut]:
    """Cuts further on: in the rank's matrix, and in the whole one."""
    return (cut._replace(place=cut.place + place, start=cut.start + start) for cut in cuts)


class Piece(NamedTuple):
    """A matrix of the checkpoint of which a layer's is made."""

    name: str
    """Name of its module below the layer's path; "": the layer itself."""
    shape: tuple[int, int]
    cuts: tuple[Cut, ...]

    def path(self, prefix: str) -> str:
        return f"{prefix}.{self.name}" if self.name else prefix


@dataclass(frozen=True)
class Scales:
    """The scales of the rows of a quantised target, to be made where its source is not quantised."""

    values: torch.Tensor
    """float32 [rows / rows_each, columns / 128], or [..., 1] for whole rows; dimensions of rows are the target's."""
    rows_each: int = 1
    in_blocks: bool = False
    """A scale is that of a block of 128 x 128 of the whole matrix; False: of a row."""


@dataclass(frozen=True)
class Shard:
    """`target` takes [start, start + length) along `dim` of the checkpoint tensor.

    A target with one dimension more than that tensor has `dim` cut in two, so that rows may land in another order: see
    deinterleaved.
    """

    target: torch.Tensor
    dim: int
    start: int
    scales: Scales | None = None

    def length(self, num_dims: int) -> int:
        """Length of the range in a checkpoint tensor with `num_dims` dimensions."""
        extra = self.target.dim() - num_dims
        return self.target.shape[self.dim : self.dim + extra + 1].numel()


def deinterleaved(shard: Shard, head_dim: int, rotary_dim: int) -> Iterator[Shard]:
    """Splits a shard of whole heads' rows, which the checkpoint rotates in pairs (2i, 2i + 1), one shard after the
    other: the first elements of a head's pairs land before the second ones, as our rotation pairs i with i + rotary_dim
    / 2."""
    for first in range(0, shard.target.shape[0], head_dim):
        rotated, rest = slice(first, first + rotary_dim), slice(first + rotary_dim, first + head_dim)
        scales = None if shard.scales is None else shard.scales.values
        of_pairs = None if scales is None else Scales(_pairs(scales[rotated]))
        yield Shard(_pairs(shard.target[rotated]), 0, shard.start + first, of_pairs)
        if rotary_dim < head_dim:
            of_rest = None if scales is None else Scales(scales[rest])
            yield Shard(shard.target[rest], 0, shard.start + first + rotary_dim, of_rest)


def _pairs(rows: torch.Tensor) -> torch.Tensor:
    """[2n, ...] -> a view [n, 2, ...]: row i beside row i + n."""
    return rows.unflatten(0, (2, -1)).transpose(0, 1)


@dataclass(frozen=True)
class CheckpointWeight:
    """One tensor of the checkpoint, and where this rank keeps its parts."""

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    offset: float = 0.0
    """Number added after the copy: 1 where a checkpoint holds weight - 1."""
    scaled_by: tuple[str, ...] = ()
    """Names of the tensors that a quantised checkpoint brings with this one. Where this comes wide, they do not."""
    is_scale: bool = False
    """Positive numbers; a dimension of 1 at the end of their shape may be missing."""
    packing: Packing | None = None
    """Form of a tensor that files hold in another way; `shape` is ours."""
    may_be_turned: bool = False
    """Checkpoints have it with its last two dimensions exchanged, too."""

    def check(self, source: TensorSource) -> None:
        """Raises ValueError where shape or type are not what the configuration gives, or a scale is no scale."""
        found, wanted = tuple(self._as_here(source).shape), self.shape
        if found != wanted and not (self.is_scale and _core(found) == _core(wanted)):
            raise ValueError(f"weight {self.name!r} has shape {found}, the configuration needs {wanted}")
        if self.is_scale:
            if not source.dtype.is_floating_point:
                raise ValueError(f"weight {self.name!r} has type {source.dtype}: must be of floating-point numbers")
            values = all_of(source).float()
            bad = values[~(values > 0) | values.isinf()]
            if bad.numel():
                raise ValueError(f"weight {self.name!r} holds {bad[0].item()}: scales must be finite and > 0")
        elif self.shards and source.dtype != (held := self.shards[0].target.dtype):
            is_number = source.dtype.is_floating_point and source.dtype.itemsize > 1
            if is_number and held.itemsize == 1 and any(shard.scales is None for shard in self.shards):
                raise ValueError(f"weight {self.name!r} has type {source.dtype}: must be {held}, for it gets no scales")
            if not is_number and (held.is_floating_point or source.dtype.itemsize == 1):
                bound = "a quantization_config that says so is missing"
                raise ValueError(f"weight {self.name!r} has type {source.dtype}: {bound}")

    def _as_here(self, source: TensorSource) -> TensorSource:
        """The source in the order of our dimensions; in the file's order where both would do."""
        return turned(source) if self.may_be_turned and tuple(source.shape) != self.shape else source

    def is_wide(self, source: TensorSource) -> bool:
        """Whether this is to be quantised on its way."""
        return any(shard.scales is not None for shard in self.shards) and source.dtype.itemsize > 1

    def parts(self, source: TensorSource) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's targets in pieces of about PIECE_BYTES (whole where `source` is in memory), each with its range
        of the source. Call `check` first."""
        self.check(source)
        for shard in self.shards:
            length = shard.length(len(self.shape))
            if length:
                part = self._as_here(source).narrow(shard.dim, shard.start, length).view(shard.target.shape)
                is_here = isinstance(source, torch.Tensor) or part.is_cuda
                rows = len(part) if is_here else max(1, PIECE_BYTES // max(1, part[0].nbytes))
                yield from zip(shard.target.split(rows), part.split(rows), strict=True)

    def contiguous_target(self) -> torch.Tensor | None:
        """The whole tensor as it is in one of this rank's parameters; None where it is there in part, in another order,
        with padding between its rows, or with an offset."""
        first, rows = self.shards[0].target, 0
        for shard in self.shards:
            target = shard.target
            if target.shape[1:] != self.shape[1:] or not target.is_contiguous() or self.offset:
                return None
            if target.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
                return None
            follows = target.storage_offset() == first.storage_offset() + rows * first[:1].numel()
            if not follows or (shard.dim == 0 and shard.start != rows):
                return None
            rows += target.shape[0]
        return first.as_strided(self.shape, first.stride()) if rows == self.shape[0] else None

    def load(
        self, source: TensorSource, progress: Callable[[], None] = lambda: None,
        stage: Callable[[torch.Tensor], torch.Tensor] = lambda piece: piece,
    ) -> None:  # fmt: skip
        """Copies this rank's parts, after `check`; each piece passes through `stage`. `progress`: called after each."""
        if self.is_scale and not _core(self.shape):
            self.check(source)
            for shard in self.shards:
                shard.target.copy_(all_of(source).flatten())
        elif self.is_wide(source):
            self.check(source)
            for shard in self.shards:
                _quantize(shard, source, progress, stage)
        else:
            for target, piece in self.parts(source):
                target.copy_(stage(piece), non_blocking=True)
                progress()
        if self.offset:
            for shard in self.shards:
                shard.target.add_(self.offset)


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape without the dimensions of 1 at its end."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def all_of(source: TensorSource) -> torch.Tensor:
    """The whole tensor [...], of which a scalar is [1]."""
    if isinstance(source, torch.Tensor):
        return source.reshape(source.shape or 1)
    return source.narrow(0, 0, source.shape[0] if source.shape else 1)


def _quantize(
    shard: Shard, source: TensorSource, progress: Callable[[], None], stage: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Fills target and scales from whole rows of a wide `source`: a scale depends on all columns, of which other ranks
    may hold some."""
    target, scales = shard.target, shard.scales
    assert scales is not None
    if len(source.shape) == 3:
        for index in range(source.shape[0]):
            of_one = replace(scales, values=scales.values[index])
            one = Shard(target[index], shard.dim - 1, shard.start, of_one)
            _quantize(one, source.narrow(0, index, 1)[0], progress, stage)
        return
    rows = source.shape[0]
    length = shard.length(2)
    if not length:
        return
    first, end = (shard.start, shard.start + length) if shard.dim == 0 else (0, rows)
    begin = first // BLOCK * BLOCK
    wide = source.narrow(0, begin, min(rows, -(-end // BLOCK) * BLOCK) - begin)
    is_flat = target.dim() == 2  # else rows land in another order, all at once
    step = max(BLOCK, PIECE_BYTES // wide[0].nbytes // BLOCK * BLOCK) if is_flat else len(wide)
    for at in range(begin, begin + len(wide), step):
        piece = stage(wide[at - begin : at - begin + step]).to(target.device)
        low, high = max(first, at), min(end, at + len(piece))
        values, found = (quantize_blocks if scales.in_blocks else quantize_channels)(piece)
        values = values[low - at : high - at]
        found = found[torch.arange(low - at, high - at, scales.rows_each) // (BLOCK if scales.in_blocks else 1)]
        if shard.dim == 1:
            values = values.narrow(1, shard.start, length)
            found = found.narrow(1, shard.start // BLOCK, -(-length // BLOCK)) if scales.in_blocks else found
        if is_flat:
            target[low - first : high - first].copy_(values)
            scales.values[(low - first) // scales.rows_each :][: len(found)].copy_(found)
        else:
            target.copy_(values.view(target.shape))
            scales.values.copy_(found.view(scales.values.shape))
        progress()


def joined(weights: Iterable[CheckpointWeight]) -> Iterator[CheckpointWeight]:
    """Weights, of which those of one name are one, whose shards are those of all."""
    found: dict[str, CheckpointWeight] = {}
    for weight in weights:
        before = found.get(weight.name)
        found[weight.name] = weight if before is None else replace(before, shards=(*before.shards, *weight.shards))
    yield from found.values()


def whole(name: str, parameter: torch.Tensor, offset: float = 0.0) -> CheckpointWeight:
    """A tensor that every rank keeps whole, in a parameter [...] of its shape."""
    return CheckpointWeight(name, tuple(parameter.shape), (Shard(parameter, 0, 0),), offset)


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class WeightedModule(nn.Module):
    """A layer that knows its checkpoint tensors."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """forward, and hooks on it; without what else nn.Module looks for, some eight times a layer and step."""
        if self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*arguments, **options)
        return self.forward(*arguments, **options)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        """The tensors under `prefix` (a module path as in the checkpoint, without the trailing dot)."""
        raise NotImplementedError
