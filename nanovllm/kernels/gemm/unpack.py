"""Device functions that widen weights of 4 and 8 bits in registers, and multiply a block of them by rows of x; by code
and group, as PackedWeight (packed.py) has them.

Weights are the left operand of a matrix instruction: a thread's words, as they lie in memory, already are its part of
that operand. Seven instructions make eight integers of 4 bits of two words, plus an offset, which is taken off with the
zero; numbers of e2m1 are made by shifts and masks, times 2^-126.
"""

from nanovllm.kernels.base.triton_import import tl, triton

SPAN: tl.constexpr = tl.constexpr(128)
"""Columns of a block: 32 words of 16 bits for each weight row, of numbers of 8 bits 64 (PackedWeight has the order)."""
WORDS: tl.constexpr = tl.constexpr(32)
_LIFT: tl.constexpr = tl.constexpr(2.0**119)

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
    if planes[0].shape[1] == SUB:
        return planes[part]
    elif 2 * planes[0].shape[1] == SUB:
        pair = tl.join(planes[2 * part], planes[2 * part + 1])
        return tl.reshape(tl.permute(pair, 0, 2, 1), [BLOCK_N, SUB])
    else:
        four = tl.join(tl.join(planes[0], planes[1]), tl.join(planes[2], planes[3]))
        return tl.reshape(tl.permute(four, 0, 3, 2, 1), [BLOCK_N, SUB])


@triton.jit
def load_pair(groups_ptr, at):
    """Scale and zero at each of `at`, as they lie there: a pair of 16 bits each is read as one number of 32, the least
    that a pipelined copy takes."""
    if groups_ptr.dtype.element_ty == tl.float32:
        return tl.load(groups_ptr + 2 * at), tl.load(groups_ptr + 2 * at + 1)
    else:
        return (tl.load(groups_ptr.to(tl.pointer_type(tl.int32)) + at),)


@triton.jit
def scale_and_zero(pair, dtype: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr):
    """Scales, and the unpacked numbers that stand for 0, of a pair of load_pair."""
    if dtype == tl.float32:
        scale, stored = pair[0], pair[1]
    else:
        scale = pair[0].to(tl.int16).to(dtype, bitcast=True)
        stored = (pair[0] >> 16).to(tl.int16).to(dtype, bitcast=True)
    if HAS_ZEROS:
        zero = (stored + _offset(dtype, PTX)).to(dtype)
    else:
        zero = tl.full(scale.shape, 8 + _offset(dtype, PTX), dtype)
    return scale, zero


# Two words at a time; see e2m1.arranged.
_E2M1: tl.constexpr = tl.constexpr("""{
.reg .b32 t, u;
and.b32 $0, $4, 0x81c081c0;
shl.b32 t, $4, 3;
and.b32 $1, t, 0x81c081c0;
shl.b32 t, $4, 6;
and.b32 $2, t, 0x81c081c0;
shl.b32 t, $4, 1;
and.b32 t, t, 0x80008000;
shr.u32 u, $4, 5;
lop3.b32 t, u, 0x01000100, t, 0xea;
shr.u32 u, $4, 4;
lop3.b32 $3, u, 0x00c000c0, t, 0xea;
}""")


@triton.jit
def e2m1_planes(words, dtype: tl.constexpr, PTX: tl.constexpr):
    """The four columns of each word, times 2^-126: in bfloat16 where `dtype` is that, else in float32."""
    if PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _E2M1, "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        word = words.to(tl.int32)
        last = ((word << 1) & 0x8000) | ((word >> 5) & 0x0100) | ((word >> 4) & 0x00C0)
        return (
            ((word & 0x81C0) << 16).to(tl.float32, bitcast=True),
            (((word << 3) & 0x81C0) << 16).to(tl.float32, bitcast=True),
            (((word << 6) & 0x81C0) << 16).to(tl.float32, bitcast=True), (last << 16).to(tl.float32, bitcast=True),
        )  # fmt: skip


@triton.jit
def scale_of_plane(four, plane: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """The scales of a plane, byte `plane` of `four`, which make numbers of e2m1_planes exact: of 32 columns 2^126 times
    them; of 16, which are e4m3, 2^118 times."""
    if GROUP == 32:
        bits = ((four << 7) if plane == 0 else (four >> (8 * plane - 7))) & 0x7F80
    else:
        bits = ((four << 4) if plane == 0 else (four >> (8 * plane - 4))) & 0x07F0
    if PTX and dtype == tl.bfloat16:
        scale = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        scale = (bits << 16).to(tl.float32, bitcast=True)
    return scale if GROUP == 32 else scale * _LIFT * _LIFT


@triton.jit
def e2m1_run(
    w_ptrs, scale_ptr, w_rows, first, block, part: tl.constexpr, n, GROUP: tl.constexpr, dtype: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Four groups of columns, side by side, of the weight rows `first` + `w_rows`: numbers times scales, without
    rounding; in groups of 16 times 2^-8 (and the factor of the tensor is missing)."""
    PARTS: tl.constexpr = SPAN // (4 * GROUP)
    words = tl.load(w_ptrs + (block * n + first) * WORDS + part * GROUP)
    four = tl.load(scale_ptr + (block * PARTS + part) * n + first + w_rows)
    planes, scaled = e2m1_planes(words, dtype, PTX), ()
    for plane in tl.static_range(4):
        scaled = scaled + ((planes[plane] * scale_of_plane(four, plane, GROUP, dtype, PTX)[:, None]).to(dtype),)
    return side_by_side(scaled, 0, 4 * GROUP, w_rows.shape[0])


# Two words at a time. A byte's lower 7 bits and its sign, each put into the low bits of 128, or all of them into those
# of 1024: what is added takes 128, or 256, or 1152 off.
_INT8_BF16: tl.constexpr = tl.constexpr("""{
.reg .b32 t, u, one;
mov.b32 one, 0x3f803f80;
lop3.b32 t, $2, 0x007f007f, 0x43004300, 0xea;
lop3.b32 u, $2, 0x00800080, 0xc300c300, 0xea;
fma.rn.bf16x2 $0, t, one, u;
shr.u32 u, $2, 8;
lop3.b32 t, u, 0x007f007f, 0x43004300, 0xea;
lop3.b32 u, u, 0x00800080, 0xc300c300, 0xea;
fma.rn.bf16x2 $1, t, one, u;
}""")
_INT8_FP16: tl.constexpr = tl.constexpr("""{
.reg .b32 t, zero;
mov.b32 zero, 0xe480e480;
lop3.b32 t, $2, 0x00ff00ff, 0x64806480, 0x6a;
add.rn.f16x2 $0, t, zero;
shr.u32 t, $2, 8;
lop3.b32 t, t, 0x00ff00ff, 0x64806480, 0x6a;
add.rn.f16x2 $1, t, zero;
}""")


@triton.jit
def int8_planes(words, dtype: tl.constexpr, PTX: tl.constexpr):
    """The two columns of each word."""
    if PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _INT8_BF16, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif PTX and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            _INT8_FP16, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return ((words << 8) >> 8).to(dtype), (words >> 8).to(dtype)


@triton.jit
def int8_run(w_ptrs, w_rows, first, block, n, dtype: tl.constexpr, PTX: tl.constexpr):
    """The numbers of a block, of the weight rows `first` + `w_rows`."""
    words = tl.load(w_ptrs + (block * n + first) * words_of_row("bytes"))
    return side_by_side(int8_planes(words, dtype, PTX), 0, SPAN, w_rows.shape[0])


@triton.constexpr_function
def words_of_row(code: str) -> int:
    """Words of a weight row in a block."""
    return 64 if code == "bytes" else 32


@triton.jit
def of_expert(W, SCALES, expert, n, blocks, CODE: tl.constexpr, GROUP: tl.constexpr):
    """Pointers to words and scales of experts int64, of n weight rows in so many blocks each."""
    W += expert * blocks * words_of_row(CODE) * n
    if CODE == "e2m1":
        SCALES += expert * blocks * (WORDS // GROUP) * n
    elif GROUP == 0:
        SCALES += expert * n * 2
    else:
        SCALES += expert * blocks * (2 * SPAN // GROUP) * n
    return W, SCALES


@triton.jit
def words_at(w_ptr, w_rows, CODE: tl.constexpr, GROUP: tl.constexpr):
    """Pointers to the words of weight rows that are read at a time, of block 0: all of a block, or of e2m1 those of
    four groups."""
    OF_ROW: tl.constexpr = words_of_row(CODE)
    RUN: tl.constexpr = GROUP if CODE == "e2m1" else OF_ROW
    return w_ptr + w_rows[:, None] * OF_ROW + tl.arange(0, RUN)[None, :]


@triton.jit
def planes_of(w_ptrs, first, block, n, dtype: tl.constexpr, CODE: tl.constexpr, PTX: tl.constexpr):
    """Planes of a whole block, which `run_of` needs of "int4" alone."""
    if CODE == "int4":
        return unpacked(tl.load(w_ptrs + (block * n + first) * WORDS), dtype, PTX)
    else:
        return ()


@triton.jit
def run_of(
    planes, w_ptrs, scale_ptr, factor, w_rows, first, block, part: tl.constexpr, n, dtype: tl.constexpr,
    CODE: tl.constexpr, GROUP: tl.constexpr, SUB: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """SUB columns of the weight rows `first` + `w_rows`, in `dtype`, and what their products are times, in float32."""
    if CODE == "e2m1":
        return e2m1_run(w_ptrs, scale_ptr, w_rows, first, block, part, n, GROUP, dtype, PTX), factor
    else:
        at = (0 if GROUP == 0 else block * (SPAN // SUB) + part) * n + first + w_rows
        scale, zero = scale_and_zero(load_pair(scale_ptr, at), dtype, HAS_ZEROS, PTX)
        if CODE == "bytes":
            numbers = int8_run(w_ptrs, w_rows, first, block, n, dtype, PTX)
        else:
            numbers = side_by_side(planes, part, SUB, w_rows.shape[0]) - zero[:, None]
        return numbers, scale.to(tl.float32)[:, None]


@triton.jit
def add_block(
    accs, w_ptrs, scale_ptr, w_rows, block, n, n_out, x_ptrs, live, k, factors, dtype: tl.constexpr, CODE: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr,
    SCALES: tl.constexpr = True,
):  # fmt: skip
    """accs, [BLOCK_N, BLOCK_M] of gates and ups or of one alone, plus the products of x and the weights in a block.
    live: rows of x that are there; None: all, and all columns. factors: of the sums of each of accs by "e2m1". SCALES:
    sums of this block are multiplied by what run_of says."""
    SUB: tl.constexpr = 4 * GROUP if CODE == "e2m1" else SPAN if GROUP == 0 else GROUP
    planes = ()
    for half in tl.static_range(len(accs)):
        planes = planes + (planes_of(w_ptrs, half * n_out, block, n, dtype, CODE, PTX),)
    for part in tl.static_range(SPAN // SUB):
        cols = block * SPAN + part * SUB + tl.arange(0, SUB)
        if live is None:
            x = tl.load(x_ptrs + cols[None, :])
        else:
            mask = live[:, None] if EVEN_K else live[:, None] & (cols < k)[None, :]
            x = tl.load(x_ptrs + cols[None, :], mask=mask, other=0.0)
        added = ()
        for half in tl.static_range(len(accs)):
            numbers, scale = run_of(planes[half], w_ptrs, scale_ptr, factors[half], w_rows, half * n_out, block, part,
                                    n, dtype, CODE, GROUP, SUB, HAS_ZEROS, PTX)  # fmt: skip
            if SCALES:
                added = added + (accs[half] + scale * tl.dot(numbers, tl.trans(x), input_precision="ieee"),)
            else:
                added = added + (tl.dot(numbers, tl.trans(x), accs[half], input_precision="ieee"),)
        accs = added
    return accs
