"""Keys and values on their way into the paged cache: as they are, or as e4m3 with a scale for each token and head.

A head of a token is stored as e4m3(x / scale), scale = bfloat16(largest |x| / 448): what attention reads is e4m3 times
scale, which float32 holds exactly. The scale depends on nothing but the vector, so a token's cache does not depend on
its step. e4m3 has a sign, 4 bits of exponent and 3 of mantissa, no infinity, and 448 as its largest value. No byte of a
scale is a NaN of e4m3, and no two numbers are an infinity or NaN of bfloat16: memory of scales may have numbers later,
and the other way round, and attention loads whole blocks before it masks them.
"""

import torch

from nanovllm.kernels.base.float_order import magnitude
from nanovllm.kernels.base.triton_import import tl, triton

E4M3_MAX = 448.0
LEAST_SCALE = 2.0**-60
"""Vectors of a smaller one are stored as zeros, with scale 0: attention divides by scales."""
_E4M3_MAX, _LEAST_SCALE, _INFINITY = tl.constexpr(E4M3_MAX), tl.constexpr(LEAST_SCALE), tl.constexpr(0x7F800000)


@triton.jit
def store_heads(ROW, head_stride, parts, heads, count, D: tl.constexpr, HALF: tl.constexpr):
    """Stores both halves of the rotated dimensions and the rest, each [HEADS, cols], of those `heads` below `count`."""
    first, second, rest = parts
    cols = tl.arange(0, triton.next_power_of_2(HALF))
    mask = (heads < count)[:, None] & (cols < HALF)[None, :]
    pointers = ROW + heads[:, None] * head_stride + cols[None, :]
    tl.store(pointers, first.to(ROW.dtype.element_ty), mask=mask)
    tl.store(pointers + HALF, second.to(ROW.dtype.element_ty), mask=mask)
    if 2 * HALF < D:
        cols = 2 * HALF + tl.arange(0, triton.next_power_of_2(D - 2 * HALF))
        mask = (heads < count)[:, None] & (cols < D)[None, :]
        tl.store(ROW + heads[:, None] * head_stride + cols[None, :], rest.to(ROW.dtype.element_ty), mask=mask)


@triton.jit
def store_cached(ROW, head_stride, SCALE_ROW, scale_stride, parts, heads, count, D: tl.constexpr, HALF: tl.constexpr):
    """store_heads into a cache; where that has scales (SCALE_ROW is not None), of e4m3. See quantised_reference."""
    if SCALE_ROW is not None:
        first, second, rest = parts
        first, second = first.to(tl.float32), second.to(tl.float32)
        largest = tl.max(tl.maximum(magnitude(first), magnitude(second)), 1)
        if 2 * HALF < D:
            rest = rest.to(tl.float32)
            largest = tl.maximum(largest, tl.max(magnitude(rest), 1))
        scale = (largest.to(tl.float32, bitcast=True) * (1.0 / _E4M3_MAX)).to(tl.bfloat16).to(tl.float32)
        bits = scale.to(tl.int32, bitcast=True)
        scale = (bits + tl.where((bits & 0x7F0000) == 0x7F0000, 0x10000, 0)).to(tl.float32, bitcast=True)
        scale = tl.where(largest < _INFINITY, scale, float("nan"))
        scale = tl.where(scale < _LEAST_SCALE, 0.0, scale)
        tl.store(SCALE_ROW + heads * scale_stride, scale.to(tl.bfloat16), mask=heads < count)
        inverse = tl.where(scale > 0.0, tl.div_rn(1.0, scale), 0.0)[:, None]
        parts = first * inverse, second * inverse, rest * inverse
    store_heads(ROW, head_stride, parts, heads, count, D, HALF)


def quantised_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] as e4m3 [..., D] and its scale, bfloat16 [...]: NaN where x has a value that is not finite."""
    x = x.float()
    largest = x.abs().amax(-1)
    bits = (largest * (1 / E4M3_MAX)).bfloat16().view(torch.int16)
    scale = (bits + (bits & 0x7F == 0x7F)).view(torch.bfloat16).float()
    scale = scale.masked_fill(scale < LEAST_SCALE, 0.0).masked_fill(~largest.isfinite(), float("nan"))
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (x * inverse.unsqueeze(-1)).to(torch.float8_e4m3fn), scale.bfloat16()


def store_kv_reference(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Writes k, v [T, Hkv, D] to the slots slot_mapping int32 [T] (block * block_size + offset; -1: nowhere) of
    k_cache, v_cache [blocks, Hkv, block_size, D]; with kv_scales bfloat16 [blocks, Hkv, block_size, 2], of keys and of
    values, these are e4m3."""
    block_size = k_cache.shape[2]
    tokens = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[tokens].long()
    blocks, offsets = slots // block_size, slots % block_size
    for number, (x, cache) in enumerate(((k, k_cache), (v, v_cache))):
        x = x[tokens]
        if kv_scales is not None:
            x, kv_scales[blocks, :, offsets, number] = quantised_reference(x)
        cache[blocks, :, offsets] = x
