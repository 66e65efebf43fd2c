"""Sampling of rows with sampling options: Gumbel-max as in gumbel.py, among the ids that are left, with logits as the
row's counts and mask change them on their way from memory."""

import torch

from nanovllm.kernels.sampling.gumbel import (
    MIN_TEMPERATURE,
    Draws,
    best_of_chunks,
    gumbel_argmax_reference,
    keys_to_tokens,
    reduce_chunks,
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

    edits: counts and masks int32 [lines, vocab_size / 32] change the logits first (edit_logits). The token is
    that of gumbel_argmax (kernels/sampling/gumbel.py) where nothing is filtered. Where no id is left, id 0. Rows of
    threshold inf keep the token they have.
    """
    draws, editing = Draws(rows.slots, rows.temperature, rows.seed, rows.positions), (counts, masks) if edits else ()
    partial = best_of_chunks(rows.logits, draws, rows.vocab_size, 0, rows, thresholds, *editing)
    reduce_chunks(partial, rows.slots, None, rows.last_token, rows.tokens, rows, thresholds, counts)


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
