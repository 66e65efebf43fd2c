"""QK-norm, rotary embedding and the store of keys and values in the paged cache, in one pass over the projections.

Rotation (Su et al., arXiv 2104.09864) pairs dimension i with i + D / 2, as Hugging Face's models do. Rounding is theirs
too: the norm's result, the norm times weight, cos, sin, each product and their sum are all rounded to the model's dtype.
"""

import torch

from nanovllm.kernels.norm import rms_norm_reference


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
    """Writes k, v [T, Hkv, D] to the cache slots [T] (int32; -1: nowhere) of k_cache, v_cache."""
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
