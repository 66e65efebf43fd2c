"""min_p, top_k and top_p without sorting: each row's three filters come to one threshold, kept where logit >=
threshold.

All three keep the likeliest tokens, so together they keep those from some logit upwards; equal logits share their fate.
With m the largest logit, p(x) = exp((x - m) / temperature), and each filter acting on what the one before has left:

    min_p   keeps p(x) >= min_p
    top_k   keeps the k-th largest x and what equals or exceeds it
    top_p   keeps the largest threshold above which (itself included) lies top_p of the mass that is left

The last two are searches for the largest t with F(t) >= target, F(t) the count or mass of x >= t. F is evaluated at
several t in one pass over the row. Floats of one sign have the order of their bits, so t is an integer and the
bracket around it at most as wide as the bits of the logits (16 in bfloat16); a sample of the row gives the first
points, close to the end. One program works on a row and adds in a fixed order: the threshold's bits depend on the
row alone, not on its neighbours.
"""

import torch

from nanovllm.kernels.penalties import PENALTIES, RECORD_WORDS
from nanovllm.kernels.rng import gumbel_noise, random_words, row_key
from nanovllm.kernels.sampling import MIN_TEMPERATURE, _pack_keys, _tiling, gumbel_argmax_reference, keys_to_tokens
from nanovllm.kernels.triton_import import tl, triton

_RECORD = tl.constexpr(RECORD_WORDS)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_PENALTIES = tl.constexpr(PENALTIES)
_PIECES = tl.constexpr(16)  # of a sample

KEY_SHIFT = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low bits of a float32 that values of this type never use."""


@triton.jit
def _order(x):
    """float32 -> int32 of the same order (-0.0 just below 0.0)."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unorder(key, SHIFT: tl.constexpr):
    """The float32 t such that x >= t just where (_order(x) >> SHIFT) >= key."""
    bits = (key << SHIFT).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _load(row, index, num_ids):
    x = tl.load(row + index, mask=index < num_ids, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))  # NaN


@triton.jit
def _weights(x, peak, inverse_temperature, COUNT: tl.constexpr):
    if COUNT:
        w = tl.where(x > float("-inf"), 1.0, 0.0)
    else:
        w = tl.exp((x - peak) * inverse_temperature)
    return w


@triton.jit
def _sum_above(x, w, t):
    return tl.sum(tl.where(x >= t, w, 0.0), 1)


@triton.jit
def _sums(row, t0, t1, t2, t3, peak, inverse_temperature, num_ids, COUNT: tl.constexpr, LANES: tl.constexpr,
          WIDTH: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """F at four thresholds, in one pass over the row."""
    lane, column = tl.arange(0, LANES), tl.arange(0, WIDTH)
    index = lane[:, None] * WIDTH + column[None, :]
    s0 = tl.zeros([LANES], tl.float32)
    s1, s2, s3 = s0, s0, s0
    for tile in range(TILES):
        x = _load(row, index + tile * (LANES * WIDTH), num_ids)
        w = _weights(x, peak, inverse_temperature, COUNT)
        s0 += _sum_above(x, w, t0)
        s1 += _sum_above(x, w, t1)
        s2 += _sum_above(x, w, t2)
        s3 += _sum_above(x, w, t3)
    return tl.sum(s0, 0), tl.sum(s1, 0), tl.sum(s2, 0), tl.sum(s3, 0)


@triton.jit
def _guess(x, w, low, high, target, SHIFT: tl.constexpr):
    """The largest key in [low, high) with F >= target over a sample's x and w."""
    while high - low > 1:
        middle = low + (high - low) // 2
        above = tl.sum(tl.sum(tl.where(x >= _unorder(middle, SHIFT), w, 0.0), 1), 0)
        enough = above >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _search(row, low, high, target, share, peak, inverse_temperature, num_ids, COUNT: tl.constexpr,
            SHIFT: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The largest key in [low, high) with F >= target, or low where there is none; F(high) is 0.

    COUNT: target is a number of tokens; else it is -1 and stands for `share` of F(low), which the first pass finds out.
    Keys are int64: between the bits of two float32 can lie more than an int32 holds.
    """
    if high - low > 1:
        # Where would it be in a sample of LANES * WIDTH tokens, in pieces from all over the row?
        lane, column = tl.arange(0, LANES), tl.arange(0, WIDTH)
        of_piece: tl.constexpr = LANES // _PIECES
        piece = (num_ids // _PIECES) * (lane // of_piece) + (lane % of_piece) * WIDTH
        x = _load(row, piece[:, None] + column[None, :], num_ids)
        w = tl.where(x >= _unorder(low, SHIFT), _weights(x, peak, inverse_temperature, COUNT), 0.0)
        if COUNT:
            expected = target * (LANES * WIDTH) / num_ids
            slack = 3.0 * tl.sqrt(expected) + 2.0
            first, second = expected + slack, tl.maximum(expected - slack, 1.0)
        else:
            mass = tl.sum(tl.sum(w, 1), 0)
            first, second = mass * tl.minimum(share + 0.02, 1.0), mass * (share - 0.02)
        key1 = tl.minimum(tl.maximum(_guess(x, w, low, high, first, SHIFT), low), high - 1)
        key3 = tl.minimum(tl.maximum(_guess(x, w, low, high, second, SHIFT) + 1, key1), high - 1)
        key2 = key1 + (key3 - key1) // 2
        searching = True
        while searching:
            f0, f1, f2, f3 = _sums(
                row, _unorder(low, SHIFT), _unorder(key1, SHIFT), _unorder(key2, SHIFT), _unorder(key3, SHIFT),
                peak, inverse_temperature, num_ids, COUNT, LANES, WIDTH, TILES,
            )  # fmt: skip
            if not COUNT:
                target = tl.where(target < 0.0, share * f0, target)
            high = tl.where(f1 < target, key1, tl.where(f2 < target, key2, tl.where(f3 < target, key3, high)))
            low = tl.where(f3 >= target, key3, tl.where(f2 >= target, key2, tl.where(f1 >= target, key1, low)))
            quarter = (high - low) // 4
            rest = (high - low) % 4
            key1 = low + tl.maximum(quarter, 1)
            key2 = tl.minimum(low + tl.maximum(2 * quarter + rest // 2, 2), high - 1)
            key3 = tl.minimum(low + tl.maximum(3 * quarter + rest - rest // 2, 3), high - 1)
            searching = high - low > 1
    return low


@triton.jit
def _thresholds_kernel(LOGITS, ROW, SLOT, RECORDS, TEMPERATURE, THRESHOLD, row_stride, num_ids, SHIFT: tl.constexpr,
                       LANES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """The threshold of row program_id(0)."""
    g = tl.program_id(0)
    record = RECORDS + g * _RECORD
    top_k = tl.load(record + 1)
    top_p = tl.load(record + 2).to(tl.float32, bitcast=True)
    log_min_p = tl.load(record + 3).to(tl.float32, bitcast=True)
    temperature = tl.load(TEMPERATURE + tl.load(SLOT + g))
    threshold = float("-inf")
    limits_k = (top_k > 0) & (top_k < num_ids)
    if (temperature >= _MIN_TEMPERATURE) & (limits_k | (top_p < 1.0) | (log_min_p > float("-inf"))):
        row = LOGITS + tl.load(ROW + g).to(tl.int64) * row_stride
        inverse_temperature = 1.0 / temperature
        index = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        largest = tl.full([LANES], float("-inf"), tl.float32)
        for tile in range(TILES):
            largest = tl.maximum(largest, tl.max(_load(row, index + tile * (LANES * WIDTH), num_ids), 1))
        peak = tl.max(largest, 0)
        if (peak > float("-inf")) & (peak < float("inf")):
            lowest = tl.maximum(peak + log_min_p * temperature, -3.4e38)
            low = (_order(lowest) >> SHIFT).to(tl.int64)
            low += tl.where(_unorder(low, SHIFT) < lowest, 1, 0)
            high = (_order(peak) >> SHIFT).to(tl.int64) + 1
            low = tl.minimum(low, high - 1)
            if limits_k:
                low = _search(row, low, high, top_k.to(tl.float32), 1.0, peak, inverse_temperature, num_ids, True,
                              SHIFT, LANES, WIDTH, TILES)  # fmt: skip
            if top_p < 1.0:
                low = _search(row, low, high, top_p * 0.0 - 1.0, top_p, peak, inverse_temperature, num_ids, False,
                              SHIFT, LANES, WIDTH, TILES)  # fmt: skip
            threshold = _unorder(low, SHIFT)
    tl.store(THRESHOLD + g, threshold)


@triton.jit
def _best_survivors_kernel(LOGITS, ROW, SLOT, TEMPERATURE, SEED, POSITION, THRESHOLD, PARTIAL, row_stride, num_ids,
                           num_chunks, FILTERS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
                           APPROX: tl.constexpr):  # fmt: skip
    """As the sampler's own kernel, for rows picked from LOGITS and ids at or above the row's threshold: the same score
    bits for the same logit. A tile that nobody of survives costs no noise."""
    chunk, g = tl.program_id(0), tl.program_id(1)
    slot = tl.load(SLOT + g)
    row = LOGITS + tl.load(ROW + g).to(tl.int64) * row_stride
    lanes = chunk * (TILE * TILES) + tl.arange(0, TILE)
    temperature = tl.load(TEMPERATURE + slot)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_tile = tl.zeros([TILE], tl.int32)
    if temperature >= _MIN_TEMPERATURE:
        inverse_temperature = 1.0 / temperature
        k0, k1 = row_key(tl.load(SEED + slot), tl.load(POSITION + g))
        threshold = float("-inf")
        if FILTERS:
            threshold = tl.load(THRESHOLD + g)
        for tile in range(TILES):
            index = lanes + tile * TILE
            x = _load(row, index, num_ids)
            survives = (x >= threshold) & (x > float("-inf"))
            if tl.max(survives.to(tl.int32), 0) > 0:
                noise = gumbel_noise(random_words(k0, k1, index), APPROX)
                scores = tl.where(survives, tl.fma(x, inverse_temperature, noise), float("-inf"))
                better = scores > best
                best = tl.where(better, scores, best)
                best_tile = tl.where(better, tile, best_tile)
    else:
        for tile in range(TILES):
            x = _load(row, lanes + tile * TILE, num_ids)
            better = x > best
            best = tl.where(better, x, best)
            best_tile = tl.where(better, tile, best_tile)
    tl.store(PARTIAL + g * num_chunks + chunk, tl.max(_pack_keys(best, lanes + best_tile * TILE), 0))


@triton.jit
def _commit_kernel(PARTIAL, TARGET_ROW, SLOT, RECORDS, TOKENS, LAST_TOKEN, COUNTS, counts_stride, num_chunks,
                   COUNTED: tl.constexpr, CHUNKS_PADDED: tl.constexpr):  # fmt: skip
    g = tl.program_id(0)
    chunks = tl.arange(0, CHUNKS_PADDED)
    keys = tl.load(PARTIAL + g * num_chunks + chunks, mask=chunks < num_chunks, other=-0x8000000000000000)
    token = (~tl.max(keys, 0)).to(tl.int32)
    slot = tl.load(SLOT + g)
    tl.store(TOKENS + tl.load(TARGET_ROW + g), token)
    tl.store(LAST_TOKEN + slot, token)
    if COUNTED:  # noqa: SIM102  (one is known when compiling)
        if tl.load(RECORDS + g * _RECORD) & _PENALTIES:
            place = COUNTS + slot.to(tl.int64) * counts_stride + token
            tl.store(place, tl.load(place) + 2)


def _row_tiles(num_ids: int) -> dict[str, int]:
    """At most 64 registers a thread, so that two programs share a multiprocessor and hide each other's loads."""
    lanes = min(1024, max(32, triton.next_power_of_2(triton.cdiv(num_ids, 8))))
    warps = 16 if lanes == 1024 else 4
    return {"LANES": lanes, "WIDTH": 8, "TILES": triton.cdiv(num_ids, lanes * 8), "num_warps": warps, "maxnreg": 64}


def find_thresholds(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    records: torch.Tensor,
    temperature: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Triton version of find_thresholds_reference: passes over memory, one program for each row."""
    thresholds = torch.empty(rows.shape[0], dtype=torch.float32, device=logits.device)
    _thresholds_kernel[(rows.shape[0],)](
        logits, rows, slots, records, temperature, thresholds, logits.stride(0), vocab_size,
        SHIFT=KEY_SHIFT[logits.dtype], **_row_tiles(vocab_size),
    )  # fmt: skip
    return thresholds


def draw_survivors(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    records: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    positions: torch.Tensor,
    thresholds: torch.Tensor | None,
    target_rows: torch.Tensor,
    tokens: torch.Tensor,
    last_token: torch.Tensor,
    counts: torch.Tensor | None,
    vocab_size: int,
) -> None:
    """Triton version of draw_survivors_reference."""
    num_rows = rows.shape[0]
    tile, tiles, num_warps = _tiling(num_rows, vocab_size)
    num_chunks = triton.cdiv(vocab_size, tile * tiles)
    partial = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=logits.device)
    _best_survivors_kernel[(num_chunks, num_rows)](
        logits, rows, slots, temperature, seed, positions, temperature if thresholds is None else thresholds, partial,
        logits.stride(0), vocab_size, num_chunks, FILTERS=thresholds is not None, TILE=tile, TILES=tiles,
        APPROX=logits.is_cuda, num_warps=num_warps,
    )  # fmt: skip
    _commit_kernel[(num_rows,)](
        partial, target_rows, slots, records, tokens, last_token, tokens if counts is None else counts,
        0 if counts is None else counts.stride(0), num_chunks, COUNTED=counts is not None,
        CHUNKS_PADDED=triton.next_power_of_2(num_chunks), num_warps=1,
    )  # fmt: skip


def find_thresholds_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    records: torch.Tensor,
    temperature: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """float32 [G]: the least logit that row g's min_p, top_k and top_p let pass; -inf where none of them limits it.

    logits [any, >= vocab_size], row g of them at rows int32 [G]; slots int32 [G] into temperature float32 [S]; records
    int32 [G, RECORD_WORDS] (sampling/section.py). NaN counts as -inf. Sorts, and adds probabilities in float64.
    """
    x = logits[rows.long(), :vocab_size].float()
    x = x.masked_fill(x.isnan(), -torch.inf)
    record = records.contiguous()
    top_k, (top_p, log_min_p) = record[:, 1].long(), record[:, 2:4].contiguous().view(torch.float32).unbind(1)
    heat = temperature[slots.long()]
    limited = heat >= MIN_TEMPERATURE
    limited &= ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (log_min_p > -torch.inf)
    ordered = x.sort(dim=1, descending=True).values
    limited &= ordered[:, 0].isfinite()
    threshold = ordered[:, 0] + log_min_p * heat
    kth = ordered.gather(1, (top_k.clamp(1, vocab_size) - 1).unsqueeze(1)).squeeze(1)
    threshold = torch.where((top_k > 0) & (top_k < vocab_size), torch.maximum(threshold, kth), threshold)
    weights = ((ordered - ordered[:, :1]).double() / heat.clamp(min=MIN_TEMPERATURE).double().unsqueeze(1)).exp()
    mass = weights.masked_fill(ordered < threshold.unsqueeze(1), 0.0).cumsum(1)
    enough = mass >= top_p.double().unsqueeze(1) * mass[:, -1:]
    last = ordered.gather(1, enough.int().argmax(1, keepdim=True)).squeeze(1)
    threshold = torch.where(top_p < 1, torch.maximum(threshold, last), threshold)
    return torch.where(limited, threshold, -torch.inf)


def draw_survivors_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    records: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    positions: torch.Tensor,
    thresholds: torch.Tensor | None,
    target_rows: torch.Tensor,
    tokens: torch.Tensor,
    last_token: torch.Tensor,
    counts: torch.Tensor | None,
    vocab_size: int,
) -> None:
    """Draws for each general row among the ids whose logit is at least its threshold (None: all), and writes the
    token to tokens[target_rows[g]], to last_token[slots[g]] and, for rows with penalties, into counts [S, vocab_size].

    Arguments as of find_thresholds_reference; seed int64 [S], positions int32 [G], target_rows int32 [G]. The draw
    is that of gumbel_argmax (kernels/sampling.py): with nothing filtered, the same token. Where no id is left, id 0.
    """
    x = logits[rows.long(), :vocab_size].float()
    x = x.masked_fill(x.isnan(), -torch.inf)
    if thresholds is not None:
        random = temperature[slots.long()] >= MIN_TEMPERATURE
        x = x.masked_fill((x < thresholds.unsqueeze(1)) & random.unsqueeze(1), -torch.inf)
    drawn = keys_to_tokens(gumbel_argmax_reference(x, slots, temperature, seed, positions, 0, vocab_size))
    tokens[target_rows.long()] = drawn
    last_token[slots.long()] = drawn
    if counts is not None:
        counted = (records[:, 0] & PENALTIES).nonzero().squeeze(1)
        counts[slots[counted].long(), drawn[counted].long()] += 2
