"""Attention in plain PyTorch: the reference the other backends are held to, and what a CPU runs."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBackend, AttentionMetadata


class _Row(NamedTuple):
    first_token: int
    num_tokens: int
    context_len: int
    blocks: torch.Tensor
    """int64 [blocks of the row]."""
    mask: torch.Tensor | None
    """bool [G * num_tokens, context_len], True where visible; None for a single token, which sees everything."""


class TorchBackend(AttentionBackend):
    """One scaled_dot_product_attention per row, over its own keys only: a row's result does not depend on its
    neighbours. Reads lengths on the host, so it cannot be captured in a CUDA graph."""

    name = "torch"

    @classmethod
    def check(cls, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> None:
        if block_size < 1:
            raise ValueError(f"kvcache_block_size={block_size}: must be >= 1")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype}: attention_backend='torch' needs a floating-point type")

    def prepare(self, metadata: AttentionMetadata) -> None:
        slots, lens = metadata.row_slot.tolist(), metadata.context_lens.tolist()
        starts = metadata.cu_seqlens_q.tolist()
        rows = []
        for r in range(metadata.num_rows):
            count, context = starts[r + 1] - starts[r], lens[r]
            if slots[r] < 0 or context == 0 or count == 0:
                continue
            num_blocks = -(-context // self.block_size)
            blocks = metadata.block_table[slots[r], :num_blocks].long()
            rows.append(_Row(starts[r], count, context, blocks, self._mask(count, context)))
        metadata.workspace = rows

    def forward(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, metadata: AttentionMetadata,
                out: torch.Tensor) -> torch.Tensor:
        self.ensure_prepared(q, metadata)
        for row in metadata.workspace:
            tokens = slice(row.first_token, row.first_token + row.num_tokens)
            k, v = (self._gather(cache, row) for cache in (k_cache, v_cache))
            out[tokens] = self._attend(q[tokens], k, v, row.mask)
        return out

    def _mask(self, count: int, context: int) -> torch.Tensor | None:
        if count == 1:
            return None
        visible = torch.ones(count, context, dtype=torch.bool, device=self.device).tril(context - count)
        return visible.repeat(self.num_q_heads // self.num_kv_heads, 1)

    def _gather(self, cache: torch.Tensor, row: _Row) -> torch.Tensor:
        """The row's keys or values as [Hkv, context_len, D]."""
        pages = cache[row.blocks].transpose(0, 1)
        return pages.reshape(self.num_kv_heads, -1, self.head_dim)[:, : row.context_len]

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """q [n, Hq, D], k and v [Hkv, context_len, D] -> [n, Hq, D]. The query heads that share a key head are laid end
        to end as more queries, so keys are not copied for each of them."""
        n = q.shape[0]
        grouped = q.reshape(n, self.num_kv_heads, -1, self.head_dim).permute(1, 2, 0, 3)
        grouped = grouped.reshape(self.num_kv_heads, -1, self.head_dim)
        o = F.scaled_dot_product_attention(grouped[None], k[None], v[None], attn_mask=mask, scale=self.scale)[0]
        o = o.reshape(self.num_kv_heads, -1, n, self.head_dim).permute(2, 0, 1, 3)
        return o.reshape(n, self.num_q_heads, self.head_dim)
