"""Reading of keys and values in e4m3 with a scale for each token and head (kernels/pointwise/kv_store.py).

Tensor cores of compute capability 9.0 multiply e4m3 with e4m3 alone, and queries stay 16 bits wide. One instruction
widens two e4m3 to float16, bfloat16 takes four: so queries are float16 (qk_norm_rope_store makes them), and the weights
of values too. The scales of keys go onto the scores. Those of values, 2 ** e * r with 1 <= r < 2, take part in the
exponents: the running maximum is that of score + e, so that weights fill float16's range however large or small a
model's values are.
"""

import math

from nanovllm.kernels.attention.scores import soft_cap
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.pointwise.kv_store import LEAST_SCALE

_LEAST_EXPONENT = tl.constexpr(127 + int(math.log2(LEAST_SCALE)))


@triton.jit
def load_scales(KV_SCALES, block, kv_head, start, block_stride, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Scales of the keys start .. start + BLOCK_N and of their values, int32 [BLOCK_N], the key's bfloat16 in the lower
    half; or int64 of packed_scales, of which there may be a tensor descriptor. block: one, or one for each token where
    tiles do not divide pages; its scales lie one after another."""
    if KV_SCALES.dtype == tl.int64:
        return KV_SCALES.load([block.to(tl.int32), kv_head, start % PAGE]).reshape(BLOCK_N)
    else:
        tokens = tl.arange(0, BLOCK_N)
        of_head = block.to(tl.int64) * block_stride + kv_head * PAGE
        if PAGE % BLOCK_N == 0:
            return tl.load(KV_SCALES + (of_head + start % PAGE) + tokens)
        else:
            return tl.load(KV_SCALES + of_head + (start + tokens) % PAGE)


@triton.jit
def key_scales(scales):
    """float32, of what load_scales gave."""
    return (scales << 16).to(tl.float32, bitcast=True)


@triton.jit
def value_scales(scales):
    """Splits the scales of load_scales into e, 2 ** -e and r, float32. bfloat16 has float32's exponent, and the sign is
    0."""
    exponent = tl.maximum(scales >> 23, _LEAST_EXPONENT)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    remainder = ((scales & 0x7F0000) | 0x3F800000).to(tl.float32, bitcast=True)
    return (exponent - 127).to(tl.float32), inverse, remainder


@triton.jit
def packed_scales(scales, scale_log2):
    """The scales of load_scales as prefill attention of copies (widened.py) takes them, int64: scale_log2 times the
    key's in the lower half, above it e in bfloat16 and 2 ** -e with r's mantissa."""
    exponent, inverse, _ = value_scales(scales)
    of_value = inverse.to(tl.int32, bitcast=True) | (scales & 0x7F0000)
    of_value |= exponent.to(tl.int32, bitcast=True) >> 16 & 0xFFFF
    of_key = (key_scales(scales) * scale_log2).to(tl.uint32, bitcast=True)
    return of_value.to(tl.int64) << 32 | of_key.to(tl.int64)


@triton.jit
def split_scales(scales, scale_log2):
    """scale_log2 times the keys' scales, and value_scales, of scales of either kind."""
    if scales.dtype == tl.int64:
        of_value = (scales >> 32).to(tl.int32)
        exponent = (of_value << 16).to(tl.float32, bitcast=True)
        inverse = (of_value & 0x7F800000).to(tl.float32, bitcast=True)
        remainder = (of_value & 0x7F0000 | 0x3F800000).to(tl.float32, bitcast=True)
        return scales.to(tl.int32).to(tl.float32, bitcast=True), exponent, inverse, remainder
    else:
        exponent, inverse, remainder = value_scales(scales)
        return key_scales(scales) * scale_log2, exponent, inverse, remainder


@triton.jit
def _widened_pairs(pairs, DTYPE: tl.constexpr):
    """int16 [.., n], each of two e4m3 -> the lower ones and the upper ones, of DTYPE [.., n] each. Pairs, because the
    operand of a product is laid out in units of 16 bits: single bytes would be loaded one by one."""
    if tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 lower, upper;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {lower, upper}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, lower;
            cvt.rn.f16x2.e4m3x2 $1, upper;
            }""", "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        lower = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        upper = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return lower.to(DTYPE), upper.to(DTYPE)


@triton.jit
def attend_e4m3(q, k, v_pairs, scales, state, scale_log2, visible, CAP: tl.constexpr):
    """One tile of online softmax, as decode's _attend, keys first: a product of the tensor cores is 16 high and 8 wide,
    and few heads share a key. q [H, D]; k e4m3 [N, D]; v_pairs int16 [N, D / 2]; scales: of load_scales; visible bool
    [N, H or 1]. state: running maximum of score + e, m [H]; sums [N, H] of 2 ** (score - m); the even and the odd
    dimensions [D / 2, H] of the unnormalised output."""
    m, sums, acc = state
    even, odd = acc
    scores = tl.dot(k.to(q.dtype), tl.trans(q), input_precision="ieee") * (key_scales(scales) * scale_log2)[:, None]
    if CAP is not None:
        scores = soft_cap(scores, CAP)
    exponent, inverse, remainder = value_scales(scales)
    scores = tl.where(visible, scores + exponent[:, None], float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 0))
    p = tl.exp2(scores - m_new[None, :])
    alpha = tl.exp2(m - m_new)[None, :]
    sums = sums * alpha + p * inverse[:, None]
    p = (p * remainder[:, None]).to(q.dtype)
    v_even, v_odd = _widened_pairs(v_pairs, q.dtype)
    even = tl.dot(tl.trans(v_even), p, even * alpha, input_precision="ieee")
    odd = tl.dot(tl.trans(v_odd), p, odd * alpha, input_precision="ieee")
    return m_new, sums, (even, odd)
