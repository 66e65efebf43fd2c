"""y = x @ W^T with 4-bit weights, widened in registers: the kernels; int4.py has the layout, and launches them.

Weights are the left operand of a matrix instruction: a thread's words, as they lie in memory, already are its part of
that operand. Seven instructions make eight weights of two words, plus an offset, which is taken off with the zero.

Programs that run at a time begin at different columns: all would ask for the same lines of x at once, which one slice
of the L2 cache has. A row's sum over K goes in an order that the shapes and the choice alone decide, and does not
depend on the other rows.
"""

from nanovllm.kernels.base.activations import silu_mul
from nanovllm.kernels.base.device import prefetch_lines
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.epilogue import add_delta, store_tile, weight_rows

SPAN: tl.constexpr = tl.constexpr(128)
"""Columns of a block: 32 words of 16 bits for each weight row, of which word i has the columns i, i + 32, i + 64 and
i + 96, the first in the lowest bits."""
WORDS: tl.constexpr = tl.constexpr(32)

# Two words of 16 bits at a time. Put into the low bits of 128 (bfloat16) or 1024 (float16), a number of 4 bits is added
# to it, without rounding.
_UNPACK = """{
.reg .b32 t;
lop3.b32 $0, $4, 0x000f000f, OFFSETS, 0xea;
shr.u32 t, $4, 4;
lop3.b32 $1, t, 0x000f000f, OFFSETS, 0xea;
shr.u32 t, $4, 8;
lop3.b32 $2, t, 0x000f000f, OFFSETS, 0xea;
shr.u32 t, $4, 12;
lop3.b32 $3, t, 0x000f000f, OFFSETS, 0xea;
}"""
_UNPACK_BF16: tl.constexpr = tl.constexpr(_UNPACK.replace("OFFSETS", "0x43004300"))
_UNPACK_FP16: tl.constexpr = tl.constexpr(_UNPACK.replace("OFFSETS", "0x64006400"))


@triton.jit
def unpacked(words, dtype: tl.constexpr, PTX: tl.constexpr):
    """The four columns of each word, plus an offset (see _offset), in `dtype`."""
    if PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _UNPACK_BF16, "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    elif PTX and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            _UNPACK_FP16, "=r,=r,=r,=r,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first, second = (words & 15).to(dtype), ((words >> 4) & 15).to(dtype)
        return first, second, ((words >> 8) & 15).to(dtype), ((words >> 12) & 15).to(dtype)


@triton.jit
def _offset(dtype: tl.constexpr, PTX: tl.constexpr):
    if PTX and dtype == tl.bfloat16:
        return 128
    elif PTX and dtype == tl.float16:
        return 1024
    else:
        return 0


@triton.jit
def side_by_side(planes, part: tl.constexpr, SUB: tl.constexpr, BLOCK_N: tl.constexpr):
    """The columns [part * SUB, (part + 1) * SUB) of a block, [BLOCK_N, SUB]: no thread gives another anything."""
    if SUB == 32:
        return planes[part]
    elif SUB == 64:
        pair = tl.join(planes[2 * part], planes[2 * part + 1])
        return tl.reshape(tl.permute(pair, 0, 2, 1), [BLOCK_N, SUB])
    else:
        four = tl.join(tl.join(planes[0], planes[1]), tl.join(planes[2], planes[3]))
        return tl.reshape(tl.permute(four, 0, 3, 2, 1), [BLOCK_N, SUB])


@triton.jit
def scale_and_zero(groups_ptr, at, live, dtype: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr):
    """Scale of one group of the weight rows at `at`, and the unpacked number that stands for 0. A pair of 16 bits each
    is read as one number of 32, the least that a pipelined copy takes."""
    if dtype == tl.float32:
        scale = tl.load(groups_ptr + 2 * at, mask=live, other=0.0)
        stored = tl.load(groups_ptr + 2 * at + 1, mask=live, other=0.0)
    else:
        pair = tl.load(groups_ptr.to(tl.pointer_type(tl.int32)) + at, mask=live, other=0)
        scale = pair.to(tl.int16).to(dtype, bitcast=True)
        stored = (pair >> 16).to(tl.int16).to(dtype, bitcast=True)
    if HAS_ZEROS:
        zero = (stored + _offset(dtype, PTX)).to(dtype)
    else:
        zero = tl.full(at.shape, 8 + _offset(dtype, PTX), dtype)
    return scale[:, None], zero[:, None]


@triton.jit
def _prefetch(
    w_ptr, groups_ptr, begin, end, first_block, pid, n, n_out,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr, PAIRED: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Brings words and scales of the first PREFETCH blocks into L2, that a program goes through. A line has 2 rows of
    words, or the scales of 32; past the end, what is there again."""
    block = (begin + (first_block - begin + tl.arange(0, PREFETCH)) % (end - begin))[:, None]
    index = tl.arange(0, BLOCK_N // 2)
    lane = (index // 2) * 4 + index % 2 if PAIRED else index * 2
    row, _ = weight_rows(lane, pid, n_out, BLOCK_N, PAIRED)
    prefetch_lines(w_ptr + (block * n + tl.minimum(row, n - 1)[None, :]) * WORDS)
    index = tl.arange(0, BLOCK_N // 16)
    lane = (index // 2) * 32 + index % 2 if PAIRED else index * 16
    row, _ = weight_rows(lane, pid, n_out, BLOCK_N, PAIRED)
    group = 0 if GROUP == 0 else block * (SPAN // GROUP)
    prefetch_lines(groups_ptr + (group * n + tl.minimum(row, n - 1)[None, :]) * 2)


@triton.jit(do_not_specialize=["rows"])
def int4_gemm_kernel(
    x_ptr, w_ptr, groups_ptr, out_ptr, scratch_ptr, counter_ptr, DELTA, rows, n, n_out, k,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    PAIRED: tl.constexpr, ADDS_UP: tl.constexpr, PREFETCH: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of weights, splits of k); x [rows, k], weights int16 [blocks of k, n, 32], groups
    [groups of k, n, 2] (scale, zero). GROUP: columns of a group; 0: all. out [rows, n_out], or of several splits
    float32 [splits, rows, n_out], unless the last of them ADDS_UP. PREFETCH: blocks to bring into L2 before x may be
    read, a power of two. DELTA: see add_delta; of several splits the first adds it."""
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
    word = tl.arange(0, WORDS)
    w_ptrs = w_ptr + tl.where(live, w_rows, 0)[:, None] * WORDS + word[None, :]
    if PDL:
        _prefetch(w_ptr, groups_ptr, begin, end, first_block, pid, n, n_out, BLOCK_N, GROUP, PAIRED, PREFETCH)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    row = tl.arange(0, ROWS)
    x_ptr += first_row.to(tl.int64) * k
    rows -= first_row
    SUB: tl.constexpr = SPAN if GROUP == 0 else GROUP
    acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    for step in tl.range(first_block, first_block + end - begin, num_stages=STAGES):
        block = tl.where(step < end, step, step - (end - begin))
        at = block * n
        if EVEN_N:
            words = tl.load(w_ptrs + at * WORDS)
        else:
            words = tl.load(w_ptrs + at * WORDS, mask=live[:, None], other=0)
        planes = unpacked(words, dtype, PTX)
        for part in tl.static_range(SPAN // SUB):
            group = 0 if GROUP == 0 else block * (SPAN // SUB) + part
            scale, zero = scale_and_zero(groups_ptr, group * n + w_rows, live, dtype, HAS_ZEROS, PTX)
            cols = block * SPAN + part * SUB + tl.arange(0, SUB)
            x_live = (row < rows)[:, None]
            if not EVEN_K:
                x_live = x_live & (cols < k)[None, :]
            x = tl.load(x_ptr + row[:, None] * k + cols[None, :], mask=x_live, other=0.0)
            numbers = side_by_side(planes, part, SUB, BLOCK_N) - zero
            sums = tl.dot(numbers, tl.trans(x), input_precision="ieee")
            acc += scale.to(tl.float32) * sums

    if DELTA is not None:  # noqa: SIM102 (a constant)
        if split == 0:
            at = (first_row + row).to(tl.int64)[None, :]
            acc = add_delta(acc, DELTA, at, w_rows[:, None], live[:, None] & (row < rows)[None, :], n)
    _finish(
        tl.trans(acc), out_ptr, scratch_ptr, counter_ptr, first_row, rows, n_out,
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
    w_ptr, groups_ptr, out_ptr, first, end, n, k,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the weight rows [first, end), blocks of k): those rows in out's dtype, [end - first, k]."""
    dtype = out_ptr.dtype.element_ty
    block = tl.program_id(1)
    local = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows, word = first + local, tl.arange(0, WORDS)
    live = w_rows < end
    words = tl.load(
        w_ptr + (block * n + w_rows[:, None]) * WORDS + word[None, :], mask=live[:, None], other=0
    )
    planes = unpacked(words, dtype, PTX)
    for plane in tl.static_range(4):
        if GROUP == 0:
            group_at = w_rows
        else:
            group_at = (block * SPAN + plane * WORDS) // GROUP * n + w_rows
        scale, zero = scale_and_zero(groups_ptr, group_at, live, dtype, HAS_ZEROS, PTX)
        cols = block * SPAN + plane * WORDS + word
        at = local.to(tl.int64)[:, None] * k + cols[None, :]
        tl.store(out_ptr + at, (planes[plane] - zero) * scale, mask=live[:, None] & (cols < k)[None, :])
