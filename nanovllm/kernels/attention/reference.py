"""Attention in plain PyTorch, with everything that a layer may ask for: the twin of all kernels here."""

import torch

from nanovllm.kernels.attention.spec import AttentionSpec


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


def attention_reference(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, row_slot: torch.Tensor,
                        cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, block_table: torch.Tensor,
                        spec: AttentionSpec, sinks: torch.Tensor | None = None,
                        kv_scales: torch.Tensor | None = None) -> torch.Tensor:
    """Causal attention of q [T, Hq, D], in float32 (float64 for float64 input). A row's last query sees context_lens[r]
    keys, the one before it one less; of these spec.window may leave the last few. Tokens of no row come out as zeros.

    k_cache, v_cache [blocks, Hkv, block_size, D]; row_slot int32 [R], -1 for padding; cu_seqlens_q int32 [R + 1], where
    each row's tokens start; context_lens int32 [R]; block_table int32 [slots, max_blocks]; sinks [Hq]; kv_scales
    bfloat16 [blocks, Hkv, block_size, 2]: what e4m3 keys and values are multiplied with. Returns [T, Hq, D],
    or for a spec with value_dim so many of them.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:2], spec.out_dim, dtype=dtype, device=q.device)
    starts = cu_seqlens_q.tolist()
    for r, (slot, context) in enumerate(zip(row_slot.tolist(), context_lens.tolist(), strict=True)):
        tokens, count = slice(starts[r], starts[r + 1]), starts[r + 1] - starts[r]
        if slot < 0 or context == 0 or count == 0:
            continue
        blocks = block_table[slot, : -(-context // k_cache.shape[2])].long()
        pages = keys_and_values(k_cache, v_cache, blocks, slice(context), kv_scales)
        k, v = (x.repeat_interleave(spec.group_size, 0) for x in pages)
        v = v[..., : spec.out_dim]
        visible = torch.ones(count, context, dtype=torch.bool, device=q.device).tril(context - count)
        if spec.window:
            visible = visible.triu(context - count - spec.window + 1)
        heads = None if sinks is None else sinks[:, None].expand(-1, count)
        o = attend_reference(q[tokens].transpose(0, 1), k, v, spec.scale, visible, spec.softcap, heads)
        out[tokens] = o.transpose(0, 1)
    return out
