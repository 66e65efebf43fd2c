"""Work of latent attention between its projections: the norm of a token's latent, the rotation of its key and of its
queries, and the store of latent and key, side by side, in the paged cache.

Rotation is in float32, rounded once. A latent is the value of every head, and the cache never holds a value that is not
finite (kernels/pointwise/rope.py says why): such a latent is stored as 0, and its rotated key as NaN.
"""

import torch

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.pointwise.norm import Norm, norm_reference

_HEADS = 16
"""Query heads of a program."""


@triton.jit
def _rotated(ROWS, rows, mask, cos, sin, cols, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both halves [rows, HALF] of rotated vectors; INTERLEAVED: elements 2i and 2i + 1 are a pair."""
    first = ROWS + rows + (2 * cols if INTERLEAVED else cols)
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(first + (1 if INTERLEAVED else HALF), mask=mask, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _latent_rope_store_kernel(
    Q, KV, WEIGHT, POSITIONS, COS_SIN, SLOTS, PAGES, OUT, q_strides, kv_stride, page_strides, HEADS: tl.constexpr,
    NOPE: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """latent_rope_store: Q [T, HEADS, NOPE + 2 HALF], KV [T, WIDTH + 2 HALF], OUT [T, HEADS, WIDTH + 2 HALF]. Token
    `program_id(0)`; of `program_id(1)` the first has its row of the cache, the others GROUP query heads each."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    inside = cols < HALF
    angles = COS_SIN + tl.load(POSITIONS + token).to(tl.int64) * (2 * HALF) + cols
    cos, sin = tl.load(angles, mask=inside, other=0.0), tl.load(angles + HALF, mask=inside, other=0.0)
    if group > 0:
        heads = (group - 1) * GROUP + tl.arange(0, GROUP)[:, None]
        mask = inside & (heads < HEADS)
        ROWS = Q + token * q_strides[0] + NOPE
        first, second = _rotated(ROWS, heads * q_strides[1], mask, cos, sin, cols, HALF, INTERLEAVED)
        out = OUT + (token * HEADS + heads) * (WIDTH + 2 * HALF) + WIDTH + cols
        tl.store(out, first.to(OUT.dtype.element_ty), mask=mask)
        tl.store(out + HALF, second.to(OUT.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(SLOTS + token).to(tl.int64)
        if slot >= 0:
            DTYPE: tl.constexpr = KV.dtype.element_ty
            row = KV + token * kv_stride
            page = PAGES + slot // BLOCK_SIZE * page_strides[0] + slot % BLOCK_SIZE * page_strides[1]
            wide = tl.arange(0, triton.next_power_of_2(WIDTH))
            latent = tl.load(row + wide, mask=wide < WIDTH, other=0.0).to(tl.float32)
            normed = (latent * tl.rsqrt(tl.sum(latent * latent, 0) / WIDTH + EPS)).to(DTYPE).to(tl.float32)
            normed = (normed * tl.load(WEIGHT + wide, mask=wide < WIDTH, other=0.0).to(tl.float32)).to(DTYPE)
            is_finite = tl.abs(normed.to(tl.float32)) < float("inf")
            tl.store(page + wide, tl.where(is_finite, normed, 0.0), mask=wide < WIDTH)
            spoilt = tl.sum(tl.where(is_finite, 0, 1), 0) > 0
            first, second = _rotated(row + WIDTH, 0, inside, cos, sin, cols, HALF, INTERLEAVED)
            tl.store(page + WIDTH + cols, tl.where(spoilt, float("nan"), first).to(DTYPE), mask=inside)
            tl.store(page + WIDTH + HALF + cols, tl.where(spoilt, float("nan"), second).to(DTYPE), mask=inside)


def latent_rope_store(
    q: torch.Tensor, kv: torch.Tensor, norm: Norm, positions: torch.Tensor, cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, interleaved: bool,
) -> None:  # fmt: skip
    """q [T, heads, nope + rope]: its rotated part goes into out [T, heads, width + rope], contiguous, behind `width`.
    kv [T, width + rope]: its norm (RMSNorm of kind "rms", weight [width]) and its rotated part go into
    pages [blocks, block_size, width + rope], at slot_mapping int32 [T] (block * block_size + offset; -1: nowhere).

    positions int32 [T]. cos_sin float32 [max_position, rope]: cosines of the rope / 2 angles, then sines. interleaved:
    elements 2i and 2i + 1 of what is rotated are a pair, else i and i + rope / 2; they end at i and i + rope / 2. Rows
    and heads may be strided.
    """
    tokens, heads, width, half = q.shape[0], q.shape[1], norm.weight.shape[0], cos_sin.shape[1] // 2
    if tokens:
        _latent_rope_store_kernel[(tokens, 1 + triton.cdiv(heads, _HEADS))](
            q, kv, norm.weight, positions, cos_sin, slot_mapping, pages, out, q.stride()[:2], kv.stride(0),
            pages.stride()[:2], HEADS=heads, NOPE=q.shape[2] - 2 * half, WIDTH=width, HALF=half, EPS=norm.eps,
            INTERLEAVED=interleaved, BLOCK_SIZE=pages.shape[1], GROUP=_HEADS, num_warps=4,
        )  # fmt: skip


def latent_rope_store_reference(
    q: torch.Tensor, kv: torch.Tensor, norm: Norm, positions: torch.Tensor, cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, interleaved: bool,
) -> None:  # fmt: skip
    """Plain twin of `latent_rope_store`."""
    width, rope = norm.weight.shape[0], cos_sin.shape[1]
    cos, sin = cos_sin[positions.long(), None].chunk(2, -1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = x.float().unflatten(-1, (-1, 2) if interleaved else (2, -1))
        first, second = pairs.unbind(-1 if interleaved else -2)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    out[..., width:] = rotated(q[..., -rope:])
    latent, key = norm_reference(kv[:, :width], norm), rotated(kv[:, None, width:])[:, 0]
    finite = latent.isfinite()
    key = key.masked_fill(~finite.all(-1, keepdim=True), float("nan"))
    tokens = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[tokens].long()
    row = torch.cat((latent.where(finite, 0), key), -1)
    pages[slots // pages.shape[1], slots % pages.shape[1]] = row[tokens]
