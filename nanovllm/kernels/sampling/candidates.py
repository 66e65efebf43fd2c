"""One program on one row of logits: loads, a sample of it, and lists of the few ids that matter.

A list is kept by lane: each lane of a tile appends what it finds to a column of its own, so that appending needs no
word from another lane and the order of a list depends on the row alone. Entry d of lane l is at d * LANES + l; a lane
counts on past DEPTH without storing, which says that the list is not whole.
"""

import torch

from nanovllm.kernels.base.triton_import import tl, triton

_PIECES = tl.constexpr(16)  # of a sample
_GROUPS = tl.constexpr(128)  # of a sample, at most

STRETCH = tl.constexpr(4)
"""Entries of a lane that are loaded at once."""
WARPS, MAX_REGISTERS = 16, 64
"""Registers a thread such that two programs share a multiprocessor and hide each other's loads."""


@triton.jit
def load_raw(row, index, num_ids):
    """Logits as they are; -inf beyond the row."""
    return tl.load(row + index, mask=index < num_ids, other=float("-inf"))


@triton.jit
def as_ids(raw):
    """Loaded logits as float32; NaN as -inf."""
    x = raw.to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def load_ids(row, index, num_ids):
    return as_ids(load_raw(row, index, num_ids))


@triton.jit
def tile_index(LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Ids of a row's first tile, [LANES, WIDTH]."""
    return tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def load_sample(row, num_ids, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """LANES * WIDTH of a row's logits, in pieces from all over it."""
    lane, column = tl.arange(0, LANES), tl.arange(0, WIDTH)
    of_piece: tl.constexpr = LANES // _PIECES
    piece = (num_ids // _PIECES) * (lane // of_piece) + (lane % of_piece) * WIDTH
    return load_ids(row, piece[:, None] + column[None, :], num_ids)


@triton.jit
def sample_floor(row, num_ids, wanted, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """A logit that `wanted` ids of the row reach, in all likelihood, and not many more; -inf where no sample says."""
    groups: tl.constexpr = LANES if LANES < _GROUPS else _GROUPS
    expected = wanted.to(tl.float32) * (LANES * WIDTH) / num_ids
    enough = expected + 3.0 * tl.sqrt(expected) + 2.0
    x = load_sample(row, num_ids, LANES, WIDTH)
    best = tl.max(tl.reshape(tl.max(x, 1), [groups, LANES // groups]), 1)
    above = tl.sum((best[None, :] > best[:, None]).to(tl.int32), 1)
    floor = tl.max(tl.where(above.to(tl.float32) >= enough - 1.0, best, float("-inf")), 0)
    return tl.where(enough <= groups // 2, floor, float("-inf"))


@triton.jit
def append(LIST, x, index, keep, depth, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """Adds the ids of a tile [LANES, WIDTH] where `keep` to the list, logit and id in one int64; returns how long each
    lane's part is then."""
    ones = keep.to(tl.int32)
    place = depth[:, None] + tl.cumsum(ones, 1) - ones
    where = place * LANES + tl.arange(0, LANES)[:, None]
    entry = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | index.to(tl.int64)
    tl.store(LIST + where, entry, mask=keep & (place < DEPTH))
    return depth + tl.sum(ones, 1)


@triton.jit
def list_entries(LIST, depth, begin, LANES: tl.constexpr):
    """Logits and ids [STRETCH, LANES] of a list from its entries `begin` on, and which of them are there; -inf else."""
    d = begin + tl.arange(0, STRETCH)[:, None]
    live = d < depth[None, :]
    entry = tl.load(LIST + d * LANES + tl.arange(0, LANES)[None, :], mask=live, other=0)
    x = (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(live, x, float("-inf")), entry.to(tl.int32), live


def _lanes(num_ids: int) -> int:
    return min(1024, max(32, 1 << (-(-num_ids // 8) - 1).bit_length()))


def row_tiles(num_ids: int) -> dict[str, int]:
    """Tiles by which a program walks over a row; by the vocabulary alone, so that sums have one order."""
    lanes = _lanes(num_ids)
    warps = WARPS if lanes == 1024 else 4
    return {"LANES": lanes, "WIDTH": 8, "TILES": triton.cdiv(num_ids, lanes * 8), "num_warps": warps}


def new_lists(num_rows: int, num_ids: int, depth: int, device: torch.device) -> torch.Tensor:
    """Places for a list for each row, int64 [rows, depth, lanes]."""
    return torch.empty(num_rows, depth, _lanes(num_ids), dtype=torch.int64, device=device)


def list_bytes(num_rows: int, num_ids: int, depth: int) -> int:
    """Bytes that new_lists allocates."""
    return num_rows * depth * _lanes(num_ids) * 8
