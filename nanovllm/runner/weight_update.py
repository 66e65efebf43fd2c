"""New values for all weights of one rank, which come a few at a time while the engine lives."""

from collections.abc import Iterable

import torch

from nanovllm.layers.weights import CheckpointWeight
from nanovllm.models.checkpoint import DTYPES
from nanovllm.models.names import CheckpointNames


def named_tensor(item: object) -> tuple[str, torch.Tensor]:
    """`item` as a name and a tensor whose values are there. Raises ValueError saying what it is instead."""
    if not isinstance(item, (tuple, list)) or len(item) != 2 or not isinstance(item[0], str):
        found = repr(item) if isinstance(item, str) else type(item).__name__
        raise ValueError(f"load_weights: must be given (name, tensor) pairs, such as a dict's items(), found {found}")
    name, tensor = item
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"load_weights: weight {name!r} must be a torch.Tensor, found {type(tensor).__name__}")
    if tensor.is_meta or tensor.layout is not torch.strided:
        kind = "on the meta device" if tensor.is_meta else tensor.layout
        raise ValueError(f"load_weights: weight {name!r} is {kind}: must be a dense tensor with data")
    return name, tensor


class WeightUpdate:
    """The weights that are still awaited, and what may come for them.

    Ranks await the same names and shapes, so one can check for all: a worker that raised would be gone.
    """

    def __init__(self, weights: Iterable[CheckpointWeight], head_is_tied: bool, spelling: CheckpointNames) -> None:
        """spelling: of the names that come."""
        self._spelling = spelling
        self._awaited = {weight.name: weight for weight in weights}
        self._head_is_tied = head_is_tied

    def check(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError for an unknown or repeated name, a shape or a type that cannot be loaded."""
        names = set()
        for name, tensor in self._spelling.select(tensors):
            if name == "lm_head.weight" and self._head_is_tied:
                continue
            if name not in self._awaited or name in names:
                raise ValueError(f"load_weights: surplus weight {name!r}")
            if tensor.dtype not in DTYPES.values():
                known = ", ".join(DTYPES)
                raise ValueError(f"load_weights: weight {name!r} has type {tensor.dtype}: must be one of {known}")
            self._awaited[name].check(tensor)
            names.add(name)

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Copies whole tensors, which `check` has seen, into the rank's parameters, in place."""
        for name, tensor in self._spelling.select(tensors):
            if name in self._awaited:  # not the copy of a tied head
                self._awaited.pop(name).load(tensor)

    def finish(self) -> None:
        """Raises ValueError naming the weights that did not come."""
        if self._awaited:
            names = ", ".join(sorted(self._awaited)[:5])
            raise ValueError(f"load_weights: {len(self._awaited)} missing: {names}")
