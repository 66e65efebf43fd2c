"""Attention in plain PyTorch, a token and a query head at a time: its bits depend on neither the step nor the rank."""

import torch

from nanovllm.attention.base import AttentionMetadata, AttentionSpec
from nanovllm.attention.torch_backend import TorchBackend, _Row


class FixedOrderTorchBackend(TorchBackend):
    """TorchBackend whose products always have one query, over keys that its own position alone says how many."""

    def prepare(self, metadata: AttentionMetadata) -> None:
        slots, lens = metadata.row_slot.tolist(), metadata.context_lens.tolist()
        starts = metadata.cu_seqlens_q.tolist()
        rows: dict[tuple[int | None, int], list[_Row]] = {(s.window, s.group_size): [] for s in self.specs}
        for r, (slot, context) in enumerate(zip(slots, lens, strict=True)):
            count = starts[r + 1] - starts[r]
            for i in range(count if slot >= 0 and context else 0):
                token = slice(starts[r] + i, starts[r] + i + 1)
                for (window, group_size), found in rows.items():
                    end = context - count + i + 1
                    found.append(self._row(metadata.block_table[slot], token, end, window, group_size))
        metadata.workspace = rows

    @staticmethod
    def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec,
                sinks: torch.Tensor | None) -> torch.Tensor:
        each_head = AttentionSpec(spec.num_heads, spec.num_heads, spec.head_dim, spec.scale, spec.window, spec.softcap,
                                  spec.has_sinks)
        k, v = (x.repeat_interleave(spec.group_size, 0) for x in (k, v))
        return TorchBackend._attend(q, k, v, mask, each_head, sinks)
