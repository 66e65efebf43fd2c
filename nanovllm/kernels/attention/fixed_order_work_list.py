"""The work list of fixed-order decode attention, built on the device: which units of which rows there are.

A unit is what one program computes and leaves for the merge: the first keys of a row, whose chunks it adds up itself,
or one of the chunks after these (fixed_order.py). Few rows have short first units, so that the memory is busy; many
rows long ones, so that little is written and merged. No bit depends on which it was.
"""

import torch

from nanovllm.kernels.attention.decode_work_list import UNBOUNDED, DecodeConfig, Tuning, WorkList, for_heads, if_few
from nanovllm.kernels.attention.fixed_order import CHUNK, WIDE_CHUNK, WIDE_FROM
from nanovllm.kernels.attention.scores import padded_dims
from nanovllm.kernels.attention.work_list import lengths_of, own_rows, store_counts, store_entry
from nanovllm.kernels.base.triton_import import tl, triton

_CHUNK, _WIDE_CHUNK, _WIDE_FROM = tl.constexpr(CHUNK), tl.constexpr(WIDE_CHUNK), tl.constexpr(WIDE_FROM)
_CLASS = tl.constexpr(256)  # keys by which first units are sorted
_LONG_CLASSES, _CLASSES = tl.constexpr(4), tl.constexpr(WIDE_FROM // 256)
_AT_ONCE = tl.constexpr(16)  # entries of each row that are written at once
ROWS_PER_PROGRAM = 16
"""Rows whose entries one program writes."""

TUNING: Tuning = (
    (2, DecodeConfig(programs_per_sm=2, min_chunk=128, merge_heads=1)),
    (16, DecodeConfig(num_stages=2, programs_per_sm=4, min_chunk=256, merge_heads=1, max_registers=168)),
    (32, DecodeConfig(num_stages=2, programs_per_sm=4, min_chunk=512, merge_heads=1, max_registers=168)),
    (48, DecodeConfig(programs_per_sm=6, min_chunk=WIDE_FROM, max_registers=168)),
    (None, DecodeConfig(min_chunk=WIDE_FROM)),
)
"""Tuning in the form of decode_work_list.TUNING; min_chunk: keys of a row's first unit, a power of two from CHUNK to
WIDE_FROM."""


def unit_of(key: int, first_unit: int) -> int:
    """Number of the unit that holds a key, where a row's first unit has `first_unit` keys."""
    if key < WIDE_FROM:
        return 0 if key < first_unit else 1 + (key - first_unit) // CHUNK
    return 1 + (WIDE_FROM - first_unit) // CHUNK + (key - WIDE_FROM) // WIDE_CHUNK


@triton.jit
def _unit_of(key, first_unit):
    narrow = tl.where(key < first_unit, 0, 1 + (key - first_unit) // _CHUNK)
    wide = 1 + (_WIDE_FROM - first_unit) // _CHUNK + (key - _WIDE_FROM) // _WIDE_CHUNK
    return tl.where(key < _WIDE_FROM, narrow, wide)


@triton.jit
def _unit_start(unit, first_unit):
    num_narrow = 1 + (_WIDE_FROM - first_unit) // _CHUNK
    start = tl.where(unit < num_narrow, first_unit + (unit - 1) * _CHUNK,
                     _WIDE_FROM + (unit - num_narrow) * _WIDE_CHUNK)
    return tl.where(unit == 0, 0, start)


@triton.jit
def _place(here, placed):
    """(where each row's `here` entries begin in the list, entries up to then)"""
    return placed + tl.cumsum(here, 0) - here, placed + tl.sum(here, 0)


@triton.jit(do_not_specialize=["ROW_SLOT", "CONTEXT_LENS", "num_rows", "window", "few"])
def list_units_kernel(ROW_SLOT, CONTEXT_LENS, WORK, NUM_WORK, NUM_CHUNKS, num_rows, window, FIRST: tl.constexpr,
                      ROWS_PADDED: tl.constexpr, ROWS_PER_PROGRAM: tl.constexpr, ENDS=None, few=None,
                      FEW_FIRST: tl.constexpr = 0, PLACES: tl.constexpr = 1):
    """The units of rows ROW_SLOT and CONTEXT_LENS, int32 [num_rows]: WORK int32 [entries, 4] as
    work_list.py has it, NUM_WORK int32 [1] its entries, NUM_CHUNKS int32 [num_rows] the units of each row. FIRST: keys
    of a row's first unit. Every program ranks all rows and writes the entries of its own ROWS_PER_PROGRAM. With PLACES
    above 1: see work_list.py; FEW_FIRST in place of FIRST where at most `few` rows have entries."""
    rows, slot, first, end, sharing = lengths_of(ROW_SLOT, CONTEXT_LENS, ENDS, num_rows, window, ROWS_PADDED,
                                                 ROWS_PER_PROGRAM, PLACES)
    first_unit = FIRST
    if PLACES > 1:
        first_unit = if_few(end, few, FEW_FIRST, FIRST)
    num_narrow = 1 + (_WIDE_FROM - first_unit) // _CHUNK
    has_any = end > 0
    unit = _unit_of(first, first_unit)
    units = tl.where(has_any, _unit_of(tl.maximum(end - 1, 0), first_unit) - unit + 1, 0)
    narrow_end = unit + units  # numbers of narrow units but the row's first, then of wide ones
    wide = tl.where(has_any, tl.maximum(narrow_end - tl.maximum(unit, num_narrow), 0), 0)
    has_first = has_any & (unit == 0)
    narrow = units - wide - tl.where(has_first, 1, 0)
    first_length = tl.minimum(end, first_unit) - first

    placed = tl.sum(tl.zeros_like(end), 0)
    at_first = tl.zeros_like(end)
    at_wide = tl.zeros_like(end)
    of_class = tl.minimum((first_length - 1) // _CLASS, _CLASSES - 1)
    for step in tl.static_range(_CLASSES):
        if step == _CLASSES - _LONG_CLASSES:
            at_wide, placed = _place(wide, placed)
        here = tl.where(has_first & (of_class == _CLASSES - 1 - step), 1, 0)
        begin, placed = _place(here, placed)
        at_first += here * begin
    at_narrow, placed = _place(narrow, placed)

    mine = own_rows(NUM_WORK, rows, num_rows, placed, ROWS_PER_PROGRAM)
    row_and_slot = rows | (slot << 16)
    store_counts(NUM_CHUNKS, rows, sharing, units, mine, PLACES)
    store_entry(WORK, at_first, row_and_slot, first, tl.minimum(end, first_unit), units << 16, mine & has_first)
    nothing = tl.zeros([1, _AT_ONCE], tl.int32)
    for begin in range(0, tl.max(tl.where(mine, units, 0), 0), _AT_ONCE):
        index = begin + tl.arange(0, _AT_ONCE)[None, :]
        number = unit[:, None] + index
        is_wide = number >= num_narrow
        there = mine[:, None] & (index < units[:, None]) & (number > 0)
        of_wide = at_wide[:, None] + number - tl.maximum(unit, num_narrow)[:, None]
        of_narrow = at_narrow[:, None] + number - tl.maximum(unit, 1)[:, None]
        start = tl.maximum(_unit_start(number, first_unit), first[:, None])
        stop = tl.minimum(_unit_start(number + 1, first_unit), end[:, None])
        store_entry(WORK, tl.where(is_wide, of_wide, of_narrow), row_and_slot[:, None] + nothing, start, stop,
                    index | (units[:, None] << 16), there)


def tuning(num_kv_heads: int, head_dim: int, fp8: bool = False) -> Tuning:
    """TUNING for a rank that holds so many key heads. Not for e4m3."""
    assert not fp8
    padded = head_dim != padded_dims(head_dim)  # its masks take registers, which would spill
    limit: dict[str, int | None] = {"max_registers": None} if padded else {}
    return for_heads(TUNING, num_kv_heads, head_dim, num_stages=2, **limit)


class FixedOrderWorkList(WorkList):
    """WorkList of units."""

    fixed_order = True
    _tuned = staticmethod(tuning)

    def most_units(self, config: DecodeConfig, context_len: int) -> int:
        """Units of the row that has most, among rows of up to so many tokens."""
        units = unit_of(max(context_len, 1) - 1, config.min_chunk) + 1
        return units if self.window is None else min(units, (self.window + self.together - 1) // CHUNK + 2)

    def max_splits(self, config: DecodeConfig) -> int:
        return self.most_units(config, self.max_model_len)

    def most_chunks(self, num_rows: int, max_context_len: int) -> int:
        longest = min(max_context_len, self.max_model_len)
        return max(self.most_units(config, longest) for config in self.cuts(num_rows))

    def make(self, row_slot: torch.Tensor, context_lens: torch.Tensor, num_rows: int) -> None:
        config, fine = self.cuts(num_rows)
        list_units_kernel[(triton.cdiv(num_rows, ROWS_PER_PROGRAM),)](
            row_slot, context_lens, self.entries, self.num_entries, self.num_chunks, num_rows, self.window or UNBOUNDED,
            FIRST=config.min_chunk, ROWS_PADDED=max(16, triton.next_power_of_2(num_rows)),
            ROWS_PER_PROGRAM=ROWS_PER_PROGRAM, num_warps=4, FEW_FIRST=fine.min_chunk, **self._sharing(num_rows))
