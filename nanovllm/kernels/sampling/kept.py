"""Sampling of rows with sampling options: Gumbel-max as in gumbel.py, among the ids that are left, with logits as the
row's counts and mask change them on their way from memory."""

import torch

from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.sampling.gumbel import (
    MIN_TEMPERATURE,
    Draws,
    best_of_chunks_kernel,
    gumbel_argmax_reference,
    keys_to_tokens,
    reduce_chunks_kernel,
)
from nanovllm.kernels.sampling.penalties import edit_logits_reference
from nanovllm.kernels.sampling.rows import Rows
from nanovllm.wire.sampling import PENALTIES


def sample_kept(
    rows: Rows, counts: torch.Tensor | None = None, thresholds: torch.Tensor | None = None,
    masks: torch.Tensor | None = None, edits: bool = False,
) -> None:  # fmt: skip
    """Samples a token of each row from the ids whose logit is at least its threshold, float32 [G] (None: all), and
    writes it to tokens, last_token and, for rows with penalties, into counts int32 [S, vocab_size].

    edits: counts and masks int32 [S, vocab_size / 32] change the logits first (edit_logits). The token is
    that of gumbel_argmax (kernels/sampling/gumbel.py) where nothing is filtered. Where no id is left, id 0. Rows of
    threshold inf keep the token they have.
    """
    logits, num_rows, vocab_size = rows.logits, len(rows), rows.vocab_size
    tile, tiles = 256, 16 if num_rows > 32 else 4  # few rows need many programs; a single warp waits for no other
    tiles = min(tiles, triton.next_power_of_2(triton.cdiv(vocab_size, tile)))
    num_chunks = triton.cdiv(vocab_size, tile * tiles)
    partial = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    counts_stride, mask_stride = (0 if table is None else table.stride(0) for table in (counts, masks))
    best_of_chunks_kernel[(num_chunks, num_rows)](
        logits, rows.slots, rows.temperature, rows.seed, rows.positions, partial, rows.rows, rows.target_rows,
        rows.records, thresholds, counts if edits else None, masks if edits else None, logits.stride(0), counts_stride,
        mask_stride, 0, vocab_size, num_chunks, TILE=tile, TILES=tiles, APPROX=logits.is_cuda, PDL=False, num_warps=1,
    )  # fmt: skip
    reduce_chunks_kernel[(num_rows,)](
        partial, rows.slots, None, rows.last_token, rows.tokens, rows.target_rows, rows.records, thresholds, counts,
        counts_stride, num_chunks, CHUNKS_PADDED=triton.next_power_of_2(num_chunks), PDL=False, num_warps=1,
    )  # fmt: skip


def sample_kept_reference(
    rows: Rows, counts: torch.Tensor | None = None, thresholds: torch.Tensor | None = None,
    masks: torch.Tensor | None = None, edits: bool = False,
) -> None:  # fmt: skip
    """Plain twin of `sample_kept`."""
    slots, records = rows.slots, rows.records
    if edits:
        x = edit_logits_reference(rows, counts, masks, records[:0, :3])
    else:
        x = rows.logits[rows.rows.long(), : rows.vocab_size].float()
    x = x.masked_fill(x.isnan(), -torch.inf)
    if thresholds is not None:
        random = rows.temperature[slots.long()] >= MIN_TEMPERATURE
        x = x.masked_fill((x < thresholds.unsqueeze(1)) & random.unsqueeze(1), -torch.inf)
    draws = Draws(slots, rows.temperature, rows.seed, rows.positions[rows.target_rows.long()])
    sampled = keys_to_tokens(gumbel_argmax_reference(x, draws, 0, rows.vocab_size))
    rows.tokens[rows.target_rows.long()] = sampled
    rows.last_token[slots.long()] = sampled
    if counts is not None:
        counted = (records[:, 0] & PENALTIES).nonzero().squeeze(1)
        counts[slots[counted].long(), sampled[counted].long()] += 2
