"""Sampling of rows with sampling options: Gumbel-max as in gumbel.py, among the ids that are left, with logits as the
row's counts and mask change them on their way from memory."""

import torch

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.sampling.candidates import load_ids
from nanovllm.kernels.sampling.gumbel import MIN_TEMPERATURE, Draws, gumbel_argmax_reference, keys_to_tokens, pack_keys
from nanovllm.kernels.sampling.penalties import edit_logits_reference, is_allowed, load_penalties, penalise
from nanovllm.kernels.sampling.rng import gumbel_noise, random_words, row_key
from nanovllm.kernels.sampling.rows import Rows
from nanovllm.wire.sampling import MASK, PENALTIES, RECORD_WORDS

_RECORD = tl.constexpr(RECORD_WORDS)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_PENALTIES = tl.constexpr(PENALTIES)
_MASK = tl.constexpr(MASK)


@triton.jit
def _load_edited(row, index, num_ids, counts_row, masks_row, penalised, masked, presence, frequency, repetition,
                 inverse_repetition, COUNTED: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Logits of the ids `index`, float32, as counts and mask change them."""
    x = load_ids(row, index, num_ids)
    if COUNTED:  # noqa: SIM102  (one is known when compiling)
        if penalised:
            count = tl.load(counts_row + index, mask=index < num_ids, other=0)
            x = penalise(x, count, presence, frequency, repetition, inverse_repetition)
    if MASKED:  # noqa: SIM102
        if masked:
            x = tl.where(is_allowed(masks_row, index, index < num_ids), x, float("-inf"))
    return x


@triton.jit(do_not_specialize_on_alignment=["ROW", "SLOT", "RECORDS", "TARGET_ROW"])
def _best_kept_kernel(LOGITS, ROW, SLOT, RECORDS, TEMPERATURE, SEED, POSITIONS, TARGET_ROW, THRESHOLD, COUNTS,
                           MASKS, PARTIAL, row_stride, counts_stride, mask_stride, num_ids, num_chunks,
                           FILTERS: tl.constexpr, COUNTED: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
                           TILES: tl.constexpr, APPROX: tl.constexpr):  # fmt: skip
    """As the sampler's own kernel, for rows picked from LOGITS and ids at or above the row's threshold: the same score
    bits for the same logit. A tile without a kept id costs no noise. Threshold inf: the row has its token."""
    chunk, g = tl.program_id(0), tl.program_id(1)
    threshold = float("-inf")
    if FILTERS:
        threshold = tl.load(THRESHOLD + g)
    if threshold < float("inf"):
        slot, record = tl.load(SLOT + g), RECORDS + g * _RECORD
        row = LOGITS + tl.load(ROW + g).to(tl.int64) * row_stride
        flags = tl.load(record)
        penalised, masked = (flags & _PENALTIES) != 0, (flags & _MASK) != 0
        presence, frequency, repetition, inverse_repetition = load_penalties(record)
        counts_row = COUNTS + slot.to(tl.int64) * counts_stride
        masks_row = MASKS + slot.to(tl.int64) * mask_stride
        lanes = chunk * (TILE * TILES) + tl.arange(0, TILE)
        temperature = tl.load(TEMPERATURE + slot)
        best = tl.full([TILE], float("-inf"), tl.float32)
        best_tile = tl.zeros([TILE], tl.int32)
        if temperature >= _MIN_TEMPERATURE:
            inverse_temperature = 1.0 / temperature
            k0, k1 = row_key(tl.load(SEED + slot), tl.load(POSITIONS + tl.load(TARGET_ROW + g)))
            for tile in range(TILES):
                index = lanes + tile * TILE
                x = _load_edited(row, index, num_ids, counts_row, masks_row, penalised, masked, presence, frequency,
                                 repetition, inverse_repetition, COUNTED, MASKED)  # fmt: skip
                is_kept = (x >= threshold) & (x > float("-inf"))
                any_kept = True
                if FILTERS or MASKED:
                    any_kept = tl.max(is_kept.to(tl.int32), 0) > 0
                if any_kept:
                    noise = gumbel_noise(random_words(k0, k1, index), APPROX)
                    scores = tl.where(is_kept, tl.fma(x, inverse_temperature, noise), float("-inf"))
                    better = scores > best
                    best = tl.where(better, scores, best)
                    best_tile = tl.where(better, tile, best_tile)
        else:
            for tile in range(TILES):
                x = _load_edited(row, lanes + tile * TILE, num_ids, counts_row, masks_row, penalised, masked, presence,
                                 frequency, repetition, inverse_repetition, COUNTED, MASKED)  # fmt: skip
                better = x > best
                best = tl.where(better, x, best)
                best_tile = tl.where(better, tile, best_tile)
        tl.store(PARTIAL + g * num_chunks + chunk, tl.max(pack_keys(best, lanes + best_tile * TILE), 0))


@triton.jit(do_not_specialize_on_alignment=["TARGET_ROW", "SLOT", "RECORDS"])
def _commit_kernel(PARTIAL, TARGET_ROW, SLOT, RECORDS, THRESHOLD, TOKENS, LAST_TOKEN, COUNTS, counts_stride, num_chunks,
                   FILTERS: tl.constexpr, COUNTED: tl.constexpr, CHUNKS_PADDED: tl.constexpr):  # fmt: skip
    """Writes row program_id(0)'s token to the step's tokens, its slot and, with penalties, its counts."""
    g = tl.program_id(0)
    is_open = True
    if FILTERS:
        is_open = tl.load(THRESHOLD + g) < float("inf")
    if is_open:
        slot = tl.load(SLOT + g)
        chunks = tl.arange(0, CHUNKS_PADDED)
        keys = tl.load(PARTIAL + g * num_chunks + chunks, mask=chunks < num_chunks, other=-0x8000000000000000)
        token = (~tl.max(keys, 0)).to(tl.int32)
        tl.store(TOKENS + tl.load(TARGET_ROW + g), token)
        tl.store(LAST_TOKEN + slot, token)
        if COUNTED:  # noqa: SIM102  (one is known when compiling)
            if tl.load(RECORDS + g * _RECORD) & _PENALTIES:
                count = COUNTS + slot.to(tl.int64) * counts_stride + token
                tl.store(count, tl.load(count) + 2)


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
    filters = thresholds is not None
    counts_or_any, masks_or_any = (rows.tokens if table is None else table for table in (counts, masks))
    counts_stride, mask_stride = (0 if table is None else table.stride(0) for table in (counts, masks))
    _best_kept_kernel[(num_chunks, num_rows)](
        logits, rows.rows, rows.slots, rows.records, rows.temperature, rows.seed, rows.positions, rows.target_rows,
        thresholds if filters else rows.temperature, counts_or_any, masks_or_any, partial, logits.stride(0),
        counts_stride, mask_stride, vocab_size, num_chunks,
        FILTERS=filters, COUNTED=edits and counts is not None, MASKED=edits and masks is not None, TILE=tile,
        TILES=tiles, APPROX=logits.is_cuda, num_warps=1,
    )  # fmt: skip
    _commit_kernel[(num_rows,)](
        partial, rows.target_rows, rows.slots, rows.records, thresholds if filters else rows.temperature, rows.tokens,
        rows.last_token, counts_or_any, counts_stride, num_chunks, FILTERS=filters, COUNTED=counts is not None,
        CHUNKS_PADDED=triton.next_power_of_2(num_chunks), num_warps=1,
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
