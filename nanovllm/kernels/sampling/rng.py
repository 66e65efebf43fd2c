"""Counter-based random words and Gumbel noise, keyed by (seed, position, token id).

No state is kept, so a sample does not depend on batch, rank or order. Construction, in 32-bit unsigned arithmetic:

    mix(x)   two rounds of xor-shift and odd multiplication: a bijection with small avalanche bias (the constants are
             those of Wellons' hash-prospector search, "lowbias32")
    a key    of two words per (seed, position): k0 and k1 absorb seed low, seed high and position in different orders
    a word   of a token id: the rounds of mix over id * (k1 | 1) + k0, with k1 added between them. Without the last
             xor-shift, which would not touch the upper half, where nearly all of the noise's value is.

A word w means v = (w + 1/2) / 2 ** 32, an Exponential(1) sample E = -log(1 - v) and Gumbel noise -log(E). Large
noise comes from v near 0, where float32 is fine: noise reaches 22.9, not the 16.6 at which 1 - v would end it.
"""

import torch

from nanovllm.kernels.base.triton_import import tl, triton

WORD = 0xFFFFFFFF
MULTIPLIER_A = 0x7FEB352D
MULTIPLIER_B = 0x846CA68B
KEY_START_0 = 0x9E3779B9
KEY_START_1 = 0x7F4A7C15
UNIFORM_SCALE = 2.0**-32 * (1 - 2.0**-24)
"""Slightly below 2 ** -32, so that the largest word still stays below 1 in float32."""
UNIFORM_OFFSET = 2.0**-33

# The same as constants of kernels.
_A = tl.constexpr(MULTIPLIER_A)
_B = tl.constexpr(MULTIPLIER_B)
_START_0 = tl.constexpr(KEY_START_0)
_START_1 = tl.constexpr(KEY_START_1)
_SCALE = tl.constexpr(UNIFORM_SCALE)
_OFFSET = tl.constexpr(UNIFORM_OFFSET)
_LN_2 = tl.constexpr(0.6931471805599453)
_SERIES_BOUND = tl.constexpr(2.0**-5)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * _A
    x = (x ^ (x >> 15)) * _B
    return x ^ (x >> 16)


@triton.jit
def row_key(seed, position):
    """See row_key_reference; seed int64, position int32, results uint32."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    position = position.to(tl.uint32)
    k0 = _mix(_mix(_mix(low + _START_0) ^ high) + position)
    k1 = _mix(_mix(_mix(position + _START_1) ^ low) + high)
    return k0, k1


@triton.jit
def random_words(k0, k1, token_ids):
    """See random_words_reference; token_ids int32, result uint32."""
    x = token_ids.to(tl.uint32) * (k1 | 1) + k0
    x = (x ^ (x >> 16)) * _A
    return (x ^ (x >> 15)) * _B + k1


@triton.jit
def _log2(x, APPROX: tl.constexpr):
    if APPROX:  # the hardware's: relative error 2 ** -22, absolute near 1
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
def gumbel_noise(words, APPROX: tl.constexpr):
    """See gumbel_noise_reference. APPROX: the hardware's logarithm, noise within 1e-5.

    Where v is small, and 1 - v would drop its bits, four terms of the series replace -log(1 - v).
    """
    v = tl.fma(words.to(tl.float32), _SCALE, _OFFSET)
    series = tl.fma(tl.fma(tl.fma(v, 0.25, 1.0 / 3.0), v, 0.5), v * v, v)
    exponential = tl.where(v < _SERIES_BOUND, series, _log2(1.0 - v, APPROX) * -_LN_2)
    return _log2(exponential, APPROX) * -_LN_2


def _mix_reference(x: torch.Tensor) -> torch.Tensor:
    x = x & WORD
    x = ((x ^ (x >> 16)) * MULTIPLIER_A) & WORD
    x = ((x ^ (x >> 15)) * MULTIPLIER_B) & WORD
    return x ^ (x >> 16)


def row_key_reference(seed: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """seed int64 [...], position integer [...], of one shape -> the two words of the key, int64 [...] in
    0 .. 2 ** 32 - 1."""
    low, high, position = seed & WORD, (seed >> 32) & WORD, position.long()
    k0 = _mix_reference(_mix_reference(_mix_reference(low + KEY_START_0) ^ high) + position)
    k1 = _mix_reference(_mix_reference(_mix_reference(position + KEY_START_1) ^ low) + high)
    return k0, k1


def random_words_reference(k0: torch.Tensor, k1: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Words of integer token_ids [...] under a key k0, k1 int64 [...], which broadcast to one shape: int64 of that
    shape in 0 .. 2 ** 32 - 1."""
    x = (token_ids.long() * (k1 | 1) + k0) & WORD  # int64 wraps, which leaves the low 32 bits right
    x = ((x ^ (x >> 16)) * MULTIPLIER_A) & WORD
    return ((x ^ (x >> 15)) * MULTIPLIER_B + k1) & WORD


def gumbel_noise_reference(words: torch.Tensor) -> torch.Tensor:
    """Random words int64 [...] -> samples of the standard Gumbel distribution, float32 [...]."""
    uniform = words.float() * UNIFORM_SCALE + UNIFORM_OFFSET
    return -torch.log(-torch.log1p(-uniform))
