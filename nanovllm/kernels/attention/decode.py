"""Paged split-KV attention for rows with one query token, over a work list that the device builds itself. Rows of one
sequence may share a tile's lanes, so that its keys are read once.

A row's keys are cut into chunks at offsets that depend on the row's own length, so that its result does not depend on
its neighbours (within a class of batch sizes: see decode_work_list.py). The chunks of all rows form one list, long
ones first; a fixed number of programs walks it, so the grid does not depend on lengths, and ragged batches spread
evenly. A chunk that is not its row's only one leaves a normalised partial result and its log-sum-exp; a
second kernel merges them, in order. (Merging in the program that finishes a row last saves that launch, but its memory
fence stalls the program until all that it has in flight is done: slower in every case measured.)
The idea of fixed split offsets with a merge by log-sum-exp is Flash-Decoding's (Dao et al., 2023).
"""

from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.kernels.attention.chunks import (
    finish_chunk,
    lanes_of,
    load_lanes,
    new_chunk,
    store_heads_rounded,
    visible_keys,
)
from nanovllm.kernels.attention.decode_work_list import WorkList
from nanovllm.kernels.attention.e4m3 import attend_e4m3, load_scales
from nanovllm.kernels.attention.fixed_order import NOTHING, attend_in_order, empty, ends_chunk, fold, tile_keys
from nanovllm.kernels.attention.pages import keys_within, load_tile
from nanovllm.kernels.attention.scores import LOG2_E, exp_of_sink, padded_dims, soft_cap, softmax_step
from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.attention.work_list import first_tile, next_tile, prefetch_in_page
from nanovllm.kernels.base.device import paged_descriptor, pdl_options
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.fp8.quantize import empty_rows_for
from nanovllm.kernels.plan.device import Device

_NOTHING = tl.constexpr(NOTHING)


@triton.jit
def _attend(q, k, v, state, scale_log2, visible, CAP: tl.constexpr):
    """One tile of online softmax, in units of log2. state: running maximum m [H], running sums [H, BLOCK_N] of each
    column of the tiles (added up once a chunk, not once a tile), unnormalised output acc [H, D]. visible bool [H or 1,
    BLOCK_N]."""
    m, sums, acc = state
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if CAP is not None:
        scores = soft_cap(scores, CAP)
    m_new, p, alpha = softmax_step(tl.where(visible, scores, float("-inf")), m, 1.0)
    sums = sums * alpha[:, None] + p
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, sums, acc


@triton.jit
def _sum_chunks(PARTIAL, LSE, SINKS, first, heads, dims, num_chunks, HQ: tl.constexpr, D: tl.constexpr,
                MAX_SPLITS: tl.constexpr):
    """Sum of the weights [HEADS] of a row's chunks and sinks, and of the outputs that they weigh [HEADS, D up to a
    power of two]. first: number of each head's first chunk."""
    AT_ONCE: tl.constexpr = 8 if MAX_SPLITS >= 8 else MAX_SPLITS
    splits = tl.arange(0, MAX_SPLITS)[None, :]
    known = (heads < HQ)[:, None] & (splits < num_chunks)
    lse = tl.load(LSE + first[:, None] + splits, mask=known, other=float("-inf"))
    top = tl.where(heads < HQ, tl.max(lse, 1), 0.0)
    total = tl.zeros([heads.shape[0]], tl.float32)
    if SINKS is not None:
        total += exp_of_sink(SINKS, heads, heads < HQ, top)
    acc = tl.zeros([heads.shape[0], dims.shape[1]], tl.float32)
    for begin in tl.static_range(0, MAX_SPLITS, AT_ONCE):
        if begin < num_chunks:
            for i in tl.static_range(AT_ONCE):
                entry = first + begin + i
                there = (heads < HQ) & (begin + i < num_chunks)
                weight = tl.exp2(tl.load(LSE + entry, mask=there, other=float("-inf")) - top)
                value = tl.load(PARTIAL + entry[:, None] * D + dims, mask=there[:, None] & (dims < D), other=0.0)
                total += weight
                acc += value * weight[:, None]
    return total, acc


@triton.jit
def _sum_units(PARTIAL, LSE, SINKS, first, heads, dims, units, HQ: tl.constexpr, D: tl.constexpr):
    """Sum of a row's units in order, weighted by their maxima: the exact-bits counterpart of _sum_chunks."""
    AT_ONCE: tl.constexpr = 4
    top = tl.full([heads.shape[0]], _NOTHING, tl.float32)
    total = tl.zeros([heads.shape[0], 1], tl.float32)
    acc = tl.zeros([heads.shape[0], dims.shape[1]], tl.float32)
    for begin in range(0, units, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            there = (heads < HQ) & (begin + i < units)
            entry = first + begin + i
            m = tl.load(LSE + entry * 2, mask=there, other=_NOTHING)
            weight = tl.load(LSE + entry * 2 + 1, mask=there, other=0.0)
            part = tl.load(PARTIAL + entry[:, None] * D + dims, mask=there[:, None] & (dims < D), other=0.0)
            top, total, acc = fold(m, weight[:, None], part, top, total, acc)
    total = tl.max(total, 1)
    if SINKS is not None:
        total += exp_of_sink(SINKS, heads, heads < HQ, top)
    return total, acc


@triton.jit
def merge_chunks_kernel(PARTIAL, LSE, SINKS, OUT, ROUNDED, NUM_CHUNKS, out_strides, HQ: tl.constexpr,
                        HEADS: tl.constexpr, D: tl.constexpr, MAX_SPLITS: tl.constexpr, FIXED: tl.constexpr,
                        PDL: tl.constexpr):
    """Merges the rows that have several chunks, one chunk after the other, into OUT [rows, HQ, D]. PARTIAL float32
    [rows, HQ, MAX_SPLITS, D], LSE float32 [rows, HQ, MAX_SPLITS], with FIXED two of each; SINKS [HQ] or None;
    NUM_CHUNKS int32 [rows]. A program takes HEADS query heads of a row; where most rows have nothing to merge, the
    number of programs is all it costs. ROUNDED: None, or where rows go in e4m3 instead: see store_heads_rounded."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_chunks = tl.load(NUM_CHUNKS + row)  # of the work list, as below
    if PDL:
        tl.extra.cuda.gdc_wait()
    if num_chunks > 1:
        heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        dims = tl.arange(0, padded_dims(D))[None, :]
        first = (row * HQ + heads) * MAX_SPLITS
        if FIXED:
            total, acc = _sum_units(PARTIAL, LSE, SINKS, first, heads, dims, num_chunks, HQ, D)
        else:
            total, acc = _sum_chunks(PARTIAL, LSE, SINKS, first, heads, dims, num_chunks, HQ, D, MAX_SPLITS)
        y = (acc / total[:, None]).to(OUT.dtype.element_ty)
        if ROUNDED is not None:
            store_heads_rounded(y, ROUNDED, row, heads, heads < HQ, HQ)
        else:
            places = OUT + row * out_strides[0] + heads[:, None] * out_strides[1] + dims
            tl.store(places, y, mask=(heads < HQ)[:, None] & (dims < D))


@triton.jit(do_not_specialize=["table_stride", "window"])
def decode_attention_kernel(Q, K, V, K_CACHE, V_CACHE, KV_SCALES, SINKS, OUT, TABLE, WORK, NUM_WORK, PARTIAL, LSE,
                            scale_log2, q_strides, k_strides, v_strides, scale_stride, table_stride, out_strides,
                            HKV: tl.constexpr, G: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr,
                            PAGE: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, MAX_SPLITS: tl.constexpr,
                            CAP: tl.constexpr, WINDOWED: tl.constexpr, FIXED: tl.constexpr, PDL: tl.constexpr,
                            ENDS=None, window=None, PLACES: tl.constexpr = 1, ROUNDED=None,
                            MIXED: tl.constexpr = False):
    """attention_reference of Q [rows, HKV * G, D] into OUT of this shape, or ROUNDED (see store_heads_rounded), or
    PARTIAL and LSE as merge_chunks_kernel takes them. Caches [blocks, HKV, PAGE, D], TABLE int32 [slots, blocks], WORK
    int32 [entries, 4] (work_list.py), NUM_WORK int32 [1]. An item is one chunk of one row for one key head and its G
    query heads. A program runs the tiles of all its items in one loop: the next one's keys come while a result is
    stored. K and V are descriptors with TMA, else K_CACHE and V_CACHE. CAP: the soft-cap in units of log2, or None;
    SINKS may be None. WINDOWED: chunks may begin in a tile. KV_SCALES: None, or int32 (see load_scales), blocks
    scale_stride apart; then K is e4m3, and V and V_CACHE are int16, two values each. FIXED: sums in the order of
    fixed_order.py, whose units chunks are; LSE has a unit's maximum and sum. With PLACES above 1 a tile's lanes are
    heads of up to so many rows: ENDS int32 [rows, PLACES], by an item's first row, or 0. MIXED: a value that the row
    does not have may be NaN (KVCache), V is V_CACHE. With PDL work list and block table are read before gdc_wait:
    an ordinary kernel has run since they were written, the embedding."""
    E4M3: tl.constexpr = KV_SCALES is not None
    DV: tl.constexpr = D // 2 if E4M3 else D
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place, heads = lanes_of(BLOCK_H, G, PLACES)
    dims = tl.arange(0, padded_dims(D))
    tiles, num_items, item, n, block, entry, coming = first_tile(WORK, NUM_WORK, TABLE, table_stride, HKV, PAGE,
                                                                 BLOCK_N, WINDOWED)
    state = new_chunk(BLOCK_H, BLOCK_N, padded_dims(DV), E4M3, FIXED, PLACES)
    if PDL:
        if PAGE % BLOCK_N == 0:
            prefetch_in_page(K_CACHE, item % HKV, block, n, k_strides, D, PAGE, BLOCK_N)
            prefetch_in_page(V_CACHE, item % HKV, block, n, v_strides, DV, PAGE, BLOCK_N)
        tl.extra.cuda.gdc_wait()
    for _ in range(tiles):
        row_and_slot, first, end, chunk_of = entry
        row, kv_head = (row_and_slot & 0xFFFF).to(tl.int64), item % HKV
        known = None if TMA and not MIXED else keys_within(n, first, end, BLOCK_N, WINDOWED)
        k = load_tile(K, block, kv_head, n, known, k_strides, D, PAGE, BLOCK_N, TMA)
        v = load_tile(V, block, kv_head, n, known, v_strides, DV, PAGE, BLOCK_N, TMA and not MIXED)
        own_end = tl.load(ENDS + row * PLACES + place, mask=place < PLACES, other=0) if PLACES > 1 else end
        q = load_lanes(Q, row, place, kv_head, heads, dims, own_end, q_strides, G, D, PLACES)
        visible = visible_keys(n, first, own_end, window, BLOCK_N, E4M3, WINDOWED, PLACES)
        is_last = n + BLOCK_N >= end
        if E4M3:
            scales = load_scales(KV_SCALES, block, kv_head, n, scale_stride, PAGE, BLOCK_N)
            scales = tl.where(known, scales, 0) if MIXED else scales
            state = attend_e4m3(q, k, v, scales, state, scale_log2, visible, CAP)
        elif FIXED:
            ends = is_last | ends_chunk(n + BLOCK_N)
            state = attend_in_order(q, k, v, state, scale_log2, visible, CAP, ends)
        else:
            state = _attend(q, k, v, state, scale_log2, visible, CAP)
        if is_last:
            finish_chunk(state, OUT, ROUNDED, PARTIAL, LSE, SINKS, row, kv_head, chunk_of, out_strides, HKV, G, D,
                         MAX_SPLITS, E4M3, FIXED, PLACES, own_end)
            if FIXED:
                state = state[0], empty(BLOCK_H, padded_dims(D))
            else:
                state = new_chunk(BLOCK_H, BLOCK_N, padded_dims(DV), E4M3, FIXED, PLACES)
        item, n, block, entry, coming = next_tile(is_last, num_items, item, n, entry, coming, WORK, TABLE, table_stride,
                                                  HKV, PAGE, BLOCK_N, WINDOWED)


@dataclass
class DecodeScratch:
    """Partial results of chunks. Layers run one after the other, so those of all kinds share one."""

    partial: torch.Tensor
    """float32, for [max_num_seqs, Hq, splits, D]"""
    lse: torch.Tensor
    """float32, for [max_num_seqs, Hq, splits], or two of them: a work list in fixed_order keeps maximum and sum."""

    @classmethod
    def for_specs(cls, work_lists: dict[AttentionSpec, WorkList], device: torch.device) -> "DecodeScratch":
        rows = [(spec.num_heads * work_list.most_partials, spec.out_dim) for spec, work_list in work_lists.items()]
        partial = torch.zeros(max(n * dim for n, dim in rows), dtype=torch.float32, device=device)
        return cls(partial, torch.zeros(2 * max(n for n, _ in rows), dtype=torch.float32, device=device))


def merge_chunks(spec: AttentionSpec, work_list: WorkList, scratch: DecodeScratch, num_rows: int, out: torch.Tensor,
                 merge_first: bool, sinks: torch.Tensor | None = None, rounded_to: Any = None) -> None:
    """Merges the chunks of a work list's rows into out [num_rows, Hq, dimensions], or `rounded_to`; merge_first: see
    DecodeAttention."""
    heads = work_list.config(num_rows).merge_heads
    merge_chunks_kernel[(num_rows, triton.cdiv(spec.num_heads, heads))](
        scratch.partial, scratch.lse, sinks, out, rounded_to, work_list.num_chunks, out.stride()[:2], HQ=spec.num_heads,
        HEADS=heads, D=spec.out_dim, MAX_SPLITS=work_list.room(num_rows), FIXED=work_list.fixed_order,
        num_warps=1 if heads == 1 else 4, enable_fp_fusion=not work_list.fixed_order,
        **pdl_options(out.device, not merge_first))


class DecodeAttention:
    """The kernel for one kind of layers: the step's work list is made first, then this called once per layer. Serves
    any batch up to max_num_seqs from one set of buffers; nothing is allocated after construction."""

    def __init__(self, spec: AttentionSpec, block_size: int, work_list: WorkList, scratch: DecodeScratch) -> None:
        self.spec, self.block_size, self.work_list, self.scratch = spec, block_size, work_list, scratch
        device = Device.of(scratch.lse.device)
        self.num_sms = device.processors
        self.has_tma = device.has_tma and spec.head_dim == padded_dims(spec.head_dim)

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
                 max_context_len: int, out: torch.Tensor, sinks: torch.Tensor | None = None,
                 merge_first: bool = False, kv_scales: torch.Tensor | None = None,
                 rounds: bool = False, mixed: bool = False) -> torch.Tensor | FP8Rows:
        """q and out [num_rows, Hq, D]: the rows of the last work list. max_context_len: any bound on their lengths.
        merge_first: where chunks are merged, no later kernel may start before they are. rounds: the result is rounded
        to e4m3 and returned as [num_rows, Hq * D], and `out` says its dtype alone; for heads of 128 dimensions. mixed:
        see KVCache."""
        num_rows, spec, work_list, scratch = q.shape[0], self.spec, self.work_list, self.scratch
        c, splits, together = work_list.config(num_rows), work_list.room(num_rows), work_list.together
        most_chunks = work_list.most_chunks(num_rows, max_context_len)
        scales = None
        if kv_scales is not None:
            scales, v_cache = kv_scales.view(torch.int32), v_cache.view(torch.int16)
        block_n = tile_keys(spec.head_dim) if work_list.fixed_order else c.block_n
        use_tma = self.has_tma and self.block_size % block_n == 0
        k = paged_descriptor(k_cache, block_n) if use_tma else k_cache
        v = paged_descriptor(v_cache, block_n) if use_tma and not mixed else v_cache
        programs = min(self.num_sms * c.programs_per_sm, num_rows * spec.num_kv_heads * most_chunks)
        row = empty_rows_for(num_rows, spec.num_heads * spec.head_dim, out.dtype, out.device) if rounds else None
        rounded_to = row and (row.values, row.scales, row.scales.stride(1))
        decode_attention_kernel[(programs,)](
            q, k, v, k_cache, v_cache, scales, sinks, out, block_table, work_list.entries, work_list.num_entries,
            scratch.partial, scratch.lse, spec.scale * LOG2_E, q.stride()[:2], k_cache.stride()[:3],
            v_cache.stride()[:3], None if scales is None else scales.stride(0), block_table.stride(0), out.stride()[:2],
            HKV=spec.num_kv_heads, G=spec.group_size,
            BLOCK_H=max(16 if scales is None else 8, triton.next_power_of_2(together * spec.group_size)),
            D=spec.head_dim,
            PAGE=self.block_size, BLOCK_N=block_n, TMA=use_tma, MAX_SPLITS=splits,
            CAP=spec.softcap and spec.softcap * LOG2_E, WINDOWED=spec.window is not None,
            num_warps=c.num_warps, num_stages=c.num_stages, maxnreg=c.max_registers, FIXED=work_list.fixed_order,
            enable_fp_fusion=not work_list.fixed_order, PLACES=together, ENDS=work_list.ends, MIXED=mixed,
            window=spec.window if together > 1 else None, ROUNDED=rounded_to, **pdl_options(q.device))
        if most_chunks > 1:
            merge_chunks(spec, work_list, scratch, num_rows, out, merge_first, sinks, rounded_to)
        return out if row is None else row
