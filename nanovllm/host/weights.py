"""New weights, packed for engines in other processes."""

import pickle
from collections.abc import Callable, Iterable, Iterator

import torch

from nanovllm.runner.weight_update import named_tensor

_BUCKET_BYTES = 64 << 20  # of new weights in one frame


def sent(
    weights: Iterable[tuple[str, torch.Tensor]], send: Callable[[bytes], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights and sends each as well: pickled (name, tensor) pairs, about _BUCKET_BYTES at a time. Raises
    ValueError for what is no pair of a name and a dense tensor."""
    pairs: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in map(named_tensor, weights):
        copy = _to_send(tensor)
        if pairs and size + copy.nbytes > _BUCKET_BYTES:
            send(pickle.dumps(pairs))
            pairs, size = [], 0
        pairs.append((name, copy))
        size += copy.nbytes
        yield name, tensor
    if pairs:
        send(pickle.dumps(pairs))


def _to_send(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor to the CPU, with a storage of its own: pickling a view would pickle its whole storage. Types of
    one byte are sent as uint8, since torch cannot unpickle all of them."""
    tensor = tensor.detach().cpu().contiguous()
    tensor = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
