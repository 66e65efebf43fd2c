"""y = x @ W^T with weights of 4 and 8 bits, widened in registers: the kernels. packed_tile.py launches them.

Programs that run at a time begin at different columns: all would ask for the same lines of x at once, which one slice
of the L2 cache has. A row's sum over K goes in an order that the shapes and the choice alone decide, and does not
depend on the other rows.
"""

from nanovllm.kernels.base.activations import silu_mul
from nanovllm.kernels.base.device import prefetch_lines
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.epilogue import store_tile, weight_rows
from nanovllm.kernels.gemm.expand import first_b, slots_of, tile_delta
from nanovllm.kernels.gemm.unpack import (
    SPAN,
    add_block,
    load_pair,
    planes_of,
    run_of,
    scale_and_zero,
    words_at,
    words_of_row,
)


@triton.jit
def _prefetch(
    w_ptr, groups_ptr, begin, end, first_block, pid, n, n_out,
    BLOCK_N: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, PAIRED: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Brings words and scales of the first PREFETCH blocks into L2, that a program goes through. A line has 2 rows of
    words (of 8 bits 1), or the scales of 32; past the end, what is there again."""
    OF_LINE: tl.constexpr = 64 // words_of_row(CODE)
    block = (begin + (first_block - begin + tl.arange(0, PREFETCH)) % (end - begin))[:, None]
    index = tl.arange(0, BLOCK_N // OF_LINE)
    lane = (index // 2) * (2 * OF_LINE) + index % 2 if PAIRED else index * OF_LINE
    row, _ = weight_rows(lane, pid, n_out, BLOCK_N, PAIRED)
    prefetch_lines(w_ptr + (block * n + tl.minimum(row, n - 1)[None, :]) * words_of_row(CODE))
    index = tl.arange(0, BLOCK_N // 16)
    lane = (index // 2) * 32 + index % 2 if PAIRED else index * 16
    row, _ = weight_rows(lane, pid, n_out, BLOCK_N, PAIRED)
    if CODE == "e2m1":
        prefetch_lines(groups_ptr + block * (SPAN // (4 * GROUP)) * n + tl.minimum(row, n - 1)[None, :])
    else:
        group = 0 if GROUP == 0 else block * (SPAN // GROUP)
        prefetch_lines(groups_ptr + (group * n + tl.minimum(row, n - 1)[None, :]) * 2)


@triton.jit(do_not_specialize=["rows"])
def int4_gemm_kernel(
    x_ptr, w_ptr, groups_ptr, factors_ptr, out_ptr, scratch_ptr, counter_ptr, ADAPTER, rows, n, n_out, k,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, PAIRED: tl.constexpr, ADDS_UP: tl.constexpr, PREFETCH: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of weights, splits of k); x [rows, k]; words, groups (the scales) and factors as
    PackedWeight has them. GROUP: columns of a group; 0: all. out [rows, n_out], or of several splits float32 [splits,
    rows, n_out], unless the last of them ADDS_UP. PREFETCH: blocks to bring into L2 before x may be read, a power of
    two. EVEN_M: x ends where tiles and blocks do. ADAPTER: see expand.py."""
    dtype = x_ptr.dtype.element_ty
    first_row = tl.program_id(0) * ROWS
    pid, split = tl.program_id(1), tl.program_id(2)
    blocks = tl.cdiv(k, SPAN)
    splits = tl.num_programs(2)
    begin, end = blocks * split // splits, blocks * (split + 1) // splits
    first_block = begin + pid % (end - begin)
    w_rows, live = weight_rows(tl.arange(0, BLOCK_N), pid, n_out, BLOCK_N, PAIRED)
    if EVEN_N:
        live = w_rows >= 0
    w_ptrs = words_at(w_ptr, tl.where(live, w_rows, 0), CODE, GROUP)
    if ADAPTER is not None:
        slots = slots_of(ADAPTER, first_row + tl.arange(0, ROWS), rows)
        b = first_b(ADAPTER, slots, tl.where(live, w_rows, n), n, n)
    if PDL:
        _prefetch(w_ptr, groups_ptr, begin, end, first_block, pid, n, n_out, BLOCK_N, CODE, GROUP, PAIRED, PREFETCH)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    row = tl.arange(0, ROWS)
    x_ptr += first_row.to(tl.int64) * k
    rows -= first_row
    live_rows = None if EVEN_M else row < rows
    w_rows = tl.where(live, w_rows, 0)
    factors, accs = (1.0,), (tl.zeros([BLOCK_N, ROWS], dtype=tl.float32),)
    if factors_ptr is not None:
        factors = (tl.load(factors_ptr + w_rows)[:, None],)
    # One scale of all a weight row's sums may wait for the end: large tiles then hold one set of sums, not two.
    AT_END: tl.constexpr = ROWS >= 64 and (CODE == "e2m1" or (CODE == "bytes" and GROUP == 0))
    for step in tl.range(first_block, first_block + end - begin, num_stages=STAGES):
        block = tl.where(step < end, step, step - (end - begin))
        accs = add_block(accs, w_ptrs, groups_ptr, w_rows, block, n, 0, x_ptr + row[:, None] * k, live_rows, k,
                         factors, dtype, CODE, GROUP, HAS_ZEROS, EVEN_K, PTX, not AT_END)  # fmt: skip
    if AT_END:
        if CODE == "bytes":
            scale, _ = scale_and_zero(load_pair(groups_ptr, w_rows), dtype, False, PTX)
            factors = (scale.to(tl.float32)[:, None],)
        accs = (accs[0] * factors[0],)

    if ADAPTER is not None:
        at, w_row = first_row + row, tl.where(live, w_rows, n)
        accs = (accs[0] + tile_delta(ADAPTER, b, slots, at, first_row + rows, w_row, n, n, False),)
    _finish(
        tl.trans(accs[0]), out_ptr, scratch_ptr, counter_ptr, first_row, rows, n_out,
        ROWS, BLOCK_N, PAIRED, ADDS_UP,
    )  # fmt: skip


@triton.jit
def _finish(
    y, out_ptr, scratch_ptr, counter_ptr, first_row, rows, n_out,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PAIRED: tl.constexpr, ADDS_UP: tl.constexpr,
):  # fmt: skip
    """Stores y float32 [ROWS, BLOCK_N], or adds up the splits and stores the sum. rows: those from first_row on.
    Scratch is float32 [splits, tiles of rows, ROWS, tiles of weights x BLOCK_N]."""
    tile, pid, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if not ADDS_UP:
        out_ptr += split.to(tl.int64) * (rows + first_row) * n_out
        _store(y, out_ptr, first_row, rows, pid, n_out, ROWS, BLOCK_N, PAIRED)
    else:
        width, splits = tl.num_programs(1) * BLOCK_N, tl.num_programs(2)
        at = (tile * ROWS + tl.arange(0, ROWS)[:, None]) * width + pid * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        slab = tl.num_programs(0) * ROWS * width
        tl.store(scratch_ptr + split * slab + at, y)
        counter_ptr = counter_ptr + tile * tl.num_programs(1) + pid
        tl.debug_barrier()  # all threads' partial sums are written before the one atomic publishes them
        is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == splits - 1
        tl.debug_barrier()
        if is_last:
            tl.store(counter_ptr, 0)  # for the next launch
            y = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
            for part in tl.range(0, splits):
                # .cg, because L1 may hold a line as it was before another program wrote it
                y += tl.load(scratch_ptr + part * slab + at, cache_modifier=".cg")
            _store(y, out_ptr, first_row, rows, pid, n_out, ROWS, BLOCK_N, PAIRED)


@triton.jit
def _store(
    y, out_ptr, first_row, rows, pid, n_out, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PAIRED: tl.constexpr
):  # fmt: skip
    WIDTH: tl.constexpr = BLOCK_N // 2 if PAIRED else BLOCK_N
    if PAIRED:
        gate, up = tl.split(tl.reshape(y, [ROWS, WIDTH, 2]))
        y = silu_mul(gate, up, out_ptr.dtype.element_ty)
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    store_tile(y, 0.0, lane, row, out_ptr + first_row.to(tl.int64) * n_out, rows, pid, n_out, WIDTH, False)


@triton.jit
def int4_widen_kernel(
    w_ptr, groups_ptr, factors_ptr, out_ptr, first, end, n, k,
    BLOCK_N: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the weight rows [first, end), blocks of k): those rows in out's dtype, [end - first, k]."""
    dtype = out_ptr.dtype.element_ty
    block = tl.program_id(1)
    local = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = first + local < end
    w_rows = tl.minimum(first + local, end - 1)
    w_ptrs = words_at(w_ptr, w_rows, CODE, GROUP)
    planes, factor = planes_of(w_ptrs, 0, block, n, dtype, CODE, PTX), 1.0
    if factors_ptr is not None:
        factor = tl.load(factors_ptr + w_rows)[:, None]
    SUB: tl.constexpr = 4 * GROUP if CODE == "e2m1" else SPAN if GROUP == 0 else GROUP
    for part in tl.static_range(SPAN // SUB):
        numbers, scale = run_of(planes, w_ptrs, groups_ptr, factor, w_rows, 0, block, part, n, dtype, CODE, GROUP, SUB,
                                HAS_ZEROS, PTX)  # fmt: skip
        cols = block * SPAN + part * SUB + tl.arange(0, SUB)
        at = local.to(tl.int64)[:, None] * k + cols[None, :]
        tl.store(out_ptr + at, (numbers.to(tl.float32) * scale).to(dtype), mask=live[:, None] & (cols < k)[None, :])
