"""Tiles of queries that prefill kernels load, and ranges of the keys that these see."""


from nanovllm.kernels.attention.scores import padded_dims
from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit
def load_queries(Q, CU_SEQLENS, CONTEXT_LENS, row, query, head, q_strides, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """A row's queries from number `query` on: q [BLOCK_M, D up to a power of two] of one head; which of its elements
    exist; their tokens int64 [BLOCK_M]; their positions in the row; the first one's, a scalar; and the row's keys."""
    token = tl.load(CU_SEQLENS + row)
    count = tl.load(CU_SEQLENS + row + 1) - token
    context = tl.load(CONTEXT_LENS + row)
    queries = query + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, padded_dims(D))
    tokens = (token + queries).to(tl.int64)
    live = (queries < count)[:, None] & (dims < D)[None, :]
    q = tl.load(Q + tokens[:, None] * q_strides[0] + head * q_strides[1] + dims[None, :], mask=live, other=0.0)
    return q, live, tokens, context - count + queries, context - count + query, context


@triton.jit
def key_ranges(position, context, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """Ranges of keys for queries from `position` on, of a row of `context` keys: first and end of the keys that any of
    them sees, and begin, begin_full, end_full, where tiles begin. Tiles from begin_full to end_full need no mask: even
    the first query comes after them, and the last one's window reaches that far back."""
    first, begin, begin_full = 0, 0, 0
    end = tl.minimum(context, position + BLOCK_M)
    end_full = (position + 1) // BLOCK_N * BLOCK_N
    if WINDOWED:
        first = tl.maximum(position - window + 1, 0)
        begin = first // BLOCK_N * BLOCK_N
        begin_full = tl.maximum(end - window + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
    return first, begin, begin_full, end_full, end


@triton.jit
def causal_mask(start, position, window, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr):
    """Mask of the keys start .. start + BLOCK_N that the query at `position` sees: bool [BLOCK_M, BLOCK_N]."""
    keys = start + tl.arange(0, BLOCK_N)
    visible = keys[None, :] <= position[:, None]
    if WINDOWED:
        visible = visible & (keys[None, :] > position[:, None] - window)
    return visible
