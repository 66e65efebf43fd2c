"""Attention of one row in plain PyTorch, with everything that a layer may ask for."""

import torch


def keys_and_values(k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, context: int
                    ) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's keys and values as [Hkv, context, D], of caches [blocks, Hkv, block_size, D] and its line of the block
    table."""
    blocks = table[: -(-context // k_cache.shape[2])].long()
    k, v = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context] for cache in (k_cache, v_cache))
    return k, v


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
