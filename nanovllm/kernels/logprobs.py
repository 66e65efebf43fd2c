"""Log-probabilities of the raw logits: of one token of each row, its rank, and the likeliest tokens."""

import torch

from nanovllm.kernels.sampling import _pack_keys, pack_keys_reference
from nanovllm.kernels.triton_import import tl, triton

TOP_BUCKETS = (0, 1, 5, 20)
"""Numbers of likeliest tokens that are computed; others round up, so that few kernels are compiled."""
_LEAST = tl.constexpr(-0x8000000000000000)


@triton.jit
def _chunks_kernel(LOGITS, ROW, TOKEN, PEAK, MASS, ABOVE, KEYS, row_stride, num_ids, num_chunks, K: tl.constexpr,
                   TILE: tl.constexpr):  # fmt: skip
    """Of one chunk of one row: largest logit, sum of exp(logit - largest), ids above the token's logit, best K keys."""
    chunk, n = tl.program_id(0), tl.program_id(1)
    index = chunk * TILE + tl.arange(0, TILE)
    row = LOGITS + tl.load(ROW + n).to(tl.int64) * row_stride
    x = tl.load(row + index, mask=index < num_ids, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    own = tl.load(row + tl.load(TOKEN + n)).to(tl.float32)
    peak = tl.max(x, 0)
    mass = tl.sum(tl.exp(x - tl.where(peak > float("-inf"), peak, 0.0)), 0)
    at = n * num_chunks + chunk
    tl.store(PEAK + at, peak)
    tl.store(MASS + at, mass)
    tl.store(ABOVE + at, tl.sum((x > own).to(tl.int32), 0))
    if K > 0:
        keys = _pack_keys(x, index)
        for k in range(K):
            best = tl.max(keys, 0)
            tl.store(KEYS + at * K + k, best)
            keys = tl.where(keys == best, _LEAST, keys)


@triton.jit
def _join_kernel(LOGITS, ROW, TOKEN, PEAK, MASS, ABOVE, KEYS, OUT, row_stride, num_chunks, K: tl.constexpr,
                 CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr):  # fmt: skip
    n = tl.program_id(0)
    chunks = tl.arange(0, CHUNKS)
    live = chunks < num_chunks
    peaks = tl.load(PEAK + n * num_chunks + chunks, mask=live, other=float("-inf"))
    masses = tl.load(MASS + n * num_chunks + chunks, mask=live, other=0.0)
    peak = tl.max(peaks, 0)
    total = peak + tl.log(tl.sum(tl.where(live, masses * tl.exp(peaks - peak), 0.0), 0))
    above = tl.sum(tl.load(ABOVE + n * num_chunks + chunks, mask=live, other=0), 0)
    own = tl.load(LOGITS + tl.load(ROW + n).to(tl.int64) * row_stride + tl.load(TOKEN + n)).to(tl.float32)
    out = OUT + n * (2 + 2 * K)
    tl.store(out, (own - total).to(tl.int32, bitcast=True))
    tl.store(out + 1, above + 1)
    if K > 0:
        candidates = tl.arange(0, CANDIDATES)
        keys = tl.load(KEYS + n * num_chunks * K + candidates, mask=candidates < num_chunks * K, other=_LEAST)
        for k in range(K):
            best = tl.max(keys, 0)
            keys = tl.where(keys == best, _LEAST, keys)
            bits = (best >> 32).to(tl.int32)
            bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
            logprob = bits.to(tl.float32, bitcast=True) - total
            tl.store(out + 2 + k, (~best).to(tl.int32))
            tl.store(out + 2 + K + k, logprob.to(tl.int32, bitcast=True))


def top_bucket(k: int) -> int:
    """The least of TOP_BUCKETS that holds k."""
    return next(size for size in TOP_BUCKETS if size >= k)


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, k: int, vocab_size: int
) -> torch.Tensor:
    """Triton version of token_logprobs_reference: one pass."""
    num_rows, tile = rows.shape[0], 4096
    num_chunks = triton.cdiv(vocab_size, tile)
    floats = torch.empty(2, num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    above = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    keys = torch.empty(num_rows, num_chunks, max(k, 1), dtype=torch.int64, device=logits.device)
    out = torch.empty(num_rows, 2 + 2 * k, dtype=torch.int32, device=logits.device)
    _chunks_kernel[(num_chunks, num_rows)](
        logits, rows, tokens, floats[0], floats[1], above, keys, logits.stride(0), vocab_size, num_chunks, K=k,
        TILE=tile, num_warps=8,
    )  # fmt: skip
    _join_kernel[(num_rows,)](
        logits, rows, tokens, floats[0], floats[1], above, keys, out, logits.stride(0), num_chunks, K=k,
        CHUNKS=triton.next_power_of_2(num_chunks), CANDIDATES=triton.next_power_of_2(num_chunks * max(k, 1)),
        num_warps=4,
    )  # fmt: skip
    return out


def token_logprobs_reference(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, k: int, vocab_size: int
) -> torch.Tensor:
    """int32 [N, 2 + 2 k] by row n: the log-probability of tokens[n] (float32 bits) and its rank from 1 (one more
    than ids with a greater logit); the k likeliest ids, lower ids first among equals; their log-probabilities
    (float32 bits).

    logits [any, >= vocab_size], row n of them at rows int32 [N]; tokens int32 [N]. The softmax is over all
    vocab_size ids, in float32. k at most vocab_size.
    """
    x = logits[rows.long(), :vocab_size].float()
    x = x.masked_fill(x.isnan(), -torch.inf)
    logprobs = x.log_softmax(1)
    own = tokens.long().unsqueeze(1)
    rank = (x > x.gather(1, own)).sum(1, keepdim=True).int() + 1
    keys = pack_keys_reference(x + 0.0, torch.arange(vocab_size, device=x.device))
    ids = (~keys.topk(min(k, vocab_size), dim=1).values).int()
    if ids.shape[1] < k:
        ids = torch.nn.functional.pad(ids, (0, k - ids.shape[1]))
    top = logprobs.gather(1, ids.long()) if k else logprobs[:, :0]
    return torch.cat([logprobs.gather(1, own).view(torch.int32), rank, ids, top.contiguous().view(torch.int32)], 1)
