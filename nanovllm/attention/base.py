"""The contract between layers and attention backends: what a step's attention needs to know, and who computes it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.plan.plan import NO_LAUNCH, Launch

__all__ = ["AttentionBackend", "AttentionMetadata", "AttentionSetup", "AttentionSpec", "KVCache"]


@dataclass(frozen=True, slots=True)
class KVCache:
    """A layer's part of the paged cache."""

    k: torch.Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim]; the last dimension is contiguous."""
    v: torch.Tensor
    """Values, of the same shape but maybe for head_dim; k itself where values are keys."""
    scales: torch.Tensor | None = None
    """bfloat16 [num_blocks, num_kv_heads, block_size, 2]: what each token's key and value are multiplied with, where
    they are e4m3."""
    table: int = 0
    """Index of the block table, among a row's, that lists the blocks of this cache."""
    mixed: bool = False
    """Whether a block is cut otherwise in other layers. Then what is a value here may have been a key there, which is
    NaN where a row's values were not finite (kernels/pointwise/rope.py)."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All memory, each tensor once."""
        values = [] if self.v is self.k else [self.v]
        return [self.k, *values, *([] if self.scales is None else [self.scales])]


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """Work of a backend: the model's kinds of layers, and the engine's sizes and types."""

    specs: tuple[AttentionSpec, ...]
    """Kinds of the model's layers, each once."""
    block_size: int
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    """Dtype of the caches, where it is not `dtype`."""
    max_num_seqs: int = 1
    max_model_len: int = 1
    """Tokens."""
    places: int = 1
    """Maximum decode rows, one after the other, that may be tokens of one sequence."""

    @property
    def has_fp8_cache(self) -> bool:
        return self.kv_dtype == torch.float8_e4m3fn


@dataclass
class AttentionMetadata:
    """The rows of one step. Make a new one for every step (in a CUDA graph: one per captured graph).

        rows    | decode rows: one token each | prompt chunks: any number of tokens each |
                0                      num_decode_rows                                num_rows
        tokens  cu_seqlens_q[r] .. cu_seqlens_q[r + 1] are the row's, so decode row r is token r

    A row's last token sees `context_lens[r]` tokens of cache, its own among them; the one before it sees one less.
    """

    num_rows: int
    """R, padding rows of a CUDA graph included."""
    num_decode_rows: int
    """The first so many rows have exactly one token. Rows of one sequence, one after the other, have its slot, and each
    sees one key more than the one before."""
    row_slot: torch.Tensor
    """int32 [R]: the row's line of block_table; -1 for padding."""
    context_lens: torch.Tensor
    """int32 [R]: computed tokens + tokens of this step; 0 for padding."""
    cu_seqlens_q: torch.Tensor
    """int32 [R + 1]: where each row's tokens start; padding rows of the chunk part have none."""
    block_tables: tuple[torch.Tensor, ...]
    """int32 [max_num_seqs, max_blocks] each, indexed by slot; by KVCache.table. What a window has passed may name any
    block."""
    max_seqlen_q: int
    """Host-side bound on the tokens of a row."""
    max_context_len: int
    """Host-side bound on context_lens; the model's maximum in a CUDA graph."""
    num_tokens: int
    """T, padding included (shapes of a captured graph)."""
    num_prefill_blocks: int | None = None
    """Host-side bound on the blocks of all prompt chunks' keys, counted row by row; None: the host has none."""
    is_captured: bool = False
    """The step is being captured in a CUDA graph: its lengths are known on the device alone."""
    token_ends: np.ndarray | None = field(default=None, repr=False)
    """int64 [R]: cu_seqlens_q[1:], where the host knows it."""
    workspace: Any = field(default=None, repr=False)
    """Data that the backend's prepare computed once for all layers; only the backend reads it."""

    @property
    def num_prefill_rows(self) -> int:
        return self.num_rows - self.num_decode_rows


class AttentionBackend(ABC):
    """Causal attention over a paged cache. One object serves all layers of a rank, in stream order.

    Token n of a row is in block block_tables[cache.table][slot, n // block_size] of a KVCache, at offset n %
    block_size. What a row cannot see (past its end, before its window, in others' blocks) may be anything, keys NaN
    too; values are finite everywhere, for 0 x NaN would reach it (qk_norm_rope_store sees to that).
    """

    name: str
    can_capture: bool = True
    """Whether its steps can be captured in CUDA graphs."""
    takes_functions: bool = False
    """Whether its constructor takes the user's score_mod and mask_mod."""
    prefers_eager_prompts: bool = False
    """Prompts of eager steps take less time with it than those of captured ones."""
    token_major_cache: bool = False
    """Whether it wants caches whose tokens of all blocks have one stride: memory [num_blocks, block_size, heads,
    head_dim]."""
    is_required: bool = False
    """Asked for by name: finding out late that it cannot work is an error, not a reason to do without."""
    fallen_back_from: str = ""
    """Report of a backend that could not be used after all, and why; else ""."""

    def __init__(self, setup: AttentionSetup) -> None:
        self.check(setup)
        self.setup, self.block_size, self.device = setup, setup.block_size, setup.device

    @classmethod
    @abstractmethod
    def check(cls, setup: AttentionSetup) -> None:
        """Raises ValueError naming option, value and bound where this backend cannot serve it."""

    @abstractmethod
    def prepare(self, metadata: AttentionMetadata) -> None:
        """Computes, before a step's first `forward`, what all layers share (device work only, capturable)."""

    def prefer_small_shared_memory(self, wanted: bool) -> None:  # noqa: B027 (a backend may not take so much)
        """Chooses whether decode attention of one or two rows takes little shared memory, and so leaves L1 to the
        kernels that start behind it."""

    @abstractmethod
    def forward(self, q: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, out: torch.Tensor,
                spec: AttentionSpec, sinks: torch.Tensor | None = None,
                behind: Launch = NO_LAUNCH) -> torch.Tensor | FP8Rows:
        """Writes attention of q [T, Hq, D] (any token and head stride) into out [T, Hq, spec.out_dim] and returns out.
        behind: of the product that takes the result, and may have a step of decode rows rounded to e4m3, [T, Hq * D],
        for D = 128.

        spec: one of those that the backend was built with. sinks: [Hq], where spec.has_sinks. Where the cache is e4m3,
        q may be float16 beside an out of bfloat16. The step's own keys and values are in the cache already. Rows of
        padding leave their part of out as it was.
        """

    def warmup(self, cache: KVCache, spec: AttentionSpec) -> None:  # noqa: B027 (a backend may have nothing to compile)
        """Compiles every kernel variant that a step can need for layers of `spec`, so that none is compiled during
        capture or serving. Reads the cache (any contents), writes nothing of it."""
