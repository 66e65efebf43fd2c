"""Attention in plain PyTorch: the reference the other backends are held to, and what a CPU runs."""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.attention.base import AttentionBackend, AttentionMetadata, AttentionSetup, AttentionSpec, KVCache
from nanovllm.kernels.attention.reference import attend_reference, keys_and_values
from nanovllm.kernels.plan.plan import NO_LAUNCH, Launch


class _Row(NamedTuple):
    """One row's tokens of the step and the keys that any of them sees."""

    tokens: slice
    keys: slice
    """Slice of the row's keys within the gathered blocks."""
    slot: int
    blocks: slice
    """Part of the slot's line of a block table that holds the keys."""
    mask: torch.Tensor | None
    """bool [group size * tokens, keys], True where visible; None for a single token, which sees all of `keys`."""


class TorchBackend(AttentionBackend):
    """Row by row, over the row's own keys only: a row's result does not depend on its neighbours. Reads lengths on the
    host, so it cannot be captured in a CUDA graph."""

    name = "torch"
    can_capture = False

    @classmethod
    def check(cls, setup: AttentionSetup) -> None:
        if setup.block_size < 1:
            raise ValueError(f"kvcache_block_size={setup.block_size}: must be >= 1")
        if not setup.dtype.is_floating_point:
            raise ValueError(f"dtype={setup.dtype}: attention_backend='torch' needs a floating-point type")

    def prepare(self, metadata: AttentionMetadata) -> None:
        slots, lens = metadata.row_slot.tolist(), metadata.context_lens.tolist()
        starts = metadata.cu_seqlens_q.tolist()
        rows: dict[tuple[int | None, int], list[_Row]] = {(s.window, s.group_size): [] for s in self.setup.specs}
        for r, (slot, context) in enumerate(zip(slots, lens, strict=True)):
            if slot < 0 or context == 0 or starts[r] == starts[r + 1]:
                continue
            for tokens, end in self._at_once(slice(starts[r], starts[r + 1]), context):
                for (window, group_size), found in rows.items():
                    found.append(self._row(slot, tokens, end, window, group_size))
        metadata.workspace = rows

    def _at_once(self, tokens: slice, context: int) -> list[tuple[slice, int]]:
        """Splits a row's tokens into parts that are computed together, each with the number of keys that its last token
        sees."""
        return [(tokens, context)]

    def _row(self, slot: int, tokens: slice, context: int, window: int | None, group_size: int) -> _Row:
        count = tokens.stop - tokens.start
        first = max(0, context - count + 1 - window) if window else 0
        first_block, end_block = first // self.block_size, -(-context // self.block_size)
        mask = None
        if count > 1:
            before = context - first - count
            mask = torch.ones(count, context - first, dtype=torch.bool, device=self.device).tril(before)
            if window:
                mask = mask.triu(before - window + 1)
            mask = mask.repeat(group_size, 1)
        offset = first_block * self.block_size
        return _Row(tokens, slice(first - offset, context - offset), slot, slice(first_block, end_block), mask)

    def forward(self, q: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, out: torch.Tensor,
                spec: AttentionSpec, sinks: torch.Tensor | None = None, behind: Launch = NO_LAUNCH) -> torch.Tensor:
        table = metadata.block_tables[cache.table]
        for row in metadata.workspace[spec.window, spec.group_size]:
            k, v = keys_and_values(cache.k, cache.v, table[row.slot, row.blocks].long(), row.keys, cache.scales)
            out[row.tokens] = self._attend(q[row.tokens].to(k.dtype), k, v[..., : spec.out_dim], row.mask, spec, sinks)
        return out

    @staticmethod
    def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec,
                sinks: torch.Tensor | None) -> torch.Tensor:
        """q [n, Hq, D], k [Hkv, keys, D] and v [Hkv, keys, V] -> [n, Hq, V]. The query heads that share a key head are
        laid end to end as more queries, so keys are not copied for each of them."""
        n, heads, dim = q.shape
        grouped = q.reshape(n, spec.num_kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(spec.num_kv_heads, -1, dim)
        if spec.softcap is None and sinks is None:
            o = F.scaled_dot_product_attention(grouped[None], k[None], v[None], attn_mask=mask, scale=spec.scale)[0]
        else:
            if sinks is not None:
                sinks = sinks.view(spec.num_kv_heads, -1, 1).expand(-1, -1, n).flatten(1)
            o = attend_reference(grouped, k, v, spec.scale, mask, spec.softcap, sinks).to(q.dtype)
        return o.reshape(spec.num_kv_heads, -1, n, v.shape[-1]).permute(2, 0, 1, 3).reshape(n, heads, -1)


class FixedOrderTorchBackend(TorchBackend):
    """A token and a query head at a time: every product has one query, over keys that its own position alone says how
    many, so that bits depend on neither the step nor the rank."""

    def _at_once(self, tokens: slice, context: int) -> list[tuple[slice, int]]:
        numbers = range(tokens.start, tokens.stop)
        return [(slice(token, token + 1), context - tokens.stop + token + 1) for token in numbers]

    @staticmethod
    def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec,
                sinks: torch.Tensor | None) -> torch.Tensor:
        k, v = (x.repeat_interleave(spec.group_size, 0) for x in (k, v))
        return TorchBackend._attend(q, k, v, mask, replace(spec, num_kv_heads=spec.num_heads), sinks)
