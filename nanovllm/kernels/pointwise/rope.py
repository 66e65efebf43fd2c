"""QK-norm, rotary embedding and the store of keys and values in the paged cache, in one pass over the projections.

Rotation (Su et al., arXiv 2104.09864) pairs dimension i with i + D / 2, as Hugging Face's models do. Rounding is theirs
too: the norm's result, the norm times weight, cos, sin, each product and their sum are rounded to the model's dtype.
"""

import torch

from nanovllm.kernels.base.pdl import pdl_options
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.pointwise.norm import rms_norm_reference

PDL_TOKENS = 512
"""Up to so many tokens, the time between kernels is worth saving."""
HEADS_PER_PROGRAM = 16
"""Of any step: another number might sum in another order, and a token's result would depend on its step."""


@triton.jit
def _load_halves(base, heads, first_cols, mask, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """Both halves, each [HEADS, HALF_PADDED], of heads that lie WIDTH apart."""
    pointers = base + heads[:, None] * WIDTH + first_cols[None, :]
    return tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + HALF, mask=mask, other=0.0)


@triton.jit
def _store_halves(pointers, first, second, mask, HALF: tl.constexpr):
    tl.store(pointers, first, mask=mask)
    tl.store(pointers + HALF, second, mask=mask)


@triton.jit
def _normed_half(x, inverse_rms, weight):
    """x * inverse_rms rounded to x's dtype, times weight rounded again; the value in float32."""
    normed = (x.to(tl.float32) * inverse_rms[:, None]).to(x.dtype)
    return (normed.to(tl.float32) * weight[None, :].to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _load_vectors(pointers, mask, HALF: tl.constexpr):
    """Both halves, each [HALF_PADDED]."""
    return tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + HALF, mask=mask, other=0.0)


@triton.jit
def _norm_rotate(first, second, weight_first, weight_second, cos, sin, eps, HALF: tl.constexpr):
    """Normalised and rotated halves in the input's dtype. Products are rounded before they are added."""
    dtype = first.dtype
    first32, second32 = first.to(tl.float32), second.to(tl.float32)
    mean = tl.sum(first32 * first32 + second32 * second32, 1) / (2 * HALF)
    inverse_rms = tl.rsqrt(mean + eps)
    a = _normed_half(first, inverse_rms, weight_first)
    b = _normed_half(second, inverse_rms, weight_second)
    cos = cos.to(dtype).to(tl.float32)[None, :]
    sin = sin.to(dtype).to(tl.float32)[None, :]
    out_first = (a * cos).to(dtype).to(tl.float32) - (b * sin).to(dtype).to(tl.float32)
    out_second = (b * cos).to(dtype).to(tl.float32) + (a * sin).to(dtype).to(tl.float32)
    return out_first.to(dtype), out_second.to(dtype)


@triton.jit
def _qk_norm_rope_store_kernel(
    QKV,
    Q_WEIGHT,
    K_WEIGHT,
    eps,
    COS_SIN,
    POSITIONS,
    K_CACHE,
    V_CACHE,
    SLOT_MAPPING,
    qkv_stride,
    k_block_stride,
    k_head_stride,
    k_token_stride,
    v_block_stride,
    v_head_stride,
    v_token_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Token `program_id(0)`; `program_id(1)` counts groups of HEADS query heads, then of HEADS key/value heads."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    cols = tl.arange(0, HALF_PADDED)
    mask_cols = cols < HALF
    row = QKV + token * qkv_stride
    # What does not depend on the projections is read before they are there; ordinary kernels stand between those that
    # write it, at the start of the step, and this one.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(POSITIONS + token)
    slot = tl.load(SLOT_MAPPING + token)
    is_query = group < q_groups
    q_first, q_second = _load_vectors(Q_WEIGHT + cols, mask_cols & is_query, HALF)
    k_first, k_second = _load_vectors(K_WEIGHT + cols, mask_cols & (group >= q_groups), HALF)
    weight_first, weight_second = q_first + k_first, q_second + k_second  # one of the two is zero
    cos, sin = _load_vectors(COS_SIN + position.to(tl.int64) * (2 * HALF) + cols, mask_cols, HALF)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if is_query:
        heads = group * HEADS + tl.arange(0, HEADS)
        mask = (heads < Q_HEADS)[:, None] & mask_cols[None, :]
        first, second = _load_halves(row, heads, cols, mask, 2 * HALF, HALF)
        first, second = _norm_rotate(first, second, weight_first, weight_second, cos, sin, eps, HALF)
        _store_halves(row + heads[:, None] * (2 * HALF) + cols[None, :], first, second, mask, HALF)
    else:
        if slot >= 0:
            heads = (group - q_groups) * HEADS + tl.arange(0, HEADS)
            mask = (heads < KV_HEADS)[:, None] & mask_cols[None, :]
            keys = row + Q_HEADS * (2 * HALF)
            first, second = _load_halves(keys, heads, cols, mask, 2 * HALF, HALF)
            values = keys + KV_HEADS * (2 * HALF)
            v_first, v_second = _load_halves(values, heads, cols, mask, 2 * HALF, HALF)
            block, offset = (slot // BLOCK_SIZE).to(tl.int64), slot % BLOCK_SIZE
            v_row = V_CACHE + block * v_block_stride + offset * v_token_stride
            _store_halves(v_row + heads[:, None] * v_head_stride + cols[None, :], v_first, v_second, mask, HALF)
            first, second = _norm_rotate(first, second, weight_first, weight_second, cos, sin, eps, HALF)
            k_row = K_CACHE + block * k_block_stride + offset * k_token_stride
            _store_halves(k_row + heads[:, None] * k_head_stride + cols[None, :], first, second, mask, HALF)


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Triton version of qk_norm_rope_store_reference; rows of qkv may be strided."""
    num_tokens, head_dim = qkv.shape[0], q_norm_weight.shape[0]
    groups = triton.cdiv(num_q_heads, HEADS_PER_PROGRAM) + triton.cdiv(num_kv_heads, HEADS_PER_PROGRAM)
    if num_tokens:
        _qk_norm_rope_store_kernel[(num_tokens, groups)](
            qkv,
            q_norm_weight,
            k_norm_weight,
            eps,
            cos_sin,
            positions,
            k_cache,
            v_cache,
            slot_mapping,
            qkv.stride(0),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            Q_HEADS=num_q_heads,
            KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            HALF_PADDED=triton.next_power_of_2(head_dim // 2),
            BLOCK_SIZE=k_cache.shape[2],
            HEADS=HEADS_PER_PROGRAM,
            num_warps=4,
            **pdl_options(qkv.device, num_tokens <= PDL_TOKENS),
            enable_fp_fusion=False,  # or products would not be rounded before their sum
        )
    return qkv.view(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim)[:, :num_q_heads]


@triton.jit
def _store_kv_kernel(
    K,
    V,
    K_CACHE,
    V_CACHE,
    SLOT_MAPPING,
    k_stride,
    v_stride,
    k_block_stride,
    k_head_stride,
    k_token_stride,
    v_block_stride,
    v_head_stride,
    v_token_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOT_MAPPING + token)
    if slot >= 0:
        heads, cols = tl.arange(0, HEADS_PADDED)[:, None], tl.arange(0, DIM_PADDED)[None, :]
        mask = (heads < KV_HEADS) & (cols < HEAD_DIM)
        k = tl.load(K + token * k_stride + heads * HEAD_DIM + cols, mask=mask)
        v = tl.load(V + token * v_stride + heads * HEAD_DIM + cols, mask=mask)
        block, offset = (slot // BLOCK_SIZE).to(tl.int64), slot % BLOCK_SIZE
        k_row = K_CACHE + block * k_block_stride + offset * k_token_stride
        v_row = V_CACHE + block * v_block_stride + offset * v_token_stride
        tl.store(k_row + heads * k_head_stride + cols, k, mask=mask)
        tl.store(v_row + heads * v_head_stride + cols, v, mask=mask)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Triton version of store_kv_reference; tokens of k and v may be strided, their heads are contiguous."""
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens:
        _store_kv_kernel[(num_tokens,)](
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            k.stride(0),
            v.stride(0),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            KV_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEADS_PADDED=triton.next_power_of_2(num_heads),
            DIM_PADDED=triton.next_power_of_2(head_dim),
            BLOCK_SIZE=k_cache.shape[2],
            num_warps=min(max(num_heads * head_dim // 512, 1), 4),
        )


def qk_norm_rope_store_reference(
    qkv: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Normalises and rotates queries in place and keys on their way into the cache; values go there as they are.

    qkv [T, (Hq + 2 Hkv) * D]: queries, keys, values; its query part is overwritten. Norm weights [D]. cos_sin float32
    [max_position, D]: cosines of the D / 2 angles, then sines. positions int32 [T]. k_cache, v_cache [blocks, Hkv,
    block_size, D]: any strides but the last. slot_mapping int32 [T]: block * block_size + offset, -1: store nothing.
    Returns the queries, a view [T, Hq, D] of qkv.
    """
    num_tokens, head_dim = qkv.shape[0], q_norm_weight.shape[0]
    heads = qkv.view(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    cos, sin = cos_sin[positions.long()].to(qkv.dtype).unsqueeze(1).chunk(2, dim=-1)
    q.copy_(_rotate(rms_norm_reference(q, q_norm_weight, eps), cos, sin))
    k = _rotate(rms_norm_reference(k, k_norm_weight, eps), cos, sin)
    store_kv_reference(k, v, k_cache, v_cache, slot_mapping)
    return q


def store_kv_reference(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes k, v [T, Hkv, D] to the slots slot_mapping int32 [T] (block * block_size + offset; -1: nowhere) of
    k_cache, v_cache [blocks, Hkv, block_size, D]."""
    block_size = k_cache.shape[2]
    tokens = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[tokens].long()
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, offsets] = k[tokens]
    v_cache[blocks, :, offsets] = v[tokens]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], cos and sin [T, 1, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
