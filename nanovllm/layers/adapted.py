"""A linear layer's weight with the adapters that rows may add to it (models/adapter_files.py)."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.config import EngineConfig
from nanovllm.kernels import Kernels
from nanovllm.kernels.base.device import ordinary_launch
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.gemm.adapters import shrink
from nanovllm.kernels.gemm.expand import Shrunk
from nanovllm.kernels.plan.config import LIBRARY
from nanovllm.kernels.plan.plan import Launch
from nanovllm.layers.matrix import DenseMatrix, Weight
from nanovllm.layers.step import Call
from nanovllm.layers.weights import CheckpointWeight, Cut, Piece, Shard


class AdapterRoom(NamedTuple):
    """Memory of a rank for adapters."""

    slots: int
    rank: int
    """A power of two, at least 16; adapters of lower ranks are padded with zeros."""


def room_for(config: EngineConfig) -> AdapterRoom | None:
    """Room for the adapters of an engine with these options; None: it takes none."""
    if not config.enable_lora:
        return None
    return AdapterRoom(config.max_loras, max(16, 1 << (config.max_lora_rank - 1).bit_length()))


class AdapterPart(NamedTuple):
    """Places of one checkpoint matrix's adapter in those of a layer."""

    path: str
    """Path of its module, as our layers name it."""
    a: CheckpointWeight
    b: CheckpointWeight


class AdaptedMatrix(nn.Module):
    """A Weight [rows, columns], and the A and B of all slots, of the parts that it is made of side by side: `a` [slots,
    parts * rank, columns], `b` [slots, rows, rank]; of experts [slots, experts, ...] both.

    Over ranks A is cut as the weight's columns are and B as its rows are: where columns are split, each rank adds its
    part of the delta to its partial sum.
    """

    def __init__(
        self, base: Weight, kernels: Kernels, room: AdapterRoom, shape: tuple[int, int], pieces: tuple[Piece, ...],
        dtype: torch.dtype, device: torch.device, stack: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """shape: [rows, columns] of `base`. dtype: of x. stack: (number of experts,) where each has one."""
        super().__init__()
        self.base, self.kernels, self.pieces, self.rank, self.stack = base, kernels, pieces, room.rank, stack
        self.type_name, self.scale_rows = base.type_name, base.scale_rows
        self.has_static_inputs = base.has_static_inputs
        rows, columns = shape
        self.a = torch.zeros(room.slots, *stack, len(pieces) * room.rank, columns, dtype=dtype, device=device)
        self.b = torch.zeros(room.slots, *stack, rows, room.rank, dtype=dtype, device=device)
        self.starts = tuple(min((cut.place for cut in piece.cuts if cut.dim == 0), default=0) for piece in pieces)
        """First row of each part."""
        self._paths: dict[int, str] = {}
        """Path of each part's module, as checkpoint_weights was told."""
        for piece, first, end in zip(pieces, self.starts, (*self.starts[1:], rows), strict=True):
            ranges = ((cut.place, cut.place + cut.length) for cut in piece.cuts if cut.dim == 0)
            assert all(first <= begin <= last <= end for begin, last in ranges), pieces

    @property
    def weight(self) -> Any:
        return self.base.weight

    def note_experts(self, path: str) -> None:
        """Tells the path of the module of experts, as checkpoint_weights tells those of others."""
        self._paths = {number: piece.path(path) for number, piece in enumerate(self.pieces)}

    def checkpoint_weights(
        self, path: str, shape: tuple[int, int], cuts: tuple[Cut, ...], input_index: int = 0
    ) -> Iterator[CheckpointWeight]:
        self._paths[input_index] = path
        return self.base.checkpoint_weights(path, shape, cuts, input_index)

    def multiply(self, x: Any, launch: Launch, call: Call) -> torch.Tensor | FP8Rows:
        """See Weight; rows of a step with adapters must come unrounded."""
        if (slots := call.adapters) is not None:
            a, b = self.a, self.b
            if self.stack:
                assert call.routing is not None
                tokens, slots = self.kernels.choices(call.routing.routing, slots, self.stack[0])
                with ordinary_launch():  # kernels that start early read slots which no kernel has just written
                    delta: Any = self.kernels.adapter_delta(
                        x, slots, a.flatten(0, 1), b.flatten(0, 1), self.starts, tokens=tokens if launch.gate else None
                    )
            elif launch.config.is_our_kernel:  # it multiplies by B itself
                norm, few = call.norm if launch.norm else None, launch.config.is_skinny
                late = launch.config.kernel == "tile" and isinstance(self.base, DenseMatrix)
                delta = shrink(x, slots, a, b, self.starts, few=few, norm=norm, late=late)
            elif launch.config.kernel == "split" and self.kernels.fused:
                delta = shrink(x, slots, a, b, self.starts)
            else:
                # The library begins its sums with numbers of x's dtype (kernels/gemm/dense.py).
                takes_own = isinstance(self.base, DenseMatrix) and x.is_cuda and launch.config == LIBRARY
                dtype = x.dtype if takes_own else torch.float32
                delta = self.kernels.adapter_delta(x, slots, a, b, self.starts, dtype)
            call = call._replace(delta=delta)
        return self.base.multiply(x, launch, call)

    def parts(self, a: torch.Tensor, b: torch.Tensor) -> Iterator[AdapterPart]:
        """Places in `a` and `b`, of one slot, of the A [rank, in] and B [out, rank] of each part; of all experts, where
        it is of such."""
        lead = len(self.stack)
        for number, piece in enumerate(self.pieces):
            of_part = a.narrow(lead, number * self.rank, self.rank)
            is_split = any(cut.dim for cut in piece.cuts)  # along columns
            cuts = tuple(cut.shard(of_part if is_split else b, lead=lead) for cut in piece.cuts)
            of_a, of_b = (cuts, (Shard(b, 0, 0),)) if is_split else ((Shard(of_part, 0, 0),), cuts)
            name, (out, columns) = f"{self._paths[number]}.weight", piece.shape
            of_rank = CheckpointWeight(name, (*self.stack, self.rank, columns), of_a)
            yield AdapterPart(self._paths[number], of_rank, CheckpointWeight(name, (*self.stack, out, self.rank), of_b))


def leave_delta(weight: Weight, x: Any, launch: Launch, call: Call) -> tuple[Weight, Shrunk | None]:
    """The weight that multiplies x, and sums that the consumer is to add to the product in float32; None: the weight
    adds them itself, or there are none."""
    if not isinstance(weight, AdaptedMatrix) or call.adapters is None:
        return weight, None
    if launch.config.is_our_kernel or not weight.kernels.fused:
        return weight, None
    return weight.base, shrink(x, call.adapters, weight.a, weight.b, weight.starts)


def base_of(weight: Weight) -> Weight:
    """The weight itself, where adapters may add to it."""
    return weight.base if isinstance(weight, AdaptedMatrix) else weight
