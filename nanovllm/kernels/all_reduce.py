"""Sums over the ranks through peer memory, fused with the residual addition and RMSNorm: data is its own flag.

A kernel PUSHES its rows into the blocks of its peers (`parallel/peer_memory.py`) and polls its own block for theirs.
Every element of a block rests at a sentinel, the bit pattern of -0.0, which is never sent (-0.0 goes out as +0.0): an
element that differs from it has arrived. So no barrier, no fence and no flag stand between ranks: one write across
the link is one latency. (The idea is that of the "low latency" protocols of NCCL and TensorRT-LLM.)

Why two parities suffice and nothing is ever reset. Call n of a program p (the same rows, hence the same places, on
every rank) uses places of parity n mod 2; the parity lives on the device, one per program, flipped by the call itself,
so graphs may be replayed in any order, the same on all ranks. Whoever reads a place puts the sentinel back at once.
Rank Q writes again into the place that I read in call n in its call n+2. Then Q has finished call n+1, for which it
needed data that every rank sent in ITS call n+1; mine began after my call n had ended (stream order), read-back and
cleaning included. Hence: calls of one block run in one stream order, and never with programmatic dependent launch.

Rounding is that of `kernels/norm.py`, with one rounding for sum and residual together.
Sums are float32 in a fixed order, computed from the same bits by the same code on all ranks (two-shot: on one rank,
then copied), so that all ranks hold the same bits.

A wait looks at `abort` of the local device memory each time round and is bounded by `max_spins`; after either the
outputs are garbage and the block is unfit for use. Programs wait only for the program of the same number of each peer,
after their own pushes; a launch has at most MAX_PROGRAMS of them, so that all are resident.
"""

from typing import Any, Literal

import torch

from nanovllm.kernels.triton_import import tl, triton
from nanovllm.parallel.peer_memory import MAX_PROGRAMS, SENTINELS, PeerMemory

Path = Literal["one_shot", "two_shot", "nccl"]

KEY_BLOCK = 256
MAX_SPINS = 1 << 28
"""Rounds of a wait before it gives up: minutes, for a peer may be compiling."""

_INTEGERS = {2: tl.int16, 4: tl.int32}


@triton.jit
def _peer_pointer(peers, rank, offset, INT: tl.constexpr):
    """Pointer to element `offset` of `rank`'s block; blocks and regions are 16-byte aligned."""
    base = tl.load(peers + rank).to(tl.pointer_type(INT))
    return tl.multiple_of(base, 16) + offset


@triton.jit
def _without_sentinel(bits, SENTINEL: tl.constexpr, SUBSTITUTE: tl.constexpr):
    """What may be sent: the sentinel itself becomes its equal (+0.0; for keys the next larger integer)."""
    return tl.where(bits == SENTINEL, tl.full(bits.shape, SUBSTITUTE, bits.dtype), bits)


@triton.jit
def _receive(pointers, mask, abort, max_spins, SENTINEL: tl.constexpr):
    """The values behind `pointers` (where mask; 0 elsewhere) once all have arrived; their places are clean again."""
    bits = tl.load(pointers, mask=mask, other=0, volatile=True)
    missing = tl.max(tl.where(bits == SENTINEL, 1, 0))
    spins = 0
    while missing > 0:
        stop = tl.load(abort, volatile=True)
        bits = tl.load(pointers, mask=mask, other=0, volatile=True)
        missing = tl.where(stop != 0, 0, tl.max(tl.where(bits == SENTINEL, 1, 0)))
        spins += 1
        if spins >= max_spins:
            tl.store(abort, 2)
    tl.store(pointers, tl.full(bits.shape, SENTINEL, bits.dtype), mask=mask)
    return bits


@triton.jit
def _rounded(x, out, INT: tl.constexpr, SENTINEL: tl.constexpr):
    """x float32 -> the bits of `out`'s dtype, free of the sentinel, so that sender and receivers hold the same."""
    return _without_sentinel(x.to(out.dtype.element_ty).to(INT, bitcast=True), SENTINEL, 0)


@triton.jit
def _finish_row(arrived, kept_before, gain, at, residual_out, out, mask, eps, HIDDEN: tl.constexpr,
                NORM: tl.constexpr, INT: tl.constexpr, SENTINEL: tl.constexpr):  # fmt: skip
    """arrived INT [sources, BLOCK]: one row of every rank. Sums, adds the residual, normalises, stores behind `at` of
    residual_out and out; returns the bits of (out, residual_out)."""
    total = tl.sum(arrived.to(out.dtype.element_ty, bitcast=True).to(tl.float32), 0) + kept_before
    kept = _rounded(total, out, INT, SENTINEL)
    result = kept
    if NORM:
        x = kept.to(out.dtype.element_ty, bitcast=True)
        tl.store(residual_out + at, x, mask=mask)
        x32 = x.to(tl.float32)
        normed = (x32 * tl.math.rsqrt(tl.sum(x32 * x32, 0) / HIDDEN + eps)).to(out.dtype.element_ty)
        result = _rounded(normed.to(tl.float32) * gain, out, INT, SENTINEL)
    tl.store(out + at, result.to(out.dtype.element_ty, bitcast=True), mask=mask)
    return result, kept


@triton.jit
def _float_or_zeros(pointers, mask, WANTED: tl.constexpr):
    """What stands behind `pointers` as float32, asked for before a wait so that its latency is hidden; or zeros."""
    if WANTED:
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.zeros(mask.shape, tl.float32)


@triton.jit(do_not_specialize=["rows", "rank", "max_spins"])
def one_shot_kernel(partial, residual, residual_out, weight, out, peers, parity_state, abort, rows, rank, eps,
                    max_spins, region, WORLD: tl.constexpr, WORLD_BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
                    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
                    INT: tl.constexpr, SENTINEL: tl.constexpr):  # fmt: skip
    """Every rank sends its rows to all ranks (itself too, which keeps the code one) and sums all that arrive.

    partial INT [rows, HIDDEN] (the bits of the model's dtype); residual, residual_out, out [rows, HIDDEN]; weight
    [HIDDEN]; places: region + [2, WORLD (source), CAPACITY, HIDDEN]. Program p takes rows p, p + programs, ...
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    parity = tl.load(parity_state + pid)
    half = region + parity.to(tl.int64) * (WORLD * CAPACITY * HIDDEN)
    row = pid
    while row < rows:
        bits = tl.load(partial + row.to(tl.int64) * HIDDEN + cols, mask=mask, other=0)
        bits = _without_sentinel(bits, SENTINEL, 0)
        place = half + (rank * CAPACITY + row).to(tl.int64) * HIDDEN
        for step in tl.static_range(WORLD):  # each rank starts with another peer, so that no link is crowded
            to = (rank + 1 + step) % WORLD
            tl.store(_peer_pointer(peers, to, place, INT) + cols, bits, mask=mask)
        row += programs
    gain = _float_or_zeros(weight + cols, mask, NORM)
    source = tl.arange(0, WORLD_BLOCK)
    tile = (source * CAPACITY * HIDDEN)[:, None] + cols[None, :]
    tile_mask = (source < WORLD)[:, None] & mask[None, :]
    row = pid
    while row < rows:
        at = row.to(tl.int64) * HIDDEN
        kept = _float_or_zeros(residual + at + cols, mask, RESIDUAL)
        arrived = _receive(_peer_pointer(peers, rank, half + at, INT) + tile, tile_mask, abort, max_spins, SENTINEL)
        _finish_row(arrived, kept, gain, at + cols, residual_out, out, mask, eps, HIDDEN, NORM, INT, SENTINEL)
        row += programs
    tl.store(parity_state + pid, 1 - parity)


@triton.jit(do_not_specialize=["rows", "rank", "max_spins"])
def two_shot_kernel(partial, residual, residual_out, weight, out, peers, parity_state, abort, rows, rank, eps,
                    max_spins, scatter, gather, gather_residual, WORLD: tl.constexpr, WORLD_BLOCK: tl.constexpr,
                    UNITS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
                    RESIDUAL: tl.constexpr, REPLICATE: tl.constexpr, INT: tl.constexpr,
                    SENTINEL: tl.constexpr):  # fmt: skip
    """Row unit * WORLD + r is summed, normed and sent to everyone by rank r. Program p takes units p, p + programs, ...

    Operands as in one_shot_kernel. Places: scatter + [2, WORLD (source), UNITS, HIDDEN], gather and gather_residual +
    [2, UNITS * WORLD, HIDDEN]. REPLICATE False: `residual_out` is written at this rank's own rows only.
    The argument at the top holds: whoever has finished a unit holds its row of rank 0, made from all ranks' data.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    parity = tl.load(parity_state + pid)
    half = parity.to(tl.int64) * (WORLD * UNITS * HIDDEN)
    units = (rows + WORLD - 1) // WORLD
    unit = pid
    while unit < units:
        place = scatter + half + (rank * UNITS + unit).to(tl.int64) * HIDDEN
        for step in tl.static_range(WORLD):
            to = (rank + 1 + step) % WORLD
            row = unit * WORLD + to
            exists = mask & (row < rows)
            bits = tl.load(partial + row.to(tl.int64) * HIDDEN + cols, mask=exists, other=0)
            bits = _without_sentinel(bits, SENTINEL, 0)
            tl.store(_peer_pointer(peers, to, place, INT) + cols, bits, mask=exists)
        unit += programs
    gain = _float_or_zeros(weight + cols, mask, NORM)
    source = tl.arange(0, WORLD_BLOCK)
    tile = (source * UNITS * HIDDEN)[:, None] + cols[None, :]
    tile_mask = (source < WORLD)[:, None] & mask[None, :]
    unit = pid
    while unit < units:
        row = unit * WORLD + rank
        if row < rows:
            at = row.to(tl.int64) * HIDDEN
            kept = _float_or_zeros(residual + at + cols, mask, RESIDUAL)
            place = scatter + half + unit.to(tl.int64) * HIDDEN
            arrived = _receive(_peer_pointer(peers, rank, place, INT) + tile, tile_mask, abort, max_spins, SENTINEL)
            bits, kept = _finish_row(arrived, kept, gain, at + cols, residual_out, out, mask, eps, HIDDEN, NORM, INT,
                                     SENTINEL)  # fmt: skip
            place = half + at
            for step in tl.static_range(WORLD - 1):
                to = (rank + 1 + step) % WORLD
                tl.store(_peer_pointer(peers, to, gather + place, INT) + cols, bits, mask=mask)
                if NORM and REPLICATE:
                    tl.store(_peer_pointer(peers, to, gather_residual + place, INT) + cols, kept, mask=mask)
        unit += programs
    others = (source < WORLD) & (source != rank)
    tile = (source * HIDDEN)[:, None] + cols[None, :]
    unit = pid
    while unit < units:
        tile_mask = (others & (unit * WORLD + source < rows))[:, None] & mask[None, :]
        place = (unit * WORLD).to(tl.int64) * HIDDEN
        theirs = _peer_pointer(peers, rank, gather + half + place, INT) + tile
        bits = _receive(theirs, tile_mask, abort, max_spins, SENTINEL)
        tl.store(out + place + tile, bits.to(out.dtype.element_ty, bitcast=True), mask=tile_mask)
        if NORM and REPLICATE:
            theirs = _peer_pointer(peers, rank, gather_residual + half + place, INT) + tile
            bits = _receive(theirs, tile_mask, abort, max_spins, SENTINEL)
            tl.store(residual_out + place + tile, bits.to(out.dtype.element_ty, bitcast=True), mask=tile_mask)
        unit += programs
    tl.store(parity_state + pid, 1 - parity)


@triton.jit(do_not_specialize=["count", "rank", "max_spins"])
def max_keys_kernel(keys, peers, parity_state, abort, count, rank, max_spins, region, WORLD: tl.constexpr,
                    WORLD_BLOCK: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
                    SENTINEL: tl.constexpr):  # fmt: skip
    """keys int64 [count] becomes its maximum over the ranks. Places: region + [2, WORLD (source), CAPACITY] int64.
    SENTINEL, the smallest int64, is sent as the one above it. Program p takes keys p * BLOCK ..."""
    pid = tl.program_id(0)
    at = pid * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    parity = tl.load(parity_state + pid)
    half = region + parity.to(tl.int64) * (WORLD * CAPACITY)
    mine = _without_sentinel(tl.load(keys + at, mask=mask, other=0), SENTINEL, SENTINEL + 1)
    for step in tl.static_range(WORLD):
        to = (rank + 1 + step) % WORLD
        tl.store(_peer_pointer(peers, to, half + rank * CAPACITY, tl.int64) + at, mine, mask=mask)
    source = tl.arange(0, WORLD_BLOCK)
    tile_mask = (source < WORLD)[:, None] & mask[None, :]
    theirs = _peer_pointer(peers, rank, half, tl.int64) + (source * CAPACITY)[:, None] + at[None, :]
    arrived = _receive(theirs, tile_mask, abort, max_spins, SENTINEL)
    best = tl.max(tl.where(tile_mask, arrived, tl.full(arrived.shape, SENTINEL, tl.int64)), 0)
    tl.store(keys + at, best, mask=mask)
    tl.store(parity_state + pid, 1 - parity)


def _reduce_in_float32(partial: torch.Tensor, group: Any | None) -> torch.Tensor:
    total = partial.float()
    if group is not None:
        total = total.clone() if total is partial else total
        group.allreduce([total]).wait()
    return total


def all_reduce_add_rms_norm_reference(
    partial: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, group: Any | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `PeerAllReduce.all_reduce_add_rms_norm` computes, over any communicator (gloo, NCCL; None: one rank).

    partial [T, hidden] of this rank; residual [T, hidden], updated in place, or None at the start of the model; weight
    [hidden]; group: an object of torch.distributed with `allreduce`. Returns (normalised, residual), both [T, hidden].
    """
    total = _reduce_in_float32(partial, group)
    if residual is None:
        residual = torch.empty_like(partial)
    else:
        total = total + residual.float()
    x32 = residual.copy_(total).float()
    normed = (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(partial.dtype)
    return normed * weight, residual


class PeerAllReduce:
    """All-reduces of one rank over a block of peer memory. All ranks make the same calls, with the same shapes, in the
    same order, on one stream (or streams that wait for each other); eager calls and graph replays may be mixed.

    max_spins: rounds of a wait before it gives up and sets the abort word to 2.
    """

    def __init__(self, memory: PeerMemory, max_spins: int = MAX_SPINS) -> None:
        self.memory = memory
        self.max_spins = max_spins
        layout = memory.layout
        self._hidden = layout.hidden_size
        block = triton.next_power_of_2(self._hidden)
        self._shape = {
            "WORLD": layout.world_size,
            "WORLD_BLOCK": triton.next_power_of_2(layout.world_size),
            "HIDDEN": self._hidden,
            "BLOCK": block,
            "INT": _INTEGERS[layout.itemsize],
            "SENTINEL": SENTINELS[layout.itemsize],
            "num_warps": num_warps(block),
        }

    def path(self, rows: int) -> Path:
        """Who takes a sum of `rows` rows: one of the kernels here, or ("nccl") the caller's communicator."""
        layout, limits = self.memory.layout, self.memory.limits
        nbytes = rows * self._hidden * layout.itemsize
        if rows <= layout.one_shot_rows and nbytes <= limits.one_shot_bytes(layout.world_size):
            return "one_shot"
        return "two_shot" if rows <= layout.two_shot_rows and nbytes <= limits.peer_bytes else "nccl"

    def all_reduce_add_rms_norm(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        replicate_residual: bool = True,
        path: Path | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over the ranks + residual (float32, one rounding), and the RMSNorm of that.

        partial [T, hidden]: this rank's addend, contiguous, any memory. residual [T, hidden]: updated in place; None:
        zeros, and a new tensor is returned. weight [hidden]. Returns (normalised [T, hidden], residual [T, hidden]).
        replicate_residual False: where two-shot is taken, each rank updates only the residual rows that it owns (row
        mod world = rank); the others stay as they were. Enough, and a third less on the wire, where the residual goes
        only into further calls with the same T. path: overrules `path(T)` (benchmarks).
        """
        self._check(partial, residual, weight)
        out = torch.empty_like(partial)
        residual_out = torch.empty_like(partial) if residual is None else residual
        self._launch(path, partial, residual, residual_out, weight, out, eps, replicate_residual, norm=True)
        return out, residual_out

    def all_reduce(self, partial: torch.Tensor, *, path: Path | None = None) -> torch.Tensor:
        """Sum over the ranks of partial [T, hidden], into a new tensor; float32 inside."""
        self._check(partial)
        out = torch.empty_like(partial)
        self._launch(path, partial, None, out, out, out, 0.0, replicate=False, norm=False)
        return out

    def all_reduce_max(self, keys: torch.Tensor) -> torch.Tensor:
        """keys int64 [B] (B <= max_keys) becomes its element-wise maximum over the ranks, in place. The smallest
        int64 stands for nothing: it comes back as the one above it."""
        memory = self.memory
        if keys.dtype != torch.int64 or not keys.is_contiguous() or keys.numel() > memory.layout.max_keys:
            raise ValueError(f"keys: {keys.dtype} {tuple(keys.shape)}, need int64, at most {memory.layout.max_keys}")
        grid = (triton.cdiv(keys.numel(), KEY_BLOCK),)
        max_keys_kernel[grid](
            keys, memory.peers, memory.parity[2], memory.abort_word, keys.numel(), memory.rank, self.max_spins,
            memory.layout.keys // 8, WORLD=memory.world_size, WORLD_BLOCK=self._shape["WORLD_BLOCK"],
            CAPACITY=memory.layout.max_keys, BLOCK=KEY_BLOCK, SENTINEL=SENTINELS[8], num_warps=4,
        )  # fmt: skip
        return keys

    def _check(self, partial: torch.Tensor, *others: torch.Tensor | None) -> None:
        if partial.ndim != 2 or partial.shape[1] != self._hidden or partial.shape[0] < 1:
            raise ValueError(f"partial: shape {tuple(partial.shape)}, need [rows, {self._hidden}]")
        for tensor in (partial, *others):
            if tensor is not None and (tensor.dtype != self.memory.dtype or not tensor.is_contiguous()):
                raise ValueError(f"need contiguous {self.memory.dtype} tensors, got {tensor.dtype} {tensor.stride()}")
        if others and others[0] is not None and others[0].shape != partial.shape:
            raise ValueError(f"residual: shape {tuple(others[0].shape)}, need {tuple(partial.shape)}")

    def _launch(
        self,
        path: Path | None,
        partial: torch.Tensor,
        residual: torch.Tensor | None,
        residual_out: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        eps: float,
        replicate: bool,
        norm: bool,
    ) -> None:
        memory, layout, rows = self.memory, self.memory.layout, partial.shape[0]
        path = path or self.path(rows)
        bits = partial.view(torch.int16 if layout.itemsize == 2 else torch.int32)
        tensors = (bits, residual_out if residual is None else residual, residual_out, weight, out, memory.peers)
        scalars = (memory.abort_word, rows, memory.rank, eps, self.max_spins)
        flags = {"NORM": norm, "RESIDUAL": residual is not None}
        if path == "one_shot" and rows <= layout.one_shot_rows:
            one_shot_kernel[(min(rows, MAX_PROGRAMS),)](
                *tensors, memory.parity[0], *scalars, 0, CAPACITY=layout.one_shot_rows, **flags, **self._shape
            )
        elif path == "two_shot" and rows <= layout.two_shot_rows:
            offsets = [offset // layout.itemsize for offset in (layout.scatter, layout.gather, layout.residual)]
            grid = (min(triton.cdiv(rows, layout.world_size), MAX_PROGRAMS),)
            two_shot_kernel[grid](
                *tensors, memory.parity[1], *scalars, *offsets, UNITS=layout.units, REPLICATE=replicate, **flags,
                **self._shape,
            )  # fmt: skip
        else:
            raise ValueError(f"{rows} rows by {path}: the block was laid out for {layout}")


def num_warps(block: int) -> int:
    """Warps of a program: a 16-byte access a lane and row, at most 128 registers a thread."""
    return max(1, min(block // 256, 16))
