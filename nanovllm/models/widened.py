"""Matrices that a checkpoint may have in e4m3, and ranks hold in the model's dtype: routers, and latents' projection to
keys and values, which is multiplied by from either side, head by head (layers/latent.py)."""

from collections.abc import Iterable, Iterator

import torch

from nanovllm.kernels.fp8.reference import BLOCK, FP8
from nanovllm.layers.weights import CheckpointWeight, DerivedTensor, TensorSource, all_of

_WIDE = (".kv_b_proj", ".gate")
"""Ends of their modules' names."""


def widened(tensors: Iterable[tuple[str, TensorSource]]) -> Iterator[tuple[str, TensorSource]]:
    """A checkpoint's (name, tensor) pairs, with such matrices and their scales as float32 matrices. Raises ValueError
    for one without its scales."""
    pairs = [*tensors]  # of which names may come twice: that is refused elsewhere
    given = dict(pairs)
    for name, tensor in pairs:
        path, _, last = name.rpartition(".")
        weight = given.get(f"{path}.weight") if path.endswith(_WIDE) else None
        if weight is None or weight.dtype != FP8:
            yield name, tensor
        elif last == "weight":
            scale = given.get(f"{path}.weight_scale")
            if scale is None:
                raise ValueError(f"weight {name!r} has type {FP8}: must come with its scales")
            yield name, _wide(f"{path}.weight_scale", weight, scale)


def _wide(name: str, weight: TensorSource, scale: TensorSource) -> DerivedTensor:
    """weight [rows, columns] times `scale`, of that name: one number, one for each row, or one for each block."""
    rows, columns = weight.shape
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    kinds = {blocks: (BLOCK, BLOCK), (rows, 1): (1, columns), (1, 1): (rows, columns)}
    found = (*scale.shape, *(1, 1))[:2]
    if found not in kinds:
        raise ValueError(f"weight {name!r} has shape {tuple(scale.shape)}: must be one of {', '.join(map(str, kinds))}")
    (of_rows, of_columns), checked = kinds[found], CheckpointWeight(name, tuple(scale.shape), (), is_scale=True)

    def narrow(dim: int, start: int, length: int) -> torch.Tensor:
        checked.check(scale)
        scales = all_of(scale).float().view(found).repeat_interleave(of_rows, 0).repeat_interleave(of_columns, 1)
        return weight.narrow(dim, start, length).float() * scales[:rows, :columns].narrow(dim, start, length)

    return DerivedTensor(weight.shape, torch.float32, narrow)
