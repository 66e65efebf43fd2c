"""New weights on their way to engines elsewhere."""

import pickle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_BUCKET_BYTES = 64 << 20  # of new weights in one frame


class Bucketing:
    """(name, tensor) pairs, pickled about _BUCKET_BYTES at a time."""

    def __init__(self) -> None:
        self._pairs: list[tuple[str, torch.Tensor]] = []
        self._size = 0

    def put(self, name: str, tensor: "torch.Tensor") -> bytes | None:
        """Takes one; returns a bucket that it fills."""
        copy = _to_send(tensor)
        full = self.take() if self._size + copy.nbytes > _BUCKET_BYTES else None
        self._pairs.append((name, copy))
        self._size += copy.nbytes
        return full

    def take(self) -> bytes | None:
        """Takes the bytes that are there; None if there are none."""
        pairs, self._pairs, self._size = self._pairs, [], 0
        return pickle.dumps(pairs) if pairs else None


def _to_send(tensor: "torch.Tensor") -> "torch.Tensor":
    """`tensor` on the CPU, in memory of its own: a view, pickled, takes along all that it is a view of. Numbers of a
    byte go as bytes, since torch does not read them back."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    tensor = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
