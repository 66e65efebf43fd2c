"""Attention in plain PyTorch, a token and a query head at a time: its bits depend on neither the step nor the rank."""

import torch

from nanovllm.attention.base import AttentionSpec
from nanovllm.attention.torch_backend import TorchBackend


class FixedOrderTorchBackend(TorchBackend):
    """TorchBackend whose products always have one query, over keys that its own position alone says how many."""

    def _at_once(self, tokens: slice, context: int) -> list[tuple[slice, int]]:
        numbers = range(tokens.start, tokens.stop)
        return [(slice(token, token + 1), context - tokens.stop + token + 1) for token in numbers]

    @staticmethod
    def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, spec: AttentionSpec,
                sinks: torch.Tensor | None) -> torch.Tensor:
        each_head = AttentionSpec(spec.num_heads, spec.num_heads, spec.head_dim, spec.scale, spec.window, spec.softcap,
                                  spec.has_sinks)
        k, v = (x.repeat_interleave(spec.group_size, 0) for x in (k, v))
        return TorchBackend._attend(q, k, v, mask, each_head, sinks)
