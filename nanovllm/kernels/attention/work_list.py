"""The work list of decode kernels, and how they go through it: which tile comes next, and how it is loaded.

The work list is int32 [entries, 4]: row | slot << 16, first key, end, index | count << 16 of the row's chunks. An item
is an entry for one key head. Program p of P takes items p, p + P and so on, and runs the tiles of all in one loop.

Rows next to each other that have the same slot are tokens of one sequence, each of which sees one key more than the
one before. With PLACES above 1 up to so many of them share entries, which name the first of them: their keys are read
once. Which rows they are is found on the device, so that a captured graph serves steps with and without drafts.
"""


from nanovllm.kernels.attention.pages import look_up
from nanovllm.kernels.base.device import prefetch_lines
from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit
def store_entry(WORK, at, row_and_slot, start, end, chunk_of, mask):
    """Writes entries at numbers `at` of the work list; all are of one shape."""
    entry = WORK + at * 4
    tl.store(entry, row_and_slot, mask=mask)
    tl.store(entry + 1, start, mask=mask)
    tl.store(entry + 2, end, mask=mask)
    tl.store(entry + 3, chunk_of, mask=mask)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def lengths_of(ROW_SLOT, CONTEXT_LENS, ENDS, num_rows, window, ROWS_PADDED: tl.constexpr,
               ROWS_PER_PROGRAM: tl.constexpr, PLACES: tl.constexpr):
    """Numbers of a step's rows [ROWS_PADDED], their slots, first keys and ends; padding has no keys. Of rows that share
    entries the first has the keys of all, and the others none. Last, how many rows each one's count of chunks is for.
    Writes ENDS int32 [num_rows, PLACES]: the ends of the rows that share a row's entries, 0 where there is none."""
    rows = tl.arange(0, ROWS_PADDED)
    slot = tl.load(ROW_SLOT + rows, mask=rows < num_rows, other=-1)
    length = tl.load(CONTEXT_LENS + rows, mask=rows < num_rows, other=0)
    end = tl.where(slot >= 0, length, 0)
    first_end = end
    sharing = 1
    if PLACES > 1:
        before = tl.load(ROW_SLOT + rows - 1, mask=(rows > 0) & (rows < num_rows), other=-1)
        begin = tl.associative_scan(tl.where(slot == before, 0, rows), 0, _larger)  # of the rows of this slot
        shares = (slot >= 0) & ((rows - begin) % PLACES == 0)
        sharing = tl.where(slot < 0, 1, 0)
        first_end = tl.where(shares, end, 0)
        mine = (rows // ROWS_PER_PROGRAM == tl.program_id(0)) & (rows < num_rows)
        end = first_end
        for place in tl.static_range(PLACES):
            there = rows + place < num_rows
            shares = shares & (tl.load(ROW_SLOT + rows + place, mask=there, other=-1) == slot)
            own = tl.where(shares, tl.load(CONTEXT_LENS + rows + place, mask=there, other=0), 0)
            tl.store(ENDS + rows * PLACES + place, own, mask=mine)
            end = tl.maximum(end, own)
            sharing += tl.where(shares, 1, 0)
    return rows, slot, tl.maximum(first_end - window, 0), end, sharing


@triton.jit
def store_counts(NUM_CHUNKS, rows, sharing, num_chunks, mine, PLACES: tl.constexpr):
    """Writes the number of chunks of each row that is `mine`, and of those that share its entries."""
    if PLACES == 1:
        tl.store(NUM_CHUNKS + rows, num_chunks, mask=mine)
    else:
        for place in tl.static_range(PLACES):
            tl.store(NUM_CHUNKS + rows + place, num_chunks, mask=mine & (place < sharing))


@triton.jit
def own_rows(NUM_WORK, rows, num_rows, num_entries, ROWS_PER_PROGRAM: tl.constexpr):
    """Mask of the rows whose entries this program writes; the first one writes the length of the work list too."""
    program = tl.program_id(0)
    if program == 0:
        tl.store(NUM_WORK, num_entries)
    return (rows // ROWS_PER_PROGRAM == program) & (rows < num_rows)


@triton.jit
def _block_of(TABLE, table_stride, row_and_slot, start, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Result of look_up for a tile of an entry's row; block 0 past `end`."""
    known = start < end if PAGE % BLOCK_N == 0 else start + tl.arange(0, BLOCK_N) < end
    return look_up(TABLE + (row_and_slot >> 16).to(tl.int64) * table_stride, start, known, PAGE, BLOCK_N)


@triton.jit
def prefetch_in_page(CACHE, kv_head, block, start, strides, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Has the L2 cache fetch a tile within one page: its lines of 128 bytes, or each token's first one."""
    LINE: tl.constexpr = 128 * 8 // CACHE.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((D + LINE - 1) // LINE)
    tile = CACHE + block.to(tl.int64) * strides[0] + kv_head * strides[1] + start % PAGE * strides[2]
    lines = tl.minimum(tl.arange(0, LINES) * LINE, D - 1)
    prefetch_lines(tile + (tl.arange(0, BLOCK_N) * strides[2])[:, None] + lines[None, :])


@triton.jit
def _tile_start(start, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """First key of the tile that holds key `start`. Chunks begin with a tile, but for a window's first key."""
    return start // BLOCK_N * BLOCK_N if WINDOWED else start


@triton.jit
def _count_tiles(WORK, num_items, HKV: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """Tiles in all items of this program but its first."""
    AT_ONCE: tl.constexpr = 64
    tiles = 0
    for first in range(tl.program_id(0) + tl.num_programs(0), num_items, AT_ONCE * tl.num_programs(0)):
        items = first + tl.arange(0, AT_ONCE) * tl.num_programs(0)
        entry = WORK + items // HKV * 4
        start = _tile_start(tl.load(entry + 1, mask=items < num_items, other=0), BLOCK_N, WINDOWED)
        end = tl.load(entry + 2, mask=items < num_items, other=0)
        tiles += tl.sum((end - start + BLOCK_N - 1) // BLOCK_N, 0)
    return tiles


@triton.jit
def load_item(WORK, item, mask, other, HKV: tl.constexpr):
    """The item's entry of the work list where mask is true, else `other`."""
    entry = WORK + item // HKV * 4
    row_and_slot = tl.load(entry, mask=mask, other=other[0])
    start = tl.load(entry + 1, mask=mask, other=other[1])
    end = tl.load(entry + 2, mask=mask, other=other[2])
    return row_and_slot, start, end, tl.load(entry + 3, mask=mask, other=other[3])


@triton.jit
def first_tile(WORK, NUM_WORK, TABLE, table_stride, HKV: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
               WINDOWED: tl.constexpr):
    """The program's number of tiles; the number of all items; the first tile's item, key and block; the entries of that
    item and of the program's next."""
    num_items = tl.load(NUM_WORK) * HKV
    item, step = tl.program_id(0), tl.num_programs(0)
    # The first entry is read before it is known to be one, which it is in all but the smallest batches.
    row_and_slot, first, end, chunk_of = load_item(WORK, item, True, (0, 0, 0, 0), HKV)
    n = _tile_start(first, BLOCK_N, WINDOWED)
    end = tl.where(item < num_items, end, n)
    tiles = (end - n + BLOCK_N - 1) // BLOCK_N + _count_tiles(WORK, num_items, HKV, BLOCK_N, WINDOWED)
    coming = load_item(WORK, item + step, item + step < num_items, (0, 0, 0, 0), HKV)
    block = _block_of(TABLE, table_stride, row_and_slot, n, end, PAGE, BLOCK_N)
    return tiles, num_items, item, n, block, (row_and_slot, first, end, chunk_of), coming


@triton.jit
def next_tile(is_last, num_items, item, n, entry, coming, WORK, TABLE, table_stride, HKV: tl.constexpr,
              PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """Finds the tile that follows key n's, the item's last or not: item, key, block and both entries, as above. All of
    it is looked up an iteration or more before it is needed."""
    step = tl.num_programs(0)
    row_and_slot, first, end, chunk_of = entry
    n = tl.where(is_last, _tile_start(coming[1], BLOCK_N, WINDOWED), n + BLOCK_N)
    if WINDOWED:
        first = tl.where(is_last, coming[1], first)
    end = tl.where(is_last, coming[2], end)
    row_and_slot = tl.where(is_last, coming[0], row_and_slot)
    chunk_of = tl.where(is_last, coming[3], chunk_of)
    item = tl.where(is_last, item + step, item)
    block = _block_of(TABLE, table_stride, row_and_slot, n, end, PAGE, BLOCK_N)
    coming = load_item(WORK, item + step, is_last & (item + step < num_items), coming, HKV)
    return item, n, block, (row_and_slot, first, end, chunk_of), coming
