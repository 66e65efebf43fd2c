"""Sampling from softmax(logits / temperature) by the Gumbel-max trick, one shard of the vocabulary at a time.

The arg-max over all ids of logit / temperature + Gumbel noise is a draw from the softmax (Gumbel 1954; Maddison et al.,
arXiv 1411.0030). Noise is keyed by the id in the whole vocabulary, so the best of the shards' best is the same token
whatever the number of ranks. A candidate travels as one int64 key:

    bits 63..32  the float32 score as a signed integer of the same order
    bits 31..0   the complement of the id, so that of equal scores the lower id has the larger key

A signed maximum over ranks (an ordinary all-reduce) finds the winner.
"""

import torch

from nanovllm.kernels.rng import WORD, gumbel_noise_reference, random_words_reference, row_key_reference

MIN_TEMPERATURE = 1e-5
"""Below it a row is greedy: the reciprocal would overflow the scores."""
NO_CANDIDATE = torch.iinfo(torch.int64).min
"""Key of a rank that holds no id of the vocabulary: smaller than any other."""


def gumbel_argmax_reference(
    logits: torch.Tensor,
    row_slot: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    positions: torch.Tensor,
    vocab_start: int,
    vocab_size: int,
) -> torch.Tensor:
    """Key of the best token of each row among this rank's ids, int64 [B].

    logits [B, Vs] bfloat16 or float32, for the ids from vocab_start on; ids from vocab_size on are padding and never
    win. row_slot int32 [B]: the row's line of temperature float32 [S] and seed int64 [S]; -1: no row, key 0. positions
    int32 [B]: index in its sequence of the token that is drawn. Temperature 0: the largest logit. NaN counts as -inf.
    """
    num_rows, num_ids = logits.shape
    num_valid = max(0, min(num_ids, vocab_size - vocab_start))
    keys = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return keys
    if num_valid == 0:
        return torch.where(row_slot < 0, keys, NO_CANDIDATE)
    slots = row_slot.clamp(min=0).long()
    row_temperature = temperature[slots].unsqueeze(1)
    ids = torch.arange(vocab_start, vocab_start + num_valid, device=logits.device)
    scores = logits[:, :num_valid].float()
    random = ((row_temperature >= MIN_TEMPERATURE).squeeze(1) & (row_slot >= 0)).nonzero().squeeze(1)
    if random.numel():
        k0, k1 = row_key_reference(seed[slots[random]], positions[random])
        noise = gumbel_noise_reference(random_words_reference(k0.unsqueeze(1), k1.unsqueeze(1), ids))
        scores = scores.index_copy(0, random, scores[random] * (1.0 / row_temperature[random]) + noise)
    scores = scores.masked_fill(scores.isnan(), -torch.inf) + 0.0  # -0.0 + 0.0 is 0.0: both zeros are one score
    best = pack_keys_reference(scores, ids).max(dim=1).values
    return torch.where(row_slot < 0, keys, best)


def pack_keys_reference(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """float32 scores (no NaN) and ids, of shapes that broadcast -> int64 keys."""
    bits = scores.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.long() << 32) | (WORD - ids.long())


def keys_to_tokens(keys: torch.Tensor) -> torch.Tensor:
    """Token ids, int32 [B], of int64 keys [B]; -1 of key 0."""
    return (~keys).to(torch.int32)


def commit_tokens_reference(
    keys: torch.Tensor, row_slot: torch.Tensor, last_token: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Unpacks the winners' keys int64 [B], writes them to last_token[row_slot] (int32 [S]) and returns them, int32 [B],
    -1 for rows of slot -1."""
    tokens = torch.where(row_slot < 0, -1, keys_to_tokens(keys))
    rows = (row_slot >= 0).nonzero().squeeze(1)
    last_token[row_slot[rows].long()] = tokens[rows]
    return tokens if out is None else out.copy_(tokens)


def sample_tokens_reference(
    logits: torch.Tensor,
    row_slot: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    positions: torch.Tensor,
    vocab_size: int,
    last_token: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """gumbel_argmax over the whole vocabulary and commit_tokens, for a single rank -> tokens int32 [B]."""
    keys = gumbel_argmax_reference(logits, row_slot, temperature, seed, positions, 0, vocab_size)
    return commit_tokens_reference(keys, row_slot, last_token, out)
