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
from nanovllm.wire.sampling import EDIT_WORDS


def sample_kept(
    rows: Rows, thresholds: torch.Tensor | None = None, counts: torch.Tensor | None = None,
    masks: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Samples a token of each row from the ids whose logit is at least its threshold, float32 [G] (None: all), and
    writes it to tokens and last_token.

    counts int32 [S, vocab_size] and masks int32 [lines, vocab_size / 32] change the logits first (edit_logits). The
    token is that of gumbel_argmax (kernels/sampling/gumbel.py) where nothing is filtered. Where no id is left, id 0.
    Rows of threshold inf keep the token they have.
    """
    draws = Draws(rows.slots, rows.temperature, rows.seed, rows.positions)
    partial = best_of_chunks(rows.logits, draws, rows.vocab_size, 0, rows, thresholds, counts, masks)
    reduce_chunks(partial, rows.slots, None, rows.last_token, rows.tokens, rows, thresholds)


def sample_kept_reference(
    rows: Rows, thresholds: torch.Tensor | None = None, counts: torch.Tensor | None = None,
    masks: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Plain twin of `sample_kept`."""
    slots = rows.slots
    x = edit_logits_reference(rows, counts, masks, rows.records[:0, :EDIT_WORDS])
    x = x.masked_fill(x.isnan(), -torch.inf)
    if thresholds is not None:
        random = rows.temperature[slots.long()] >= MIN_TEMPERATURE
        x = x.masked_fill((x < thresholds.unsqueeze(1)) & random.unsqueeze(1), -torch.inf)
    draws = Draws(slots, rows.temperature, rows.seed, rows.positions[rows.target_rows.long()])
    sampled = keys_to_tokens(gumbel_argmax_reference(x, draws, 0, rows.vocab_size))
    rows.tokens[rows.target_rows.long()] = sampled
    rows.last_token[slots.long()] = sampled
