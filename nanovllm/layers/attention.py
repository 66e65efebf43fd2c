"""Self-attention of one rank's heads over the paged KV cache."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.attention.split import attention_halves
from nanovllm.kernels import Kernels
from nanovllm.kernels.base.padded_rows import empty_rows
from nanovllm.kernels.gemm.push import Partial
from nanovllm.layers.linear import HeadSplit, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.weights import CheckpointWeight, WeightedModule, parameter, whole
from nanovllm.parallel.group import TensorParallelGroup


@dataclass
class ForwardStep:
    """What the layers need to know of a step, besides the hidden states [T, hidden]."""

    positions: torch.Tensor
    """int32 [T]"""
    slot_mapping: torch.Tensor
    """int32 [T]: where each token's key and value go in the flat cache; -1: nowhere."""
    attention: AttentionMetadata

    def halves(self, cut: int) -> "tuple[ForwardStep, ForwardStep]":
        """The first `cut` tokens, and the others; see attention_halves."""
        first, second = attention_halves(self.attention, cut)
        return (
            ForwardStep(self.positions[:cut], self.slot_mapping[:cut], first),
            ForwardStep(self.positions[cut:], self.slot_mapping[cut:], second),
        )


def wanted_rows(hidden: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
    """The rows of `hidden` that are wanted, int [N]; None: all, without a copy."""
    return hidden if wanted is None else hidden.index_select(0, wanted)


class Attention(WeightedModule):
    """Projections, QK-norm, rotary embedding, KV store and attention: [T, hidden] -> [T, hidden], a partial sum."""

    def __init__(
        self,
        hidden_size: int,
        heads: HeadSplit,
        head_dim: int,
        eps: float,
        cos_sin: torch.Tensor,
        group: TensorParallelGroup,
        kernels: Kernels,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """cos_sin: see cos_sin_table; one table for all layers."""
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.eps = eps
        self.cos_sin = cos_sin
        self.kernels = kernels
        self.backend = backend
        self.qkv_proj = QKVParallelLinear(hidden_size, heads, head_dim, dtype, device)
        self.o_proj = RowParallelLinear(heads.num_heads * head_dim, hidden_size, group, dtype, device)
        self.q_norm_weight = parameter(head_dim, dtype=dtype, device=device)
        self.k_norm_weight = parameter(head_dim, dtype=dtype, device=device)
        self.unbind_cache()

    def unbind_cache(self) -> None:
        """Lets go of the KV cache; runner/kv_cache.py binds one: [num_blocks, kv heads, block_size, head_dim] each."""
        self.k_cache = self.v_cache = self.q_norm_weight.new_empty(0, self.heads.local_kv_heads, 1, self.head_dim)

    def forward(self, x: torch.Tensor, step: ForwardStep, wanted: torch.Tensor | None = None) -> Partial:
        """`wanted` int [N]: the tokens whose result anybody will read, [N, hidden]; all have their keys stored."""
        return self.o_proj(wanted_rows(self.attend(self.qkv_proj(x), step), wanted))

    def attend(self, qkv: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """Everything between the projections: [T, (heads + 2 * kv_heads) * head_dim] -> [T, heads * head_dim]."""
        q = self.kernels.qk_norm_rope_store(
            qkv,
            self.q_norm_weight,
            self.k_norm_weight,
            self.eps,
            self.cos_sin,
            step.positions,
            self.k_cache,
            self.v_cache,
            step.slot_mapping,
            self.heads.local_heads,
            self.heads.local_kv_heads,
        )
        out = empty_rows(q.shape[0], q.shape[1] * q.shape[2], q.dtype, q.device).view(q.shape)
        self.backend.forward(q, self.k_cache, self.v_cache, step.attention, out)
        return out.view(out.shape[0], -1)

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.qkv_proj.checkpoint_weights(prefix)
        yield from self.o_proj.checkpoint_weights(f"{prefix}.o_proj")
        yield whole(f"{prefix}.q_norm.weight", self.q_norm_weight)
        yield whole(f"{prefix}.k_norm.weight", self.k_norm_weight)
