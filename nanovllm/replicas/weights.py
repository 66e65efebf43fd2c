"""New weights on their way to replicas."""

import pickle
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_BUCKET_BYTES = 64 << 20  # of new weights in one message


def buckets(weights: "Iterable[tuple[str, torch.Tensor]]") -> Iterable[bytes]:
    """(name, tensor) pairs, pickled, about _BUCKET_BYTES at a time."""
    bucket: list[Any] = []
    size = 0
    for name, tensor in weights:
        copy = tensor.detach().cpu().contiguous()
        if copy.untyped_storage().nbytes() > copy.nbytes:  # a view, pickled, takes along all that it is a view of
            copy = copy.clone()
        bucket.append((name, copy))
        size += copy.nbytes
        if size >= _BUCKET_BYTES:
            yield pickle.dumps(bucket)
            bucket, size = [], 0
    yield pickle.dumps(bucket)
