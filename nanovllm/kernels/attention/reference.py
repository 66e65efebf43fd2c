"""Attention of one row in plain PyTorch, with everything that a layer may ask for."""

import torch


def keys_and_values(k_cache: torch.Tensor, v_cache: torch.Tensor, blocks: torch.Tensor, keys: slice,
                    kv_scales: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's keys and values as [Hkv, K, D]: of its int64 `blocks` in caches [blocks, Hkv, block_size, D], laid end to
    end, the slice `keys`. In float32, and so exact, where kv_scales bfloat16 [blocks, Hkv, block_size, 2] are there."""
    found = [cache[blocks].transpose(0, 1).flatten(1, 2)[:, keys] for cache in (k_cache, v_cache)]
    if kv_scales is not None:
        scales = kv_scales[blocks].transpose(0, 1).flatten(1, 2)[:, keys].float()
        found = [x.float() * scale for x, scale in zip(found, scales.split(1, dim=-1), strict=True)]
    return found[0], found[1]


def attend_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, visible: torch.Tensor | None,
                     softcap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """softmax over keys and sink of softcap * tanh(q k^T * scale / softcap), times v, in float32 or q's own wider type.

    q [H, Q, D], k and v [H, K, D]; visible bool [Q, K]; sinks [H, Q]: the score of a key without value, per query.
    Returns [H, Q, D].
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(dtype) @ k.to(dtype).mT * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(dtype)[..., None]], dim=-1)
    return scores.softmax(-1)[..., : k.shape[-2]] @ v.to(dtype)
