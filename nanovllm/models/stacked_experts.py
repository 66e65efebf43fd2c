"""Experts that a checkpoint holds in one tensor, for layers that take the matrices of each: so transformers' modules
have them, and so are some checkpoints published (Qwen3.5-35B-A3B, but not as quantised ones; Granite, also these)."""

from collections.abc import Container, Iterable, Iterator

import torch

from nanovllm.layers.weights import DerivedTensor, TensorSource
from nanovllm.models.checkpoint import FileTensor

_MEMBERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Last part of the name of a tensor [experts, rows, columns] -> the matrices that an expert has in it, by rows."""
_LINEARS = ("input_linear", "output_linear")
"""Modules of Granite's experts; quantised, all their tensors are those of one expert after the other."""


def experts_apart(
    tensors: Iterable[tuple[str, TensorSource]], needed: Container[str]
) -> Iterator[tuple[str, TensorSource]]:
    """A checkpoint's (name, tensor) pairs, and in place of a tensor of all experts their matrices, where these are
    `needed`, packed or not."""
    for name, tensor in tensors:
        path, _, last = name.rpartition(".")
        around, _, module = path.rpartition(".")
        ours = (f"{around}.experts.0.{module}.{end}" for end in ("weight", "weight_packed"))
        if module in _LINEARS and any(one in needed for one in ours):
            is_stack = len(tensor.shape) == 3  # else it says the stack's shape, which nobody needs
            for expert in range(tensor.shape[0] if is_stack else 1):
                one = _matrix(tensor, expert, 0, tensor.shape[1]) if is_stack else tensor
                yield f"{around}.experts.{expert}.{module}.{last}", one
            continue
        members = _MEMBERS.get(last, ())
        ours = (f"{path}.0.{member}.{end}" for member in members[:1] for end in ("weight", "weight_packed"))
        if len(tensor.shape) != 3 or not any(one in needed for one in ours):
            yield name, tensor
            continue
        rows = tensor.shape[1] // len(members)
        for expert in range(tensor.shape[0]):
            for place, member in enumerate(members):
                yield f"{path}.{expert}.{member}.weight", _matrix(tensor, expert, place * rows, rows)


def _matrix(stack: TensorSource, expert: int, first: int, rows: int) -> DerivedTensor:
    """Rows of one expert."""

    def narrow(dim: int, start: int, length: int) -> torch.Tensor:
        ranges = [slice(first, first + rows), slice(None)]
        begin = start if dim else first + start
        ranges[dim] = slice(begin, begin + length)
        if isinstance(stack, FileTensor):  # of which no more is read
            part: torch.Tensor = stack.part[slice(expert, expert + 1), *ranges]
            return part[0]
        return stack.narrow(0, expert, 1)[0][tuple(ranges)]

    return DerivedTensor(torch.Size((rows, stack.shape[2])), stack.dtype, narrow)
