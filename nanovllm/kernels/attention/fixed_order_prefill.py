"""The prefill kernel whose queries get the bits that the decode kernel would give them; see fixed_order.py."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.fixed_order import attend, empty, ends_chunk, fold, tile_keys
from nanovllm.kernels.attention.prefill import PrefillAttention, PrefillConfig
from nanovllm.kernels.attention.query_tiles import causal_mask, key_ranges, load_queries, load_tile
from nanovllm.kernels.attention.scores import exp_of_sink, padded_dims


@triton.jit
def _walk(q, state, row_state, begin, stop, K, V, TABLE_ROW, kv_head, first, end, position, scale_log2, window,
          k_strides, v_strides, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
          CAP: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr):
    """The tiles from key `begin` to `stop`, for queries at `position`; state and row_state: see `empty`. Keys first ..
    end are all that any of the queries sees."""
    m, sums, acc = state
    top, total, out = row_state
    for n in range(begin, stop, BLOCK_N):
        k = load_tile(K, TABLE_ROW, kv_head, n, first, end, k_strides, D, PAGE, BLOCK_N, TMA)
        v = load_tile(V, TABLE_ROW, kv_head, n, first, end, v_strides, D, PAGE, BLOCK_N, TMA)
        visible = None
        if MASKED:
            visible = causal_mask(n, position, window, BLOCK_N, WINDOWED)
        m, sums, acc = attend(q, k, v, m, sums, acc, visible, scale_log2, CAP)
        if ends_chunk(n + BLOCK_N):
            top, total, out = fold(m, sums, acc, top, total, out)
            m, sums, acc = empty(acc.shape[0], acc.shape[1])
    return (m, sums, acc), (top, total, out)


@triton.jit(do_not_specialize=["ROW_SLOT", "CU_SEQLENS", "CONTEXT_LENS", "table_stride", "window"])
def fixed_order_prefill_kernel(Q, K, V, KV_SCALES, SINKS, OUT, TABLE, ROW_SLOT, CU_SEQLENS, CONTEXT_LENS, TILES,
                               scale_log2, window, q_strides, k_strides, v_strides, table_stride, out_strides,
                               HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
                               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAP: tl.constexpr, WINDOWED: tl.constexpr,
                               TMA: tl.constexpr):
    """Operands and grid are those of prefill.py's kernel, without KV_SCALES."""
    tl.static_assert(KV_SCALES is None)
    DIMS: tl.constexpr = padded_dims(D)
    tile = tl.program_id(0) // HQ
    head = tl.program_id(0) % HQ
    row = tl.load(TILES + tile * 2)
    if row < 0:
        return
    query = tl.load(TILES + tile * 2 + 1)
    TABLE_ROW = TABLE + tl.load(ROW_SLOT + row).to(tl.int64) * table_stride
    q, live, tokens, position, first_position, context = load_queries(Q, CU_SEQLENS, CONTEXT_LENS, row, query, head,
                                                                      q_strides, D, BLOCK_M)
    kv_head = head // G
    first, begin, begin_full, end_full, end = key_ranges(first_position, context, window, BLOCK_M, BLOCK_N, WINDOWED)
    state, row_state = empty(BLOCK_M, DIMS), empty(BLOCK_M, DIMS)
    if WINDOWED:
        state, row_state = _walk(
            q, state, row_state, begin, tl.minimum(begin_full, end), K, V, TABLE_ROW, kv_head, first, end, position,
            scale_log2, window, k_strides, v_strides, D, PAGE, BLOCK_N, TMA, CAP, WINDOWED, True)
    state, row_state = _walk(
        q, state, row_state, begin_full, end_full, K, V, TABLE_ROW, kv_head, first, end, position, scale_log2, window,
        k_strides, v_strides, D, PAGE, BLOCK_N, TMA, CAP, WINDOWED, False)
    state, row_state = _walk(
        q, state, row_state, tl.maximum(begin_full, end_full), end, K, V, TABLE_ROW, kv_head, first, end, position,
        scale_log2, window, k_strides, v_strides, D, PAGE, BLOCK_N, TMA, CAP, WINDOWED, True)
    top, sums, acc = fold(state[0], state[1], state[2], row_state[0], row_state[1], row_state[2])
    total = tl.max(sums, 1)
    if SINKS is not None:
        total += exp_of_sink(SINKS, head, True, top)
    dims = tl.arange(0, DIMS)
    out = OUT + tokens[:, None] * out_strides[0] + head * out_strides[1] + dims[None, :]
    tl.store(out, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=live)


def fixed_order_config(head_dim: int, dtype: torch.dtype, fp8: bool = False) -> PrefillConfig:
    """Two accumulators leave room for tiles of 64 queries, by 4 warps where nothing else is in registers."""
    assert not fp8
    wide = head_dim > 128 or head_dim != padded_dims(head_dim) or dtype.itemsize > 2
    return PrefillConfig(block_m=64, block_n=tile_keys(head_dim, dtype.itemsize), num_warps=8 if wide else 4)


class FixedOrderPrefill(PrefillAttention):
    """PrefillAttention by the kernel above."""

    _kernel = fixed_order_prefill_kernel
    _fuses = False
