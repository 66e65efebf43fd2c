"""New weights on their way to replicas."""

import pickle
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_BUCKET_BYTES = 64 << 20  # of new weights in one message


def buckets(weights: "Iterable[tuple[str, torch.Tensor]]") -> Iterable[bytes]:
    """(name, tensor) pairs, pickled, about _BUCKET_BYTES at a time."""
    from nanovllm.executor.base import to_send  # torch comes in here, with the tensors

    bucket: list[Any] = []
    size = 0
    for name, tensor in weights:
        copy = to_send(tensor)
        bucket.append((name, copy))
        size += copy.nbytes
        if size >= _BUCKET_BYTES:
            yield pickle.dumps(bucket)
            bucket, size = [], 0
    yield pickle.dumps(bucket)
