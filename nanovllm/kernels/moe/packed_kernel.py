"""The kernel of experts' products by weights of 4 bits; packed.py has the layout, and launches it."""

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.int4_kernel import SPAN, WORDS, scale_and_zero, side_by_side, unpacked
from nanovllm.kernels.gemm.tile import enter_tile, result, store_by_choice, tile_of_rows

# Two words at a time; see packed.arranged.
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
def _power(four, plane: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """2^126 times the scale of a plane of 32 columns, as e2m1_planes has these: exact, and so is the product."""
    bits = ((four << 7) if plane == 0 else (four >> (8 * plane - 7))) & 0x7F80
    if PTX and dtype == tl.bfloat16:
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
    else:
        return (bits << 16).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _add_block(
    accs, w_ptrs, scale_ptr, w_rows, block, n, n_out, x_ptrs, live, k, factor, dtype: tl.constexpr, CODE: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, EVEN_K: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """accs, [BLOCK_N, BLOCK_M] of gates and ups or of one alone, plus the products of x and the weights in a block."""
    SUB: tl.constexpr = SPAN if GROUP == 0 or CODE == "e2m1" else GROUP
    planes = ()
    for half in tl.static_range(len(accs)):
        words = tl.load(w_ptrs + (block * n + half * n_out) * WORDS)
        if CODE == "e2m1":
            four = tl.load(scale_ptr + block * n + half * n_out + w_rows)
            planes = planes + (_scaled(e2m1_planes(words, dtype, PTX), four, dtype, PTX),)
        else:
            planes = planes + (unpacked(words, dtype, PTX),)
    for part in tl.static_range(SPAN // SUB):
        cols = block * SPAN + part * SUB + tl.arange(0, SUB)
        mask = live[:, None] if EVEN_K else live[:, None] & (cols < k)[None, :]
        x = tl.load(x_ptrs + cols[None, :], mask=mask, other=0.0)
        added = ()
        for half in tl.static_range(len(accs)):
            numbers = side_by_side(planes[half], part, SUB, w_rows.shape[0])
            if CODE == "e2m1":
                scale = factor
            else:
                at = (0 if GROUP == 0 else block * (SPAN // SUB) + part) * n + half * n_out + w_rows
                stored, zero = scale_and_zero(scale_ptr, at, at >= 0, dtype, HAS_ZEROS, PTX)
                scale, numbers = stored.to(tl.float32), numbers - zero
            added = added + (accs[half] + scale * tl.dot(numbers, tl.trans(x), input_precision="ieee"),)
        accs = added
    return accs


@triton.jit
def _scaled(planes, four, dtype: tl.constexpr, PTX: tl.constexpr):
    """The planes of e2m1_planes times their scales, whose exponents `four` has."""
    scaled = ()
    for plane in tl.static_range(4):
        scaled = scaled + ((planes[plane] * _power(four, plane, dtype, PTX)).to(dtype),)
    return scaled


@triton.jit(do_not_specialize=["rows"])
def packed_tile_kernel(
    X, W, SCALES, BIAS, TILES, ORDER, WEIGHTS, OUT, rows, n_out, k, factor,
    TOP_K: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, CODE: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    EVEN_K: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """tile_kernel with TILES, for X [T, k], or [T * TOP_K, k] where not GATED, by W and SCALES as PackedExperts has
    them. factor: on the sums of "e2m1". It is no constant, not even where it is 1: a sum that a later product adds to
    would be waited for."""
    n = n_out * 2 if PAIRED else n_out
    blocks = tl.cdiv(k, SPAN)
    expert, first_row, end_position = tile_of_rows(TILES, GATED, PDL)
    if expert < 0:
        return
    first_col = tl.program_id(0) * BLOCK_N
    W += expert.to(tl.int64) * blocks * n * WORDS
    if CODE == "e2m1":
        SCALES += expert.to(tl.int64) * blocks * n
    elif GROUP == 0:
        SCALES += expert.to(tl.int64) * n * 2
    else:
        SCALES += expert.to(tl.int64) * blocks * (SPAN // GROUP) * n * 2
    position, live, choice = enter_tile(W, first_col, n_out, WORDS, ORDER, first_row, end_position, GATED, BLOCK_M,
                                        BLOCK_N, 2 * WORDS, PDL)  # fmt: skip
    row = choice // TOP_K if GATED else position
    x_ptrs = X + row.to(tl.int64)[:, None] * k
    w_rows = tl.minimum(first_col + tl.arange(0, BLOCK_N), n_out - 1)
    w_ptrs = W + w_rows[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    accs = (acc, tl.zeros(acc.shape, dtype=tl.float32)) if PAIRED else (acc,)
    for block in tl.range(0, blocks, num_stages=STAGES):
        accs = _add_block(accs, w_ptrs, SCALES, w_rows, block, n, n_out, x_ptrs, live, k, factor, X.dtype.element_ty,
                          CODE, GROUP, HAS_ZEROS, EVEN_K, PTX)  # fmt: skip
    acc = result(accs, None, BIAS, expert * n, first_col, n_out, OUT.dtype.element_ty, ALPHA, LIMIT, BLOCK_N, False,
                 False, GATED and not PAIRED)  # fmt: skip
    cols_out = first_col + tl.arange(0, BLOCK_N)
    store_by_choice(acc, OUT, WEIGHTS, position, live, choice, cols_out, rows, n_out, TOP_K, GATED, False)
