"""A step cut in two: the attention metadata of its first tokens and of the rest."""

from dataclasses import replace

import numpy as np
import torch

from nanovllm.attention.base import AttentionMetadata


def attention_halves(step: AttentionMetadata, cut: int) -> tuple[AttentionMetadata, AttentionMetadata]:
    """The metadata of tokens 0 .. cut - 1, among them all decode rows, and of those from `cut` on, which are numbered
    from zero. Device work only, capturable.

    A chunk row that the cut goes through is in both; in the first, its last token there sees that much less. Rows
    without tokens in a half are left out where the host knows the lengths, and else have no tokens and context 0, as
    padding has.
    """
    n, cu_seqlens_q = step.num_decode_rows, step.cu_seqlens_q
    assert n <= cut < step.num_tokens
    rows_before, first_after = step.num_rows, n
    if step.token_ends is not None:
        rows_before = 1 + int(np.searchsorted(step.token_ends, cut, side="left"))
        first_after = int(np.searchsorted(step.token_ends, cut, side="right"))
    first = cu_seqlens_q[: rows_before + 1].clamp(max=cut)
    beyond = cu_seqlens_q[1 : rows_before + 1] - first[1:]
    second = cu_seqlens_q[first_after:].clamp(min=cut) - cut
    return (
        _part(step, slice(rows_before), n, first, step.context_lens[:rows_before] - beyond, cut),
        _part(step, slice(first_after, None), 0, second, step.context_lens[first_after:], step.num_tokens - cut),
    )


def _part(
    step: AttentionMetadata, rows: slice, decodes: int, cu_seqlens_q: torch.Tensor, lens: torch.Tensor, tokens: int
) -> AttentionMetadata:
    return replace(
        step, num_rows=lens.shape[0], num_decode_rows=decodes, row_slot=step.row_slot[rows],
        context_lens=lens * (cu_seqlens_q.diff() > 0), cu_seqlens_q=cu_seqlens_q, num_tokens=tokens, token_ends=None,
        workspace=None,
    )  # fmt: skip
