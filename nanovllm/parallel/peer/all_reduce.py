"""All-reduce through peer memory, fused with the residual addition and RMSNorm. Data is its own flag.

A kernel writes its rows into its peers' blocks (`parallel/peer/memory.py`) and polls its own block for theirs. Every
element rests at a sentinel that is never sent, so an element that differs has arrived: no barrier, no fence, no flag.
Two parities of slots alternate, and the reader of a slot restores the sentinel. docs/peer-memory.md has a drawing, and
the proof that two parities suffice. Its consequences: the calls of a block run in one stream, graphs may be replayed in
any order that all ranks share, and a kernel that is launched with PDL waits for the end of the kernel before it
ahead of its first look at a slot.

Rounding is that of `norm.py`, with one rounding for sum and residual together. An addend may come as sums over parts of
K (kernels/gemm/dense.py): a rank adds up its own, in pairs, and rounds once before it sends. Sums are float32 in a
fixed order, so all ranks hold the same bits. Where they are to be those of other numbers of ranks too (`round_sums`),
a sum of any two addends is rounded.

A wait looks at `abort` in local device memory each time and is bounded by `max_spins`. After either the outputs
are garbage and the block must not be used again.
"""

from typing import Literal

import torch

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.padded_rows import empty_rows
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.fp8.quantize import empty_rows_for
from nanovllm.kernels.fp8.reference import GROUP
from nanovllm.kernels.pointwise.norm import Norm
from nanovllm.parallel.peer.kernels import max_keys_kernel, one_shot_kernel
from nanovllm.parallel.peer.limits import PEER_BYTES, cut_rows, one_shot_rows
from nanovllm.parallel.peer.memory import MAX_PROGRAMS, MAX_SPLIT, SENTINELS, PeerMemory
from nanovllm.parallel.peer.two_shot import two_shot_kernel

Path = Literal["one_shot", "two_shot", "nccl"]

KEY_BLOCK = 256
PDL_ROWS = 16
"""Maximum rows for which the GEMMs around may be our own, which let the all-reduce start early and fetch weights
meanwhile. After one of cuBLAS, which does not, PDL costs 0.5 us, so for more rows the caller decides. 0: always."""
MAX_SPINS = (1 << 31) - 1
"""Looks of a wait before it gives up, with garbage: the most there can be, since a peer may compile for minutes. One
that hangs or is gone is noticed long before (step_timeout)."""

_INTEGERS = {2: tl.int16, 4: tl.int32}


class PeerAllReduce:
    """All-reduces of one rank over a block of peer memory. All ranks make the same calls, with the same shapes, in the
    same order, on one stream; eager calls and graph replays may be mixed.

    max_spins: looks of a wait before it gives up and sets the abort word to 2.
    """

    def __init__(self, memory: PeerMemory, max_spins: int = MAX_SPINS, one_order: bool = False,
                 round_sums: bool = False) -> None:  # fmt: skip
        """one_order: a row's bits do not depend on how many there are. Then no row is cut, whose squares would be
        summed in parts, and sums that are too large for the block go through it in pieces. round_sums, with
        one_order: nor do they on the ranks."""
        self.memory = memory
        self.one_order = one_order
        self.round_sums = round_sums
        self.max_spins = max_spins
        self._layout = layout = memory.layout
        self._hidden, self._row_bytes = layout.hidden_size, layout.hidden_size * layout.dtype.itemsize
        self._most_rows = min(layout.two_shot_rows, PEER_BYTES // self._row_bytes)
        block = triton.next_power_of_2(self._hidden)
        self._shape = {
            "WORLD": layout.world_size, "WORLD_BLOCK": triton.next_power_of_2(layout.world_size),
            "HIDDEN": self._hidden, "BLOCK": block, "INT": _INTEGERS[layout.dtype.itemsize],
            "SENTINEL": SENTINELS[layout.dtype.itemsize], "num_warps": num_warps(block),
        }  # fmt: skip

    def path(self, rows: int, rounds: bool = False) -> Path:
        """Chooses the way of a sum of `rows` rows: one of the kernels here, or "nccl", the caller's communicator.
        rounds: the result may be rounded to e4m3."""
        layout = self._layout
        if rows <= min(layout.one_shot_rows, one_shot_rows(layout.world_size, self._row_bytes, rounds)):
            return "one_shot"
        return "two_shot" if rows <= self._most_rows else "nccl"

    def takes(self, rows: int) -> bool:
        """Whether a sum of so many rows comes here, and not to the caller's communicator."""
        return self.one_order or self.path(rows) != "nccl"

    def _pieces(self, rows: int, path: Path | None) -> list[slice]:
        """The rows of a sum, in pieces where it is too large for the block."""
        if path is not None or not self.one_order or self.path(rows) != "nccl":
            return [slice(0, rows)]
        return [slice(begin, min(begin + self._most_rows, rows)) for begin in range(0, rows, self._most_rows)]

    def own_rows(self, residual: torch.Tensor) -> torch.Tensor:
        """A copy of a residual [T, hidden] that two-shot sums have updated, with zeros in the rows of other ranks."""
        row = torch.arange(residual.shape[0], device=residual.device)
        if self.one_order and self.path(residual.shape[0]) == "nccl":
            row %= self._most_rows  # each piece begins with a row of rank 0
        is_own = row % self._layout.world_size == self.memory.rank
        return torch.where(is_own[:, None], residual, 0)

    def split(self, rows: int) -> int:
        """Number of parts into which a two-shot sum of so many rows, with its norm, cuts the columns of each row."""
        most = 0 if self.one_order else cut_rows(self._layout.world_size, self._row_bytes)
        return MAX_SPLIT if rows <= most else 1

    def all_reduce_add_rms_norm(
        self, partial: torch.Tensor, residual: torch.Tensor | None, norm: Norm, *, path: Path | None = None,
        dependent: bool = False, rounds: bool = False,
    ) -> tuple[torch.Tensor | FP8Rows, torch.Tensor]:  # fmt: skip
        """Sum over the ranks + residual (float32, one rounding), and the norm of that, of kind "rms".

        partial [T, hidden]: this rank's addend, contiguous, any memory; or [parts, T, hidden], whose sum it is, of
        float32 or, with `round_sums`, of the memory's dtype.
        residual [T, hidden]: updated in place; None: zeros, and a new tensor is returned. Returns (normalised [T,
        hidden], residual [T, hidden]).
        The residual is for further calls with the same T alone: where two-shot is taken, each rank updates only the
        rows that it owns (row mod world = rank), which is a third less on the wire.
        path: overrules `path(T)` (benchmarks). dependent: launch it with PDL, whatever its rows. rounds: a one-shot sum
        rounds what it normalised to e4m3 (kernels/fp8/).
        """
        weight = norm.weight
        rows = self._check(partial, residual, weight)
        residual_out = partial.new_empty(rows, self._hidden, dtype=weight.dtype) if residual is None else residual
        if rounds and (path or self.path(rows, rounds)) == "one_shot" and self._hidden >= GROUP:
            found = empty_rows_for(rows, self._hidden, weight.dtype, weight.device)
            operands = (partial, residual_out, weight, found.values)
            self._launch("one_shot", operands, norm.eps, residual is not None, dependent, scales=found.scales)
            return found, residual_out
        out = empty_rows(rows, self._hidden, weight.dtype, weight.device)
        for piece in self._pieces(rows, path):
            operands = (partial[..., piece, :].contiguous(), residual_out[piece], weight, out[piece])
            self._launch(path, operands, norm.eps, residual is not None, dependent)
        return out, residual_out

    def all_reduce(self, partial: torch.Tensor, *, path: Path | None = None) -> torch.Tensor:
        """The sum over the ranks alone (float32, one rounding), whole on every rank: a new tensor [T, hidden]. partial,
        path: as above."""
        rows = self._check(partial, None, None)
        out = empty_rows(rows, self._hidden, self._layout.dtype, partial.device)
        for piece in self._pieces(rows, path):
            part, total = partial[..., piece, :].contiguous(), out[piece]
            self._launch(path, (part, total, total, total), 0.0, False, False, norm=False)
        return out

    def all_reduce_max(self, keys: torch.Tensor) -> torch.Tensor:
        """keys int64 [B] (B <= max_keys) becomes its element-wise maximum over the ranks, in place. The smallest
        int64 means nothing: it comes back as the one above it."""
        memory, layout = self.memory, self._layout
        if keys.dtype != torch.int64 or not keys.is_contiguous() or keys.numel() > layout.max_keys:
            raise ValueError(f"keys: {keys.dtype} {tuple(keys.shape)}, need int64, at most {layout.max_keys}")
        grid = (triton.cdiv(keys.numel(), KEY_BLOCK),)
        max_keys_kernel[grid](
            keys, memory.peers, memory.parity[2], memory.abort_word, keys.numel(), memory.rank, self.max_spins,
            layout.regions["keys"].offset // 8, WORLD=layout.world_size, WORLD_BLOCK=self._shape["WORLD_BLOCK"],
            CAPACITY=layout.max_keys, BLOCK=KEY_BLOCK, SENTINEL=SENTINELS[8], num_warps=4,
        )  # fmt: skip
        return keys

    def _check(self, partial: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None) -> int:
        """The sum's rows; ValueError where it is not one."""
        in_parts = partial.ndim == 3 and partial.shape[0] > 1
        if not (in_parts or partial.ndim == 2) or partial.shape[-1] != self._hidden or partial.shape[-2] < 1:
            raise ValueError(f"partial: shape {tuple(partial.shape)}, need [rows, {self._hidden}] or parts of that")
        shape = (partial.shape[-2], self._hidden)
        model_dtype = self._layout.dtype
        dtypes = [torch.float32 if in_parts and not self.round_sums else model_dtype, model_dtype, model_dtype]
        for tensor, dtype in zip((partial, residual, weight), dtypes, strict=True):
            if tensor is not None and (tensor.dtype != dtype or not tensor.is_contiguous()):
                raise ValueError(f"need a contiguous {dtype} tensor, got {tensor.dtype} {tensor.stride()}")
        if residual is not None and residual.shape != shape:
            raise ValueError(f"residual: shape {tuple(residual.shape)}, need {shape}")
        return shape[0]

    def _launch(
        self, path: Path | None, operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], eps: float,
        has_residual: bool, dependent: bool, norm: bool = True, scales: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """operands: partial, residual (in and out, or only out), weight, out; without `norm` the sum goes to out.
        scales: of an `out` in e4m3."""
        partial, residual, weight, out = operands
        memory, layout, rows = self.memory, self._layout, out.shape[-2]
        path, parts = path or self.path(rows), partial.shape[0] if partial.ndim == 3 else 1
        if parts == 1:
            partial = partial.view(torch.int16 if layout.dtype.itemsize == 2 else torch.int32)
        tensors = (partial, residual, residual, weight, out, memory.peers)
        scalars = (memory.abort_word, rows, memory.rank, eps, self.max_spins)
        fixed = {"RESIDUAL": has_residual, "PARTS": parts, **self._shape}
        fixed |= pdl_options(partial.device, dependent or rows <= PDL_ROWS)
        if path == "one_shot" and rows <= layout.one_shot_rows:
            one_shot_kernel[(min(rows, MAX_PROGRAMS),)](
                *tensors, memory.parity[0], *scalars, scales, 0 if scales is None else scales.stride(1), NORM=norm,
                ROUND_SUMS=self.round_sums, CAPACITY=layout.one_shot_rows, **fixed,
            )  # fmt: skip
        elif path == "two_shot" and rows <= layout.two_shot_rows:
            split = self.split(rows) if norm else 1
            width, items = self._hidden // split, triton.cdiv(rows, layout.world_size) * split
            programs = triton.cdiv(items, triton.cdiv(items, MAX_PROGRAMS))  # none has more items than it must
            block = triton.next_power_of_2(width)
            regions = (layout.regions[name] for name in ("scatter", "gather", "squares"))
            starts = (region.offset // region.dtype.itemsize for region in regions)
            two_shot_kernel[(programs,)](
                *tensors, memory.parity[1], *scalars, *starts, NORM=norm, ROUND_SUMS=self.round_sums,
                UNITS=layout.units, SPLIT=split, **{**fixed, "BLOCK": block, "num_warps": num_warps(block)},
            )  # fmt: skip
        else:
            raise ValueError(f"{rows} rows by {path}: the block was laid out for {layout}")


def num_warps(block: int) -> int:
    """Warps of a program: a 16-byte access a lane and row, at most 128 registers a thread."""
    return max(1, min(block // 256, 16))
