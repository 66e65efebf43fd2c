"""Rows of a rank's part of the embedding table, and zeros for the ids of other ranks: their sum is the embedding."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit
def _embed_shard_kernel(TOKEN_IDS, WEIGHT, OUT, start, num_valid, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """OUT [tokens, HIDDEN]: the lines of WEIGHT [any, HIDDEN] that TOKEN_IDS int32 [tokens] name, less `start`; zeros
    where that is not in 0 .. num_valid. A program has token `program_id(0)`. Without PDL: decode attention counts on an
    ordinary kernel here, which ends what prepares the step before any layer begins."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    row = tl.load(TOKEN_IDS + token).to(tl.int64) - start
    is_mine = (row >= 0) & (row < num_valid)
    x = tl.load(WEIGHT + row * HIDDEN + cols, mask=mask & is_mine, other=0.0)
    tl.store(OUT + token * HIDDEN + cols, x, mask=mask)


def embed_shard(token_ids: torch.Tensor, weight: torch.Tensor, start: int, num_valid: int) -> torch.Tensor:
    """token_ids int32 [T], weight [rows, hidden] of ids start, start + 1, ... -> [T, hidden]; zeros for ids that are
    not among its first `num_valid` rows. All is contiguous."""
    num_tokens, hidden = token_ids.shape[0], weight.shape[1]
    out = torch.empty(num_tokens, hidden, dtype=weight.dtype, device=weight.device)
    block = triton.next_power_of_2(hidden)
    if num_tokens:
        _embed_shard_kernel[(num_tokens,)](
            token_ids, weight, out, start, num_valid, HIDDEN=hidden, BLOCK=block,
            num_warps=min(max(block // 1024, 1), 4),
        )  # fmt: skip
    return out


def embed_shard_reference(token_ids: torch.Tensor, weight: torch.Tensor, start: int, num_valid: int) -> torch.Tensor:
    """Plain twin of `embed_shard`."""
    local = token_ids - start
    foreign = (local < 0) | (local >= num_valid)
    return F.embedding(local.masked_fill(foreign, 0), weight).masked_fill(foreign.unsqueeze(-1), 0.0)
