"""The rows of a step as latent attention takes them."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class LatentRows:
    """One for each step, which all layers share; tensors are AttentionMetadata's, contiguous."""

    row_slot: torch.Tensor
    """int32 [R]: the row's line of a block table; -1 for padding."""
    context_lens: torch.Tensor
    """int32 [R]: tokens that the row's last one sees, its own among them, the one before it one less; 0 for padding."""
    cu_seqlens_q: torch.Tensor
    """int32 [R + 1]: where each row's tokens start."""
    num_decode_rows: int
    """The first so many rows have one token each, row r token r; neighbours may have one slot (drafts)."""
    num_tokens: int
    """T, padding included."""
    max_context_len: int
    """Bound on context_lens."""
    max_seqlen_q: int
    """Bound on the tokens of a row."""
    is_captured: bool = False
    """Nothing of it may be read on the host."""
    plan: Any = None
    """Data that the kernel computes in the first layer, for all; only the kernel reads it."""
