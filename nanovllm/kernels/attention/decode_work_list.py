"""The work list of decode attention, built on the device: which chunks of which rows there are, long ones first."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm.kernels.attention.work_list import lengths_of, own_rows, store_counts, store_entry
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.speculative import shared_lanes


@dataclass(frozen=True)
class DecodeConfig:
    """Tuning of the kernel for a class of batch sizes; all sizes of a class give a row the same bits."""

    block_n: int = 64
    """Keys of a tile."""
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 8
    """Three or so run at a time; with more the hardware hands out work as it is done, which evens out the end."""
    min_chunk: int = 2048
    """Keys of a chunk of a short row, give or take a half; a power of two and a multiple of block_n."""
    max_splits: int = 32
    """Maximum chunks of a row: longer rows get longer chunks."""
    max_registers: int | None = None
    """Maximum registers of a thread; fewer let more programs share a multiprocessor."""
    merge_heads: int = 8
    """Query heads that one program merges the chunks of."""

    def most_chunks(self, max_context_len: int) -> int:
        """Chunks of the row that is cut most, among rows of up to so many keys; a row's last one is half a chunk to one
        and a half."""
        return min(self.max_splits, max(1, (max_context_len + self.min_chunk // 2) // self.min_chunk))


UNBOUNDED = 1 << 30
"""Keys of a window that there is not."""
TUNED_KV_HEADS = 8
"""Key heads of the layers that TUNING was measured with."""
TUNED_HEAD_DIM = 128
"""Dimensions of their heads: wider ones take shorter tiles."""
Tuning = tuple[tuple[int | None, DecodeConfig], ...]
TUNING: Tuning = (
    (2, DecodeConfig(programs_per_sm=2, min_chunk=64, merge_heads=1)),
    (4, DecodeConfig(num_stages=2, programs_per_sm=4, min_chunk=64, max_splits=16, merge_heads=1)),
    (8, DecodeConfig(num_stages=2, programs_per_sm=4, min_chunk=64, max_splits=8, merge_heads=1)),
    (16, DecodeConfig(programs_per_sm=3, min_chunk=256)),
    (40, DecodeConfig(programs_per_sm=3, min_chunk=1024)),
    (48, DecodeConfig(programs_per_sm=6, min_chunk=1024)),
    (224, DecodeConfig()),
    (None, DecodeConfig(block_n=32, num_warps=2, programs_per_sm=16)),
)
"""Table (most rows with TUNED_KV_HEADS key heads, configuration). Few rows must be cut small to keep the memory busy;
with many it is busy whichever way they are cut, and each further chunk is one more result to write and merge."""
FP8_TUNING: Tuning = (
    (2, DecodeConfig(num_warps=2, programs_per_sm=2, min_chunk=64, merge_heads=1)),
    (4, DecodeConfig(num_warps=2, num_stages=2, programs_per_sm=4, min_chunk=64, max_splits=16, merge_heads=1)),
    (16, DecodeConfig(num_warps=2, num_stages=2, programs_per_sm=4, min_chunk=128, merge_heads=1)),
    (40, DecodeConfig(num_warps=2, programs_per_sm=4, min_chunk=512)),
    (None, DecodeConfig(num_warps=2, programs_per_sm=16, min_chunk=1024)),
)
"""Tuning over keys and values in e4m3."""


def tuning(num_kv_heads: int, head_dim: int, fp8: bool = False) -> Tuning:
    """TUNING for a rank that holds so many key heads. Tiles of wide heads are shorter, so that as many bytes are in
    flight."""
    block_n = 32 if head_dim <= 256 else 16
    return for_heads(FP8_TUNING if fp8 else TUNING, num_kv_heads, head_dim, block_n=block_n, num_stages=2, num_warps=4)


def for_heads(table: Tuning, num_kv_heads: int, head_dim: int, **of_wide_heads: int | None) -> Tuning:
    """Scales a tuning table to this rank's heads: the work to share out is rows x heads, so under tensor parallelism
    more rows still count as few, or the longest row of an uncut batch would decide. With many heads the classes of few
    rows hold no row, and are left out."""
    changes = of_wide_heads if head_dim > TUNED_HEAD_DIM else {}
    scaled = ((most and most * TUNED_KV_HEADS // num_kv_heads, config) for most, config in table)
    return tuple((most, replace(config, **changes)) for most, config in scaled if most != 0)  # type: ignore[arg-type]


@triton.jit
def _chunk_size(context_len, min_chunk, max_splits, NUM_CLASSES: tl.constexpr):
    """min_chunk doubled until max_splits chunks cover the row."""
    chunk = tl.zeros_like(context_len) + min_chunk
    for _ in tl.static_range(NUM_CLASSES - 1):
        chunk = tl.where(chunk * max_splits < context_len, chunk * 2, chunk)
    return chunk


@triton.jit
def if_few(end, few, this, other):
    """`this` where at most `few` rows have an `end`, else `other`."""
    return tl.where(tl.sum(tl.where(end > 0, 1, 0), 0) <= few, this, other)


@triton.jit(do_not_specialize=["ROW_SLOT", "CONTEXT_LENS", "num_rows", "window", "few"])
def list_chunks_kernel(ROW_SLOT, CONTEXT_LENS, WORK, NUM_WORK, NUM_CHUNKS, num_rows, window, BLOCK_N: tl.constexpr,
                       MIN_CHUNK: tl.constexpr, MAX_SPLITS: tl.constexpr, NUM_CLASSES: tl.constexpr,
                       TAIL_CLASSES: tl.constexpr, ROWS_PADDED: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr,
                       ENDS=None, few=None, FEW_CHUNK: tl.constexpr = 0, FEW_SPLITS: tl.constexpr = 0,
                       PLACES: tl.constexpr = 1):
    """The chunks of rows ROW_SLOT and CONTEXT_LENS, int32 [num_rows]: WORK int32 [entries, 4] as work_list.py has it,
    long ones first, NUM_WORK int32 [1] its entries, NUM_CHUNKS int32 [num_rows] the chunks of each row. Every program
    ranks all rows and writes the entries of its own ROWS_PER_PROGRAM. With PLACES above 1: see work_list.py; where at
    most `few` rows have entries, their chunks are cut by FEW_CHUNK and FEW_SPLITS."""
    rows, slot, first, end, sharing = lengths_of(ROW_SLOT, CONTEXT_LENS, ENDS, num_rows, window, ROWS_PADDED,
                                                 ROWS_PER_PROGRAM, PLACES)
    min_chunk, max_splits = MIN_CHUNK, MAX_SPLITS
    if PLACES > 1:
        min_chunk = if_few(end, few, FEW_CHUNK, MIN_CHUNK)
        max_splits = if_few(end, few, FEW_SPLITS, MAX_SPLITS)
    begin = first // BLOCK_N * BLOCK_N  # chunks begin with tiles
    length = end - begin
    chunk = _chunk_size(length, min_chunk, max_splits, NUM_CLASSES)
    num_full = tl.maximum((length + chunk // 2) // chunk - 1, 0)  # the last chunk is half a chunk to one and a half
    tail = length - num_full * chunk

    first_full = tl.zeros_like(length)
    first_tail = tl.zeros_like(length)
    placed = tl.sum(tl.zeros_like(length), 0)
    for step in tl.static_range(NUM_CLASSES):
        here = tl.where(chunk == (min_chunk << (NUM_CLASSES - 1 - step)), num_full, 0)
        first_full += tl.where(here > 0, placed + tl.cumsum(here, 0) - here, 0)
        placed += tl.sum(here, 0)
    longest = min_chunk * 3 // 2  # of a row that is not longer than the splits at min_chunk allow
    tail_class = tl.minimum((tail * TAIL_CLASSES + longest - 1) // longest, TAIL_CLASSES)
    for step in tl.static_range(TAIL_CLASSES):
        here = tl.where(tail_class == TAIL_CLASSES - step, 1, 0)
        first_tail += here * (placed + tl.cumsum(here, 0) - here)
        placed += tl.sum(here, 0)

    mine = own_rows(NUM_WORK, rows, num_rows, placed, ROWS_PER_PROGRAM)
    row_and_slot = rows | (slot << 16)
    num_chunks = num_full + tl.where(tail > 0, 1, 0)
    store_counts(NUM_CHUNKS, rows, sharing, num_chunks, mine, PLACES)
    store_entry(WORK, first_tail, row_and_slot, tl.maximum(begin + num_full * chunk, first), end,
                num_full | (num_chunks << 16), mine & (tail > 0))
    index = tl.arange(0, max(MAX_SPLITS, FEW_SPLITS))[None, :]
    full_mask = mine[:, None] & (index < num_full[:, None])
    nothing = tl.zeros_like(index)
    store_entry(WORK, first_full[:, None] + index, row_and_slot[:, None] + nothing,
                tl.maximum(begin[:, None] + index * chunk[:, None], first[:, None]),
                begin[:, None] + (index + 1) * chunk[:, None], index | (num_chunks[:, None] << 16), full_mask)


class WorkList:
    """The work list of a step's decode rows for layers of one window, in buffers of its own. Nothing is allocated after
    construction."""

    fixed_order = False
    """Whether chunks are added up in one order; see fixed_order.py."""

    def __init__(self, num_kv_heads: int, head_dim: int, window: int | None, max_num_seqs: int, max_model_len: int,
                 device: torch.device, config: DecodeConfig | None = None, fp8: bool = False, places: int = 1,
                 together: int = 1) -> None:
        """config: in place of the tuned ones, for all batch sizes. max_num_seqs: rows, of which up to `places` may be
        tokens of one sequence, and so many of these share its keys."""
        self.window, self.max_num_seqs, self.max_model_len = window, max_num_seqs, max_model_len
        self.places, self.together = places, together
        self.why = f"{together} of up to {places} rows of a sequence share its keys"
        """Report."""
        if together < places:
            self.why += ": more lanes would spill registers"
        self._alone = self._tuned(num_kv_heads, head_dim, fp8) if config is None else ((None, config),)
        self.tuning = self._alone
        self.most_splits = max(self.max_splits(config) for _, config in self.tuning)
        self.entries = torch.zeros(max_num_seqs * self.most_splits, 4, dtype=torch.int32, device=device)
        self.num_entries = torch.zeros(1, dtype=torch.int32, device=device)
        self.num_chunks = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.ends = None if together == 1 else torch.zeros(max_num_seqs, together, dtype=torch.int32, device=device)

    _tuned = staticmethod(tuning)

    @classmethod
    def places_together(cls, places: int, group_size: int, head_dim: int, fp8: bool = False) -> int:
        """Number of a sequence's `places` rows, each of `group_size` heads a key head, that share a tile: as many
        as fit without spilled registers, in parts of about the same size."""
        most = max(1, shared_lanes(head_dim, fp8, cls.fixed_order) // group_size)
        return triton.cdiv(places, triton.cdiv(places, most))

    @property
    def most_partials(self) -> int:
        """Chunks of all rows together, in the step that has most."""
        return max(num_rows * self.room(num_rows) for num_rows in self.size_classes())

    def config(self, num_rows: int) -> DecodeConfig:
        return next(config for most, config in self.tuning if most is None or num_rows <= most)

    def few(self, num_rows: int) -> int:
        """Rows with entries of their own, of so many rows, where each sequence has all of its places."""
        return min(num_rows, triton.cdiv(num_rows, self.places) * triton.cdiv(self.places, self.together))

    def cuts(self, num_rows: int) -> tuple[DecodeConfig, DecodeConfig]:
        """Configurations of a batch of so many rows, and of one whose rows are of few sequences (its chunks alone)."""
        own, few = self.config(num_rows), self.config(self.few(num_rows))
        return own, replace(own, min_chunk=max(few.min_chunk, own.block_n), max_splits=few.max_splits)

    def prefer_small_shared_memory(self, wanted: bool) -> None:
        """Lets the class of fewest rows take less than the 48 KB of shared memory above which Triton asks for all that
        there is of it. Alone it is slower so."""
        (most, config), *others = self._alone
        if wanted and config.num_warps == 4:
            config = replace(config, num_stages=2, num_warps=8)
        self.tuning = ((most, config), *others)

    def _most_keys(self, config: DecodeConfig, context_len: int) -> int:
        """Bound on the keys of the chunks of a row of up to `context_len` tokens."""
        if self.window is None:
            return context_len
        return min(context_len, self.window + self.together + config.block_n - 2)

    def max_splits(self, config: DecodeConfig) -> int:
        """Room for chunks in the buffers, a power of two."""
        chunks = triton.cdiv(self._most_keys(config, self.max_model_len), config.min_chunk)
        return min(config.max_splits, triton.next_power_of_2(chunks))

    def room(self, num_rows: int) -> int:
        """Room for chunks of a row in the buffers, in a batch of so many rows."""
        return max(map(self.max_splits, self.cuts(num_rows)))

    def most_chunks(self, num_rows: int, max_context_len: int) -> int:
        """Chunks of the row that is cut most, in a batch of so many rows of at most so many tokens."""
        return max(min(self.max_splits(config), config.most_chunks(self._most_keys(config, max_context_len)))
                   for config in self.cuts(num_rows))

    def size_classes(self) -> list[int]:
        """The largest batch of each: they differ by configuration, and their lists by power of two of rows."""
        powers = (16 << n for n in range(self.max_num_seqs.bit_length()))
        limits = {*powers, *(most for most, _ in self.tuning if most)}
        parts = triton.cdiv(self.places, self.together)
        limits |= {most // parts * self.places for most, _ in self.tuning if most and most >= parts}
        return sorted({min(most, self.max_num_seqs) for most in limits})

    def _sharing(self, num_rows: int) -> dict[str, Any]:
        """Arguments of the listing kernels that go with rows that share keys."""
        return {"ENDS": self.ends, "few": self.few(num_rows), "PLACES": self.together} if self.together > 1 else {}

    def make(self, row_slot: torch.Tensor, context_lens: torch.Tensor, num_rows: int) -> None:
        """Builds the work list of a step from int32 [num_rows] tensors, on the device."""
        config, fine = self.cuts(num_rows)
        splits, num_classes = self.max_splits(config), 1
        while any(c.min_chunk * self.max_splits(c) << (num_classes - 1) < self._most_keys(c, self.max_model_len)
                  for c in (config, fine)):
            num_classes += 1
        rows_per_program = 16
        list_chunks_kernel[(triton.cdiv(num_rows, rows_per_program),)](
            row_slot, context_lens, self.entries, self.num_entries, self.num_chunks, num_rows, self.window or UNBOUNDED,
            BLOCK_N=config.block_n, MIN_CHUNK=config.min_chunk, MAX_SPLITS=splits, NUM_CLASSES=num_classes,
            TAIL_CLASSES=12, ROWS_PADDED=max(16, triton.next_power_of_2(num_rows)), ROWS_PER_PROGRAM=rows_per_program,
            num_warps=4, FEW_CHUNK=fine.min_chunk, FEW_SPLITS=self.max_splits(fine), **self._sharing(num_rows))
