"""Plain twins of the kernels that list a step's attention."""

import torch

from nanovllm.kernels.attention.decode_work_list import DecodeConfig
from nanovllm.kernels.attention.fixed_order import CHUNK, WIDE_CHUNK, WIDE_FROM
from nanovllm.kernels.attention.fixed_order_work_list import unit_of


def list_chunks_reference(row_slot: torch.Tensor, context_lens: torch.Tensor, config: DecodeConfig,
                          window: int | None = None) -> list[tuple[int, int, int, int, int, int]]:
    """The work list of row_slot and context_lens, int32 [R], as (row, slot, first key, end, index of the chunk, chunks
    of the row), long chunks first. Of rows longer than `window` only the last so many keys; where their chunks are cut
    depends on the row's length alone."""
    items = []
    for row, (slot, context) in enumerate(zip(row_slot.tolist(), context_lens.tolist(), strict=True)):
        if slot < 0 or context == 0:
            continue
        first = max(0, context - window) if window else 0
        begin = first // config.block_n * config.block_n
        chunk, length = config.min_chunk, context - begin
        while chunk * config.max_splits < length:
            chunk *= 2
        num_chunks = max(1, (length + chunk // 2) // chunk)
        for c in range(num_chunks):
            end = context if c == num_chunks - 1 else begin + (c + 1) * chunk
            items.append((row, slot, max(begin + c * chunk, first), end, c, num_chunks))
    return sorted(items, key=lambda item: item[2] // config.block_n * config.block_n - item[3])


def unit_start(unit: int, first_unit: int) -> int:
    """First key of a unit."""
    narrow = 1 + (WIDE_FROM - first_unit) // CHUNK
    if unit == 0:
        return 0
    return first_unit + (unit - 1) * CHUNK if unit < narrow else WIDE_FROM + (unit - narrow) * WIDE_CHUNK


def list_units_reference(row_slot: torch.Tensor, context_lens: torch.Tensor, first_unit: int,
                               window: int | None = None) -> list[tuple[int, int, int, int, int, int]]:
    """The work list of row_slot and context_lens, int32 [R], as (row, slot, first key, end, index of the unit among the
    row's, units of the row), in the order of rows; the kernel's is about that of lengths."""
    items = []
    for row, (slot, context) in enumerate(zip(row_slot.tolist(), context_lens.tolist(), strict=True)):
        if slot < 0 or context == 0:
            continue
        first = max(0, context - window) if window else 0
        numbers = range(unit_of(first, first_unit), unit_of(context - 1, first_unit) + 1)
        for index, unit in enumerate(numbers):
            start, end = (unit_start(number, first_unit) for number in (unit, unit + 1))
            items.append((row, slot, max(start, first), min(end, context), index, len(numbers)))
    return items


def list_tiles_reference(cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor,
                           block_m: int) -> list[tuple[int, int]]:
    """(row, first query within the row) of every tile of cu_seqlens_q int32 [R + 1] and context_lens int32 [R], those
    with most keys first."""
    starts, tiles = cu_seqlens_q.tolist(), []
    for row, context in enumerate(context_lens.tolist()):
        count = starts[row + 1] - starts[row]
        for query in range(0, count if context else 0, block_m):
            tiles.append((-min(context, context - count + query + block_m), row, query))
    return [(row, query) for _, row, query in sorted(tiles, key=lambda tile: tile[0])]
