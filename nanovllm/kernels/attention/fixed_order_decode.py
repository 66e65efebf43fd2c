"""The decode kernel whose rows get the bits that the prefill kernel would give them; see fixed_order.py."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.decode import DecodeAttention
from nanovllm.kernels.attention.decode_plan import DecodeConfig
from nanovllm.kernels.attention.fixed_order import NOTHING, attend, empty, ends_chunk, fold, tile_keys
from nanovllm.kernels.attention.scores import exp_of_sink, padded_dims
from nanovllm.kernels.attention.work_list import first_tile, load_tile, next_tile, prefetch_in_page, visible_keys

_NOTHING = tl.constexpr(NOTHING)


@triton.jit
def _finish_row(top, total, acc, SINKS, OUT_ROW, heads, there, out_stride, D: tl.constexpr):
    """Stores the row of `heads` where `there`: top, total [heads], acc [heads, D up to a power of two]."""
    dims = tl.arange(0, padded_dims(D))[None, :]
    if SINKS is not None:
        total += exp_of_sink(SINKS, heads, there, top)
    tl.store(OUT_ROW + heads[:, None] * out_stride + dims, (acc / total[:, None]).to(OUT_ROW.dtype.element_ty),
             mask=there[:, None] & (dims < D))


@triton.jit
def fixed_order_merge_kernel(PARTIAL, LSE, SINKS, OUT, NUM_CHUNKS, out_strides, HQ: tl.constexpr,
                             HEADS: tl.constexpr, D: tl.constexpr, MAX_SPLITS: tl.constexpr, PDL: tl.constexpr):
    """Adds up the units of rows that have several, in order. A program takes HEADS query heads of a row."""
    AT_ONCE: tl.constexpr = 4
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    units = tl.load(NUM_CHUNKS + row)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if units > 1:
        heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        dims = tl.arange(0, padded_dims(D))[None, :]
        first = (row * HQ + heads) * MAX_SPLITS
        top = tl.full([HEADS], _NOTHING, tl.float32)
        total = tl.zeros([HEADS, 1], tl.float32)
        acc = tl.zeros([HEADS, padded_dims(D)], tl.float32)
        for begin in range(0, units, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                there = (heads < HQ) & (begin + i < units)
                entry = first + begin + i
                m = tl.load(LSE + entry * 2, mask=there, other=_NOTHING)
                weight = tl.load(LSE + entry * 2 + 1, mask=there, other=0.0)
                part = tl.load(PARTIAL + entry[:, None] * D + dims, mask=there[:, None] & (dims < D), other=0.0)
                top, total, acc = fold(m, weight[:, None], part, top, total, acc)
        _finish_row(top, tl.max(total, 1), acc, SINKS, OUT + row * out_strides[0], heads, heads < HQ, out_strides[1], D)


@triton.jit
def _finish_unit(top, sums, acc, OUT, PARTIAL, LSE, SINKS, row, kv_head, unit_of, out_strides, HKV: tl.constexpr,
                 G: tl.constexpr, D: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Stores a unit's result: where it is its row's only one, the row's."""
    own = tl.arange(0, acc.shape[0])
    dims = tl.arange(0, padded_dims(D))
    total = tl.max(sums, 1)
    heads = kv_head * G + own
    if unit_of >> 16 == 1:
        _finish_row(top, total, acc, SINKS, OUT + row * out_strides[0], heads, own < G, out_strides[1], D)
    else:
        entries = (row * (HKV * G) + heads) * MAX_SPLITS + (unit_of & 0xFFFF)
        tl.store(LSE + entries * 2, top, mask=own < G)
        tl.store(LSE + entries * 2 + 1, total, mask=own < G)
        tl.store(PARTIAL + entries[:, None] * D + dims[None, :], acc, mask=(own < G)[:, None] & (dims < D)[None, :])


@triton.jit(do_not_specialize=["table_stride"])
def fixed_order_decode_kernel(Q, K, V, K_CACHE, V_CACHE, KV_SCALES, SINKS, OUT, TABLE, WORK, NUM_WORK, PARTIAL, LSE,
                              scale_log2, q_strides, k_strides, v_strides, table_stride, out_strides,
                              HKV: tl.constexpr, G: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr,
                              PAGE: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, MAX_SPLITS: tl.constexpr,
                              CAP: tl.constexpr, WINDOWED: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr):
    """Operands, work list and PDL are those of decode.py's kernel, with units in place of chunks and no KV_SCALES. An
    item is a unit of one row for one key head and its G query heads; a program runs the tiles of all its items in one
    loop. LSE has a unit's maximum and sum."""
    tl.static_assert(KV_SCALES is None)
    DIMS: tl.constexpr = padded_dims(D)
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    heads, dims = tl.arange(0, BLOCK_H), tl.arange(0, DIMS)
    tiles, num_items, item, n, block, entry, coming = first_tile(WORK, NUM_WORK, TABLE, table_stride, HKV, PAGE,
                                                                 BLOCK_N, WINDOWED)
    m, sums, acc = empty(BLOCK_H, DIMS)
    top, total, out = empty(BLOCK_H, DIMS)
    if PDL:
        if PAGE % BLOCK_N == 0:
            prefetch_in_page(K_CACHE, item % HKV, block, n, k_strides, D, PAGE, BLOCK_N)
            prefetch_in_page(V_CACHE, item % HKV, block, n, v_strides, D, PAGE, BLOCK_N)
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    for _ in range(tiles):
        row_and_slot, first, end, unit_of = entry
        row = (row_and_slot & 0xFFFF).to(tl.int64)
        kv_head = item % HKV
        k = load_tile(K, kv_head, block, n, first, end, k_strides, D, PAGE, BLOCK_N, TMA, WINDOWED)
        v = load_tile(V, kv_head, block, n, first, end, v_strides, D, PAGE, BLOCK_N, TMA, WINDOWED)
        q = tl.load(Q + row * q_strides[0] + (kv_head * G + heads[:, None]) * q_strides[1] + dims[None, :],
                    mask=(heads < G)[:, None] & (dims < D)[None, :], other=0.0)
        visible = visible_keys(n, first, end, BLOCK_N, WINDOWED)[None, :]
        m, sums, acc = attend(q, k, v, m, sums, acc, visible, scale_log2, CAP)
        is_last = n + BLOCK_N >= end
        if is_last | ends_chunk(n + BLOCK_N):
            top, total, out = fold(m, sums, acc, top, total, out)
            m, sums, acc = empty(BLOCK_H, DIMS)
        if is_last:
            _finish_unit(top, total, out, OUT, PARTIAL, LSE, SINKS, row, kv_head, unit_of, out_strides, HKV, G, D,
                         MAX_SPLITS)
            top, total, out = empty(BLOCK_H, DIMS)
        item, n, block, entry, coming = next_tile(is_last, num_items, item, n, entry, coming, WORK, TABLE, table_stride,
                                                  HKV, PAGE, BLOCK_N, WINDOWED)


class FixedOrderDecode(DecodeAttention):
    """DecodeAttention by the kernels above; its plan is a FixedOrderPlan."""

    _kernel, _merge = fixed_order_decode_kernel, fixed_order_merge_kernel
    _fuses = False

    def _block_n(self, config: DecodeConfig, q: torch.Tensor) -> int:
        return tile_keys(self.spec.head_dim, q.element_size())
