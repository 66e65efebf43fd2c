"""New values for the weights of one rank, which come a few at a time while the engine lives; and checksums of them."""

from collections.abc import Callable, Iterable, Sequence, Set
from hashlib import sha256

import numpy as np
import torch

from nanovllm.kernels.fp8.reference import BLOCK, FP8
from nanovllm.layers.weights import PIECE_BYTES, CheckpointWeight, Scales, Shard, TensorSource
from nanovllm.models.checkpoint import DTYPES
from nanovllm.models.names import CheckpointNames
from nanovllm.models.packed_tensors import CheckpointReader
from nanovllm.transfer.shared import FarTensor


def named_tensor(item: object, gathered: bool = True) -> tuple[str, torch.Tensor]:
    """`item` as a name and a dense tensor [...] whose values are there; a DTensor's are gathered, where that is asked
    for. Raises ValueError saying what it is instead."""
    if not isinstance(item, (tuple, list)) or len(item) != 2 or not isinstance(item[0], str):
        found = repr(item) if isinstance(item, str) else type(item).__name__
        raise ValueError(f"load_weights: must be given (name, tensor) pairs, such as a dict's items(), found {found}")
    name, tensor = item
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"load_weights: weight {name!r} must be a torch.Tensor, found {type(tensor).__name__}")
    if gathered and hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()  # a DTensor: all processes of its mesh get here
    if tensor.is_meta or tensor.layout is not torch.strided:
        kind = "on the meta device" if tensor.is_meta else tensor.layout
        raise ValueError(f"load_weights: weight {name!r} is {kind}: must be a dense tensor with data")
    return name, tensor


def _refuse_missing(names: Set[str]) -> None:
    if names:
        raise ValueError(f"load_weights: {len(names)} missing: {', '.join(sorted(names)[:5])}")


class WeightUpdate:
    """The weights that are still awaited, and what may come for them.

    Ranks await the same names and shapes, so one can check for all: a worker that raised would be gone.
    """

    def __init__(
        self, weights: Iterable[CheckpointWeight], head_is_tied: bool, spelling: CheckpointNames,
        reader: CheckpointReader, partial: bool,
    ) -> None:  # fmt: skip
        """spelling: of the names that come. reader: of `weights`. partial: some may not come."""
        self._spelling, self._reader, self._partial, self._head_is_tied = spelling, reader, partial, head_is_tied
        self._awaited = {weight.name: weight for weight in weights}

    def check(self, tensors: list[tuple[str, torch.Tensor]], are_all: bool = False) -> None:
        """Raises ValueError for an unknown or repeated name, a shape or a type that cannot be loaded; `are_all`: also
        where one is missing."""
        names: set[str] = set()
        for name, tensor in self._read(tensors):
            if name == "lm_head.weight" and self._head_is_tied:
                continue
            if name not in self._awaited or name in names:
                raise ValueError(f"load_weights: surplus weight {name!r}")
            tensor = self._as_held(name, tensor)
            if tensor.dtype not in DTYPES.values() and tensor.dtype not in self._held_as(name):
                known = ", ".join(DTYPES)
                raise ValueError(f"load_weights: weight {name!r} has type {tensor.dtype}: must be one of {known}")
            self._awaited[name].check(tensor)
            names.add(name)
            if are_all and self._awaited[name].is_wide(tensor):
                names.update(self._awaited[name].scaled_by)
        if are_all:
            _refuse_missing(self._awaited.keys() - names)

    def _read(self, tensors: Sequence[tuple[str, TensorSource]]) -> list[tuple[str, TensorSource]]:
        return self._reader.read(self._spelling.select(tensors))

    def _held_as(self, name: str) -> set[torch.dtype]:
        return {shard.target.dtype for shard in self._awaited[name].shards}

    def _as_held(self, name: str, tensor: TensorSource) -> TensorSource:
        """Bytes as the e4m3 that they are where the weight is (host/weights.py)."""
        if isinstance(tensor, (torch.Tensor, FarTensor)) and tensor.dtype == torch.uint8 and FP8 in self._held_as(name):
            return tensor.view(FP8)
        return tensor

    def load(self, tensors: Sequence[tuple[str, TensorSource]]) -> None:
        """Copies whole tensors, which `check` has seen, into the rank's parameters, in place."""
        for name, tensor in self._read(tensors):
            if name in self._awaited:  # not the copy of a tied head
                tensor = self._as_held(name, tensor)
                weight = self._awaited.pop(name)
                if weight.is_wide(tensor):
                    for scale in weight.scaled_by:
                        self._awaited.pop(scale, None)
                weight.load(tensor)

    def expect_no_more(self) -> None:
        """All came another way."""
        self._awaited.clear()

    def finish(self) -> None:
        """Raises ValueError naming the weights that did not come."""
        if not self._partial:
            _refuse_missing(self._awaited.keys())


ShardChecksums = tuple[int, int, np.ndarray]
"""Dimension of the checkpoint tensor, first index along it, and for each index from there on a number, int64, that
depends on every bit of what is held there."""


def weight_checksums(
    weights: Iterable[CheckpointWeight], progress: Callable[[], None] = lambda: None
) -> dict[str, list[ShardChecksums]]:
    """Checksums of one rank's shards by checkpoint name. `progress`: called after each piece."""
    found: dict[str, list[ShardChecksums]] = {}
    for weight in weights:
        found[weight.name] = []
        for shard in weight.shards:
            length = shard.length(len(weight.shape))
            if not length:
                continue
            shape = [*weight.shape[: shard.dim], length, *weight.shape[shard.dim + 1 :]]
            lines = shard.target.reshape(shape).movedim(shard.dim, 0).reshape(length, -1)
            numbers = []
            for piece in lines.split(max(1, PIECE_BYTES // max(1, lines[0].nbytes))):
                numbers.append(_mixed(piece).cpu())
                progress()
            if shard.scales is not None and not weight.scaled_by:  # a checkpoint's own are there by name
                found.setdefault(f"{weight.name}_scale", []).append(_scale_checksums(shard, shard.scales, length))
            found[weight.name].append((shard.dim, shard.start, torch.cat(numbers).numpy()))
    return found


def _scale_checksums(shard: Shard, scales: Scales, length: int) -> ShardChecksums:
    """Checksums of scales made while loading: by row, or by block where a rank holds a range of columns."""
    if shard.dim == 1 and scales.in_blocks:
        return 1, shard.start // BLOCK, _mixed(scales.values.T).cpu().numpy()
    rows = scales.values.reshape(-1, scales.values.shape[-1]).repeat_interleave(scales.rows_each, 0)
    first, rows = (shard.start, rows[:length]) if shard.dim == 0 else (0, rows)
    return 0, first, _mixed(rows).cpu().numpy()


def _mixed(lines: torch.Tensor) -> torch.Tensor:
    """int64 by line: a sum of hashes of bits and place (steps of splitmix64, Steele et al., OOPSLA 2014)."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[lines.element_size()]
    x = lines.contiguous().view(kind).long() + torch.arange(lines.shape[1], device=lines.device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x ^ ((x >> 31) & ((1 << 33) - 1))).sum(1)


def merged_checksums(ranks: list[dict[str, list[ShardChecksums]]]) -> dict[str, str]:
    """First 16 hexadecimal digits of a SHA-256 over all ranks' numbers in their order, by checkpoint name. Raises
    RuntimeError where two ranks hold different values of one index."""
    merged: dict[str, str] = {}
    for name in ranks[0]:
        whole: dict[int, int] = {}
        for _, start, numbers in (shard for rank in ranks for shard in rank[name]):
            for index, number in enumerate(numbers.tolist(), start):
                if whole.setdefault(index, number) != number:
                    raise RuntimeError(f"weight {name!r}: ranks hold different values of index {index}")
        numbers = np.array([whole[index] for index in sorted(whole)], np.int64)
        merged[name] = sha256(numbers.tobytes()).hexdigest()[:16]
    return merged
