"""Where a product leaves its tiles: in memory of its own, or straight in the places of the sum over ranks behind it.

A row-parallel product is half of a sum: what it stores locally, the sum's kernel reads again and sends to the other
ranks. A kernel of our own can send each tile as soon as it is done instead, while other tiles are still multiplied. The
bits are the same. all_reduce.py says why this is right; `PeerAllReduce.push` is the way in.
"""

from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels.base.triton_import import tl, triton


@dataclass(frozen=True)
class Places:
    """This rank's places for one-shot sums in the blocks of all ranks, as a product's kernel needs them.

    targets: int64 [world], addresses of the first place of parity 0 (`PeerMemory.one_shot_targets`). parity: int32, its
    first element is that of the next one-shot sum. A place holds `rows` rows of `hidden` elements of `dtype`.
    """

    targets: torch.Tensor
    parity: torch.Tensor
    rows: int
    hidden: int
    dtype: torch.dtype

    def check(self, rows: int, n: int, dtype: torch.dtype) -> None:
        """ValueError where a product [rows, n] does not fit."""
        if rows > self.rows or n != self.hidden or dtype != self.dtype:
            held = f"{[self.rows, self.hidden]} of {self.dtype}"
            raise ValueError(f"a product {[rows, n]} of {dtype} for places that hold {held}")


@dataclass(frozen=True, eq=False)
class Pushed:
    """Stands for a product [rows, hidden] that lies in the ranks' places, until its sum has taken it from there: that
    must be the next sum on these ranks (`PeerAllReduce.all_reduce_add_rms_norm`), and there is one."""

    rows: int


Partial = torch.Tensor | Pushed
"""A rank's addend of a sum over ranks: a tensor [T, hidden] (or in parts, see kernels/gemm/decode.py), or pushed."""


def push_arguments(places: Places | None, unused: torch.Tensor) -> dict[str, Any]:
    """What a kernel that calls `destinations` is launched with. None: it stores to memory of its own."""
    if places is None:
        return {"targets_ptr": unused, "parity_ptr": unused, "WORLD": 0, "HALF": 0}
    world = places.targets.numel()
    half = world * places.rows * places.hidden
    return {"targets_ptr": places.targets, "parity_ptr": places.parity, "WORLD": world, "HALF": half}


@triton.jit
def destinations(out_ptr, targets_ptr, parity_ptr, WORLD: tl.constexpr, HALF: tl.constexpr):
    """Pointers to element 0 of everything that a tile is stored to: `out_ptr`, or this call's place in each of WORLD
    blocks, HALF elements behind that of parity 0 where the parity is 1. To be called after gdc_wait."""
    to = (out_ptr,)
    if WORLD > 0:
        half = tl.load(parity_ptr).to(tl.int64) * HALF
        to = ()
        for step in tl.static_range(WORLD):
            place = tl.load(targets_ptr + step).to(out_ptr.dtype)
            to = to + (tl.multiple_of(place, 16) + half,)
    return to


@triton.jit
def store_tile_to(to, at, value, mask, WORLD: tl.constexpr):
    """Stores `value`, rounded once, behind `at` of each of `destinations`; into places free of the sentinel, which is
    the bit pattern of -0.0 and becomes +0.0."""
    value = value.to(to[0].dtype.element_ty)
    if WORLD > 0:
        WIDTH: tl.constexpr = value.dtype.primitive_bitwidth
        bits = value.to(tl.int16 if WIDTH == 16 else tl.int32, bitcast=True)
        empty = bits == -(1 << (WIDTH - 1))
        value = tl.where(empty, tl.zeros(bits.shape, bits.dtype), bits).to(value.dtype, bitcast=True)
        for step in tl.static_range(WORLD):
            tl.store(to[step] + at, value, mask=mask)
    else:
        tl.store(to[0] + at, value, mask=mask)
