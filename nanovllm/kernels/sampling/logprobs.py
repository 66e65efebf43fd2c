"""Log-probabilities: of one token of each row, its rank, and the likeliest tokens; of logits as they are, or after
temperature and among the ids that filters keep.

One pass over a row, by one program: lanes keep their own peak and their own sum of exponentials, and list the ids that
are likely among the best (kernels/sampling/candidates.py), from which the best are then taken one by one.
"""

from typing import NamedTuple

import torch

from nanovllm.kernels.base.float_order import from_ordered
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.sampling.candidates import (
    MAX_REGISTERS,
    STRETCH,
    append,
    as_ids,
    list_entries,
    load_ids,
    load_raw,
    new_lists,
    row_tiles,
    sample_floor,
    tile_index,
)
from nanovllm.kernels.sampling.gumbel import NO_CANDIDATE, pack_keys, pack_keys_reference

TOP_BUCKETS = (0, 1, 5, 20)
"""Numbers of likeliest tokens that are computed; others round up, so that few kernels are compiled."""
LIST_DEPTH = 8
"""Ids that a lane of a row's list holds: far more than the sample's floor lets through, ties aside."""
_NO_CANDIDATE = tl.constexpr(NO_CANDIDATE)


class Scored(NamedTuple):
    """N rows of logits, of each of which the log-probability of a token is wanted."""

    logits: torch.Tensor
    """[any, >= vocabulary]"""
    rows: torch.Tensor
    """int32 [N]: each row's line of `logits`."""
    tokens: torch.Tensor
    """int32 [any]"""
    token_rows: torch.Tensor
    """int32 [N]: index of each row's token."""
    scale: torch.Tensor | None = None
    """float32 [N]: factors on the logits; None: 1."""
    least: torch.Tensor | None = None
    """float32 [N], where there is a scale: the least logits that take part in the softmax."""

    def split(self, size: int, dim: int = 0) -> "list[Scored]":
        """Views of up to `size` rows each."""
        by_row = {name: x.split(size) for name in ("rows", "token_rows", "scale", "least")
                  if (x := getattr(self, name)) is not None}  # fmt: skip
        return [self._replace(**dict(zip(by_row, each, strict=True))) for each in zip(*by_row.values(), strict=True)]


@triton.jit
def _next_in_list(LIST, depth, deepest, last, LANES: tl.constexpr):
    """The largest key of a list below `last`."""
    best = tl.full([LANES], _NO_CANDIDATE, tl.int64)
    for begin in range(0, deepest, STRETCH):
        x, index, live = list_entries(LIST, depth, begin, LANES)
        keys = pack_keys(x, index)
        best = tl.maximum(best, tl.max(tl.where(live & (keys < last), keys, _NO_CANDIDATE), 0))
    return tl.max(best, 0)


@triton.jit
def _next_in_row(row, num_ids, last, least, LANES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):
    """The largest key of a row's logits, of those at `least` or above, below `last`."""
    index = tile_index(LANES, WIDTH)
    best = tl.full([LANES], _NO_CANDIDATE, tl.int64)
    for tile in range(TILES):
        at = index + tile * (LANES * WIDTH)
        x = load_ids(row, at, num_ids)
        keys = pack_keys(tl.where(x >= least, x, float("-inf")), at)
        best = tl.maximum(best, tl.max(tl.where((at < num_ids) & (keys < last), keys, _NO_CANDIDATE), 1))
    return tl.max(best, 0)


@triton.jit(do_not_specialize_on_alignment=["ROW", "TOKENS", "TOKEN_ROW", "SCALE", "LEAST"])
def _logprobs_kernel(LOGITS, ROW, TOKENS, TOKEN_ROW, SCALE, LEAST, LIST, OUT, row_stride, num_ids, K: tl.constexpr,
                     PROCESSED: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
                     DEPTH: tl.constexpr):  # fmt: skip
    """Line `program_id(0)` of token_logprobs: OUT int32 [N, 3 + 2 K], of LOGITS [any, row_stride] by ROW, TOKEN_ROW
    int32 [N], TOKENS int32 [any], SCALE and LEAST float32 [N]. LIST int64 [N, DEPTH, LANES]: room for the row's
    likeliest ids (candidates.py)."""
    n = tl.program_id(0)
    row = LOGITS + tl.load(ROW + n).to(tl.int64) * row_stride
    token = tl.load(TOKENS + tl.load(TOKEN_ROW + n))
    own = tl.load(row + token).to(tl.float32)
    LIST += n.to(tl.int64) * (DEPTH * LANES)
    scale, least, floor = 1.0, float("-inf"), float("-inf")
    if PROCESSED:
        scale, least = tl.load(SCALE + n), tl.load(LEAST + n)
        own = tl.where(own >= least, own, float("-inf"))
    if K > 0:
        floor = sample_floor(row, num_ids, tl.full([], K, tl.int32), LANES, WIDTH)
    peak = tl.full([LANES], float("-inf"), tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    above = tl.zeros([LANES], tl.int32)
    depth = tl.zeros([LANES], tl.int32)
    index = tile_index(LANES, WIDTH)
    coming = load_raw(row, index, num_ids)
    for tile in range(TILES):
        at = index + tile * (LANES * WIDTH)
        x = as_ids(coming)
        coming = load_raw(row, at + LANES * WIDTH, num_ids)
        if PROCESSED:
            x = tl.where(x >= least, x, float("-inf"))
        higher = tl.maximum(peak, tl.max(x, 1))
        base = tl.where(higher > float("-inf"), higher, 0.0)
        mass = mass * tl.exp((peak - base) * scale) + tl.sum(tl.exp((x - base[:, None]) * scale), 1)
        peak = higher
        above += tl.sum((x > own).to(tl.int32), 1)
        if K > 0:
            depth = append(LIST, x, at, (x >= floor) & (x > float("-inf")), depth, LANES, DEPTH)
    top = tl.max(peak, 0)
    total = top * scale + tl.log(tl.sum(mass * tl.exp((peak - top) * scale), 0))
    out = OUT + n * (3 + 2 * K)
    tl.store(out, token)
    tl.store(out + 1, tl.sum(above, 0) + 1)
    tl.store(out + 2 + K, (own * scale - total).to(tl.int32, bitcast=True))
    if K > 0:
        tl.debug_barrier()  # lanes read what others wrote
        deepest, count = tl.max(depth, 0), tl.sum(depth, 0)
        is_whole = (deepest <= DEPTH) & (count >= K)
        key = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
        for k in range(K):
            if is_whole:
                key = _next_in_list(LIST, depth, deepest, key, LANES)
            else:
                key = _next_in_row(row, num_ids, key, least, LANES, WIDTH, TILES)
            logprob = from_ordered((key >> 32).to(tl.int32)) * scale - total
            tl.store(out + 2 + k, (~key).to(tl.int32))
            tl.store(out + 3 + K + k, logprob.to(tl.int32, bitcast=True))


def top_bucket(k: int) -> int:
    """The least of TOP_BUCKETS that holds k."""
    return next(size for size in TOP_BUCKETS if size >= k)


def token_logprobs(scored: Scored, k: int, vocab_size: int) -> torch.Tensor:
    """int32 [N, 3 + 2 k] by row n: a token and its rank from 1 (one more than ids with a greater logit); the k
    likeliest ids, lower ids first among equals; the log-probabilities of the token and of these (float32 bits). The
    softmax is over all vocab_size ids, or those that `least` lets pass, in float32. k at most vocab_size. One pass."""
    logits, rows, tokens, token_rows, scale, least = scored
    num_rows = rows.shape[0]
    out = torch.empty(num_rows, 3 + 2 * k, dtype=torch.int32, device=logits.device)
    lists = new_lists(num_rows if k else 0, vocab_size, LIST_DEPTH, logits.device)
    _logprobs_kernel[(num_rows,)](
        logits, rows, tokens, token_rows, logits if scale is None else scale, logits if least is None else least, lists,
        out, logits.stride(0), vocab_size, K=k, PROCESSED=scale is not None, DEPTH=LIST_DEPTH,
        maxnreg=MAX_REGISTERS, **row_tiles(vocab_size),
    )  # fmt: skip
    return out


def token_logprobs_reference(scored: Scored, k: int, vocab_size: int) -> torch.Tensor:
    """Plain twin of `token_logprobs`: int32 [N, 3 + 2 k]."""
    logits, rows, tokens, token_rows, scale, least = scored
    x = logits[rows.long(), :vocab_size].float()
    x = x.masked_fill(x.isnan(), -torch.inf)
    if least is not None:
        x = x.masked_fill(x < least.unsqueeze(1), -torch.inf)
    logprobs = (x if scale is None else x * scale.unsqueeze(1)).log_softmax(1)
    own = tokens[token_rows.long()].long().unsqueeze(1)
    rank = (x > x.gather(1, own)).sum(1, keepdim=True).int() + 1
    keys = pack_keys_reference(x + 0.0, torch.arange(vocab_size, device=x.device))
    ids = (~keys.topk(min(k, vocab_size), dim=1).values).int()
    if ids.shape[1] < k:
        ids = torch.nn.functional.pad(ids, (0, k - ids.shape[1]))
    top = logprobs.gather(1, torch.cat([own, ids.long()], 1))
    return torch.cat([own.int(), rank, ids, top.contiguous().view(torch.int32)], 1)
