"""New weights on their way to replicas."""

import pickle
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_BUCKET_BYTES = 64 << 20  # of new weights in one message


def buckets(weights: "Iterable[tuple[str, torch.Tensor]]") -> Iterable[bytes]:
    """(name, tensor) pairs, pickled, about _BUCKET_BYTES at a time."""
    from nanovllm.transfer.buckets import grouped  # torch comes in here, with the tensors

    copies = ((name, _to_send(tensor)) for name, tensor in weights)
    return map(pickle.dumps, grouped(copies, _BUCKET_BYTES, lambda pair: pair[1].nbytes))


def _to_send(tensor: "torch.Tensor") -> "torch.Tensor":
    """`tensor` on the CPU, in memory of its own: a view, pickled, takes along all that it is a view of. Numbers of a
    byte go as bytes, since torch does not read them back."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    tensor = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
