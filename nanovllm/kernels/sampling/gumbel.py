"""Sampling from softmax(logits / temperature) by the Gumbel-max trick, one shard of the vocabulary at a time.

The arg-max over all ids of logit / temperature + Gumbel noise is a sample of the softmax (Gumbel 1954; Maddison et al.,
arXiv 1411.0030). Noise is keyed by the id in the whole vocabulary, so the best of the shards' best is the same token
whatever the number of ranks. A candidate travels as one int64 key:

    bits 63..32  the float32 score as a signed integer of the same order
    bits 31..0   the complement of the id, so that of equal scores the lower id has the larger key

A signed maximum over ranks (an ordinary all-reduce) finds the winner.
"""

from typing import NamedTuple

import torch

from nanovllm.kernels.base.device import pdl_options, start_early
from nanovllm.kernels.base.float_order import to_ordered
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.sampling.penalties import RECORD, load_edited, load_penalties, mask_line
from nanovllm.kernels.sampling.rng import (
    WORD,
    gumbel_noise,
    gumbel_noise_reference,
    random_words,
    random_words_reference,
    row_key,
    row_key_reference,
)
from nanovllm.kernels.sampling.rows import Rows

MIN_TEMPERATURE = 1e-5
"""Temperature below which a row is greedy: the reciprocal would overflow the scores."""
NO_CANDIDATE = torch.iinfo(torch.int64).min
"""Key of a rank that holds no id of the vocabulary: smaller than any other."""

_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_NO_CANDIDATE = tl.constexpr(NO_CANDIDATE)


class Draws(NamedTuple):
    """Parameters by which a token of each row is drawn."""

    row_slot: torch.Tensor
    """int32 [B]: the row's line of temperature and seed; -1: no row."""
    temperature: torch.Tensor
    """float32 [S]. 0: the largest logit."""
    seed: torch.Tensor
    """int64 [S]."""
    positions: torch.Tensor
    """int32 [B]: index in its sequence of the token that is drawn."""


@triton.jit
def pack_keys(scores, ids):
    """See pack_keys_reference; float32 scores (no NaN), int32 ids."""
    ordered = to_ordered(tl.where(scores == 0.0, 0.0, scores))
    return (ordered.to(tl.int64) << 32) | (~ids).to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _better(best, best_tile, scores, tile):
    """The best scores of lanes and the numbers of their tiles, among those before and those of one more tile."""
    is_better = scores > best
    return tl.where(is_better, scores, best), tl.where(is_better, tile, best_tile)


@triton.jit
def _token_ids(ids, live, OFFSETS):
    """Ids of the whole vocabulary for those of a part of it, of which only `live` ones are there."""
    if OFFSETS is None:
        return ids
    else:
        return ids + tl.load(OFFSETS + ids, mask=live, other=1 << 30).to(tl.int32)


@triton.jit
def _best_draw(row, lanes, num_ids, flags, penalties, counts_row, input_id, masks_row, threshold, k0, k1,
               inverse_temperature, vocab_start, OFFSETS, LIMITED: tl.constexpr, TILES: tl.constexpr,
               APPROX: tl.constexpr):  # fmt: skip
    """Best scores, with noise, of lanes [TILE] over the tiles of a chunk, and the numbers of their tiles; of ids at
    `threshold` or above, where LIMITED."""
    best = tl.full(lanes.shape, float("-inf"), tl.float32)
    best_tile = tl.zeros(lanes.shape, tl.int32)
    for tile in range(TILES):
        index = lanes + tile * lanes.shape[0]
        x = load_edited(row, index, num_ids, flags, penalties, counts_row, input_id, masks_row)
        any_kept = True
        if LIMITED or masks_row is not None:
            is_kept = (x >= threshold) & (x > float("-inf"))
            any_kept = tl.max(is_kept.to(tl.int32), 0) > 0
        if any_kept:
            token_ids = _token_ids(vocab_start + index, index < num_ids, OFFSETS)
            noise = gumbel_noise(random_words(k0, k1, token_ids), APPROX)
            scores = tl.fma(x, inverse_temperature, noise)
            if LIMITED:
                scores = tl.where(is_kept, scores, float("-inf"))
            best, best_tile = _better(best, best_tile, scores, tile)
    return best, best_tile


@triton.jit(do_not_specialize_on_alignment=["SLOT", "ROW", "TARGET_ROW", "RECORDS"])
def best_of_chunks_kernel(
    LOGITS, SLOT, TEMPERATURE, SEED, POSITIONS, PARTIAL, ROW, TARGET_ROW, RECORDS, THRESHOLD, COUNTS, INPUT_IDS, MASKS,
    OFFSETS, row_stride, counts_stride, mask_stride, vocab_start, num_ids, num_chunks,
    TILE: tl.constexpr, TILES: tl.constexpr, APPROX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Key of the best of the TILE * TILES ids of chunk `program_id(0)` of row `program_id(1)`, into PARTIAL int64 [B,
    num_chunks]. LOGITS [any, row_stride]; SLOT int32 [B], TEMPERATURE float32 [S], SEED int64 [S], POSITIONS int32: see
    Draws.

    Lanes keep their own best over the tiles, as a score and a tile number; keys are made once, at the end. A score is
    the same bits whatever the tiling, and a maximum has no order, so neither has the result. Comparisons with NaN are
    false, so it never is the best.

    What comes after PARTIAL may be None. ROW and TARGET_ROW: the row's line of LOGITS, and of POSITIONS. Of ids below
    THRESHOLD none is taken, and a tile of such costs no noise; a row whose threshold is inf has its token. COUNTS, with
    INPUT_IDS, and MASKS change the logits of rows whose RECORDS say so (edit_logits). OFFSETS: see gumbel_argmax.
    """
    start_early(PDL)
    chunk = tl.program_id(0)
    g = tl.program_id(1)
    slot = tl.load(SLOT + g)
    threshold = float("-inf")
    is_open = slot >= 0
    if THRESHOLD is not None:
        threshold = tl.load(THRESHOLD + g)
        is_open = threshold < float("inf")
    if is_open:
        lanes = chunk * (TILE * TILES) + tl.arange(0, TILE)
        row = LOGITS + (g if ROW is None else tl.load(ROW + g)).to(tl.int64) * row_stride
        temperature = tl.load(TEMPERATURE + slot)
        flags, penalties = 0, (0.0, 0.0, 1.0, 1.0)
        if RECORDS is not None:
            flags, penalties = tl.load(RECORDS + g * RECORD), load_penalties(RECORDS + g * RECORD)
        counts_row = None if COUNTS is None else COUNTS + slot.to(tl.int64) * counts_stride
        input_id = None if COUNTS is None else INPUT_IDS + tl.load(TARGET_ROW + g)
        masks_row = None if MASKS is None else MASKS + mask_line(slot, RECORDS + g * RECORD) * mask_stride
        if temperature >= _MIN_TEMPERATURE:
            inverse_temperature = 1.0 / temperature
            position = POSITIONS + (g if TARGET_ROW is None else tl.load(TARGET_ROW + g))
            k0, k1 = row_key(tl.load(SEED + slot), tl.load(position))
            best, best_tile = _best_draw(
                row, lanes, num_ids, flags, penalties, counts_row, input_id, masks_row, threshold, k0, k1,
                inverse_temperature, vocab_start, OFFSETS, THRESHOLD is not None, TILES, APPROX,
            )  # fmt: skip
        else:
            best = tl.full([TILE], float("-inf"), tl.float32)
            best_tile = tl.zeros([TILE], tl.int32)
            for tile in range(TILES):
                index = lanes + tile * TILE
                x = load_edited(row, index, num_ids, flags, penalties, counts_row, input_id, masks_row)
                best, best_tile = _better(best, best_tile, x, tile)
        index = lanes + best_tile * TILE
        keys = pack_keys(best, _token_ids(vocab_start + index, index < num_ids, OFFSETS))
        tl.store(PARTIAL + g * num_chunks + chunk, tl.max(keys, 0))


@triton.jit(do_not_specialize_on_alignment=["SLOT", "TARGET_ROW"])
def reduce_chunks_kernel(
    PARTIAL, SLOT, KEYS, LAST_TOKEN, TOKENS, TARGET_ROW, THRESHOLD, num_chunks, CHUNKS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Best of PARTIAL int64 [B, num_chunks] in row `program_id(0)`, into KEYS int64 [B], or its token, into TOKENS and
    LAST_TOKEN. What is not wanted may be None; the rest: see best_of_chunks_kernel."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(SLOT + row)
    is_open = True
    if THRESHOLD is not None:
        is_open = tl.load(THRESHOLD + row) < float("inf")
    if is_open:
        chunks = tl.arange(0, CHUNKS_PADDED)
        mask = (chunks < num_chunks) & (slot >= 0)
        key = tl.max(tl.load(PARTIAL + row * num_chunks + chunks, mask=mask, other=_NO_CANDIDATE), 0)
        key = tl.where(slot >= 0, key, 0)
        if KEYS is not None:
            tl.store(KEYS + row, key)
        if TOKENS is not None:
            token = (~key).to(tl.int32)
            tl.store(TOKENS + (row if TARGET_ROW is None else tl.load(TARGET_ROW + row)), token)
            if slot >= 0:
                tl.store(LAST_TOKEN + slot, token)


def best_of_chunks(
    logits: torch.Tensor, draws: Draws, num_valid: int, vocab_start: int = 0, rows: Rows | None = None,
    thresholds: torch.Tensor | None = None, counts: torch.Tensor | None = None, masks: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Keys int64 [B, chunks] of the first num_valid ids of logits; nothing is written for rows of slot -1. rows:
    options of the rows that are drawn again; the rest: see best_of_chunks_kernel."""
    num_rows = len(draws.row_slot)
    if rows is None:  # few rows need many programs, many rows long ones
        tile, tiles, num_warps = 1024, 1 if num_rows <= 4 else 4 if num_rows <= 64 else 8, 4
    else:  # a single warp waits for no other
        tile, tiles, num_warps = 256, 16 if num_rows > 32 else 4, 1
    if offsets is not None:  # a lane with one id: of equal scores it may not be the first whose id is lowest
        tiles = 1
    tiles = min(tiles, triton.next_power_of_2(triton.cdiv(num_valid, tile)))
    num_chunks = triton.cdiv(num_valid, tile * tiles)
    partial = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    chosen = (None, None, None) if rows is None else (rows.rows, rows.target_rows, rows.records)
    input_ids = None if rows is None or counts is None else rows.input_ids
    strides = (logits.stride(0), *(0 if table is None else table.stride(0) for table in (counts, masks)))
    best_of_chunks_kernel[(num_chunks, num_rows)](
        logits, *draws, partial, *chosen, thresholds, counts, input_ids, masks, offsets, *strides, vocab_start,
        num_valid, num_chunks, TILE=tile, TILES=tiles, APPROX=logits.is_cuda, num_warps=num_warps,
        **pdl_options(logits.device, rows is None),
    )  # fmt: skip
    return partial


def reduce_chunks(
    partial: torch.Tensor, row_slot: torch.Tensor, keys: torch.Tensor | None = None,
    last_token: torch.Tensor | None = None, tokens: torch.Tensor | None = None, rows: Rows | None = None,
    thresholds: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The best of partial int64 [B, chunks]: see reduce_chunks_kernel. rows: as above."""
    num_rows, num_chunks = partial.shape
    padded = triton.next_power_of_2(num_chunks)
    target_rows = None if rows is None else rows.target_rows
    reduce_chunks_kernel[(num_rows,)](
        partial, row_slot, keys, last_token, tokens, target_rows, thresholds, num_chunks, CHUNKS_PADDED=padded,
        num_warps=4 if padded > 128 and rows is None else 1, **pdl_options(partial.device, rows is None),
    )  # fmt: skip


def gumbel_argmax(
    logits: torch.Tensor, draws: Draws, vocab_start: int, vocab_size: int, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """Key of the best token of each row among this rank's ids, int64 [B]; 0 for rows of slot -1.

    logits [B, Vs] bfloat16 or float32, for the ids from vocab_start on; ids from vocab_size on are padding and never
    win (NO_CANDIDATE where there is nothing else). NaN counts as -inf. Rows of logits may be strided.

    offsets int64 [vocab_size]: of the ids of a model that drafts to those of its target, by which noise and keys are: a
    draft is then what the target draws itself where the two agree (Daliri, Musco, Suresh, arXiv 2408.07978).
    """
    num_rows = logits.shape[0]
    num_valid = max(0, min(logits.shape[1], vocab_size - vocab_start))
    if num_rows == 0 or num_valid == 0:
        return torch.full((num_rows,), NO_CANDIDATE, dtype=torch.int64, device=logits.device)
    keys = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    reduce_chunks(best_of_chunks(logits, draws, num_valid, vocab_start, offsets=offsets), draws.row_slot, keys)
    return keys


def commit_tokens(
    keys: torch.Tensor, row_slot: torch.Tensor, last_token: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Unpacks the winners' keys int64 [B], writes them to last_token int32 [S] at row_slot int32 [B] and returns them,
    int32 [B], in `out` where that is given; -1 for rows of slot -1."""
    tokens = torch.empty(len(keys), dtype=torch.int32, device=keys.device) if out is None else out
    if len(keys):
        reduce_chunks(keys.view(-1, 1), row_slot, None, last_token, tokens)
    return tokens


def sample_tokens(
    logits: torch.Tensor, draws: Draws, vocab_size: int, last_token: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """gumbel_argmax over the whole vocabulary, logits [B, >= vocab_size] whose rows may be strided, and commit_tokens
    into last_token int32 [S], for a single rank -> tokens int32 [B], in `out` where that is given."""
    num_rows = logits.shape[0]
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device) if out is None else out
    if num_rows:
        partial = best_of_chunks(logits, draws, min(logits.shape[1], vocab_size))
        reduce_chunks(partial, draws.row_slot, None, last_token, tokens)
    return tokens


def gumbel_argmax_reference(
    logits: torch.Tensor, draws: Draws, vocab_start: int, vocab_size: int, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """Plain twin of `gumbel_argmax`."""
    row_slot, temperature, seed, positions = draws
    num_rows, num_ids = logits.shape
    num_valid = max(0, min(num_ids, vocab_size - vocab_start))
    if num_rows == 0 or num_valid == 0:
        return torch.full((num_rows,), NO_CANDIDATE, dtype=torch.int64, device=logits.device)
    slots = row_slot.clamp(min=0).long()
    row_temperature = temperature[slots].unsqueeze(1)
    ids = torch.arange(vocab_start, vocab_start + num_valid, device=logits.device)
    ids = ids if offsets is None else ids + offsets[ids]
    scores = logits[:, :num_valid].float()
    random = ((row_temperature >= MIN_TEMPERATURE).squeeze(1) & (row_slot >= 0)).nonzero().squeeze(1)
    if random.numel():
        k0, k1 = row_key_reference(seed[slots[random]], positions[random])
        noise = gumbel_noise_reference(random_words_reference(k0.unsqueeze(1), k1.unsqueeze(1), ids))
        scores = scores.index_copy(0, random, scores[random] * (1.0 / row_temperature[random]) + noise)
    scores = scores.masked_fill(scores.isnan(), -torch.inf) + 0.0  # -0.0 + 0.0 is 0.0: both zeros are one score
    best = pack_keys_reference(scores, ids).max(dim=1).values
    return best.masked_fill(row_slot < 0, 0)


def pack_keys_reference(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """float32 scores [...] (no NaN) and integer ids [...], which broadcast to one shape -> int64 keys of that shape."""
    bits = scores.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.long() << 32) | (WORD - ids.long())


def keys_to_tokens(keys: torch.Tensor) -> torch.Tensor:
    """Token ids, int32 [B], of int64 keys [B]; -1 of key 0."""
    return (~keys).to(torch.int32)


def commit_tokens_reference(
    keys: torch.Tensor, row_slot: torch.Tensor, last_token: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Plain twin of `commit_tokens`."""
    tokens = torch.where(row_slot < 0, -1, keys_to_tokens(keys))
    rows = (row_slot >= 0).nonzero().squeeze(1)
    last_token[row_slot[rows].long()] = tokens[rows]
    return tokens if out is None else out.copy_(tokens)


def sample_tokens_reference(
    logits: torch.Tensor, draws: Draws, vocab_size: int, last_token: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Plain twin of `sample_tokens`."""
    keys = gumbel_argmax_reference(logits, draws, 0, vocab_size)
    return commit_tokens_reference(keys, draws.row_slot, last_token, out)
