"""Several tensors in one run of bytes, and what says where each of them is."""

import base64
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from nanovllm.errors import refuse

Item = TypeVar("Item")
NamedTensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Entry:
    """A tensor by its checkpoint name."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "Entry":
        return cls(name, tensor.dtype, tuple(tensor.shape))


def described(entries: list[Entry]) -> dict[str, Any]:
    """The entries as the fields names, dtype_names and shapes of a message, in JSON's types."""
    return {
        "names": [entry.name for entry in entries],
        "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in entries],
        "shapes": [list(entry.shape) for entry in entries],
    }


def entries_of(message: dict[str, Any]) -> list[Entry]:
    """The inverse. Raises ValueError naming the field that is missing, of another length or of unknown content."""
    names, dtypes, shapes = (message.get(field) for field in ("names", "dtype_names", "shapes"))
    for field, value in (("names", names), ("dtype_names", dtypes), ("shapes", shapes)):
        if not isinstance(value, list) or len(value) != len(names or ()):
            refuse(field, value, "a list with an entry for each tensor")
    found = []
    for name, dtype_name, shape in zip(names or (), dtypes or (), shapes or (), strict=True):
        dtype = getattr(torch, dtype_name, None) if isinstance(dtype_name, str) else None
        if not isinstance(dtype, torch.dtype):
            refuse("dtype_names", dtype_name, "names of torch's types, such as 'bfloat16'")
        if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
            refuse("shapes", shape, "lists of sizes")
        found.append(Entry(str(name), dtype, tuple(shape)))
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [nbytes]: the tensor's memory, or that of a contiguous copy. A DTensor is gathered: all processes of its
    mesh must get here."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def unpacked(memory: torch.Tensor, entries: list[Entry]) -> NamedTensors:
    """Views of `memory` uint8 [at least their sum], where the entries lie one after the other."""
    begin = 0
    for entry in entries:
        part = memory[begin : begin + entry.nbytes]
        begin += entry.nbytes
        if part.storage_offset() % entry.dtype.itemsize:
            part = part.clone()  # a view of a wider type must be aligned
        yield entry.name, part.view(entry.dtype).view(entry.shape)


def grouped(
    items: Iterable[Item], limit: int, nbytes: Callable[[Item], int], within: bool = False
) -> Iterator[list[Item]]:
    """Items in order, cut after each with which the sum of bytes passes `limit`; within: before it, where the group
    has another."""
    group: list[Item] = []
    size = 0
    for item in items:
        added = nbytes(item)
        if within and group and size + added > limit:
            yield group
            group, size = [], 0
        group.append(item)
        size += added
        if size > limit and not within:
            yield group
            group, size = [], 0
    if group:
        yield group


def from_base64(name: str, text: Any, size: int) -> bytes:
    """The `size` bytes that `text`, the entry `name` of a message, says in base64. Raises ValueError."""
    try:
        found = base64.b64decode(text or "", validate=True)
    except (TypeError, ValueError):
        found = b""
    if not isinstance(text, str) or len(found) != size:
        refuse(name, text, f"{size} bytes in base64")
    return found
