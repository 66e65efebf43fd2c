"""The decode kernel whose rows get the bits that the prefill kernel would give them; see fixed_order.py."""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.decode import DecodeAttention, DecodeScratch
from nanovllm.kernels.attention.decode_plan import DecodePlan
from nanovllm.kernels.attention.fixed_order import NOTHING, attend, empty, ends_chunk, fold, tile_keys
from nanovllm.kernels.attention.scores import LOG2_E, exp_of_sink, padded_dims
from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.attention.work_list import first_tile, load_tile, next_tile, prefetch_in_page, visible_keys
from nanovllm.kernels.base.device import paged_descriptor, pdl_options

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
def fixed_order_merge_kernel(PARTIAL, WEIGHTS, SINKS, OUT, NUM_CHUNKS, out_strides, HQ: tl.constexpr,
                             HEADS: tl.constexpr, D: tl.constexpr, MAX_UNITS: tl.constexpr, PDL: tl.constexpr):
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
        first = (row * HQ + heads) * MAX_UNITS
        top = tl.full([HEADS], _NOTHING, tl.float32)
        total = tl.zeros([HEADS, 1], tl.float32)
        acc = tl.zeros([HEADS, padded_dims(D)], tl.float32)
        for begin in range(0, units, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                there = (heads < HQ) & (begin + i < units)
                entry = first + begin + i
                m = tl.load(WEIGHTS + entry * 2, mask=there, other=_NOTHING)
                weight = tl.load(WEIGHTS + entry * 2 + 1, mask=there, other=0.0)
                part = tl.load(PARTIAL + entry[:, None] * D + dims, mask=there[:, None] & (dims < D), other=0.0)
                top, total, acc = fold(m, weight[:, None], part, top, total, acc)
        _finish_row(top, tl.max(total, 1), acc, SINKS, OUT + row * out_strides[0], heads, heads < HQ, out_strides[1], D)


@triton.jit
def _finish_unit(top, sums, acc, OUT, PARTIAL, WEIGHTS, SINKS, row, kv_head, unit_of, out_strides, HKV: tl.constexpr,
                 G: tl.constexpr, D: tl.constexpr, MAX_UNITS: tl.constexpr):
    """Stores a unit's result: where it is its row's only one, the row's."""
    own = tl.arange(0, acc.shape[0])
    dims = tl.arange(0, padded_dims(D))
    total = tl.max(sums, 1)
    heads = kv_head * G + own
    if unit_of >> 16 == 1:
        _finish_row(top, total, acc, SINKS, OUT + row * out_strides[0], heads, own < G, out_strides[1], D)
    else:
        entries = (row * (HKV * G) + heads) * MAX_UNITS + (unit_of & 0xFFFF)
        tl.store(WEIGHTS + entries * 2, top, mask=own < G)
        tl.store(WEIGHTS + entries * 2 + 1, total, mask=own < G)
        tl.store(PARTIAL + entries[:, None] * D + dims[None, :], acc, mask=(own < G)[:, None] & (dims < D)[None, :])


@triton.jit(do_not_specialize=["table_stride"])
def fixed_order_decode_kernel(Q, K, V, K_CACHE, V_CACHE, SINKS, OUT, TABLE, WORK, NUM_WORK, PARTIAL, WEIGHTS,
                              scale_log2, q_strides, k_strides, v_strides, table_stride, out_strides,
                              HKV: tl.constexpr, G: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr,
                              PAGE: tl.constexpr, TILE: tl.constexpr, TMA: tl.constexpr, MAX_UNITS: tl.constexpr,
                              CAP: tl.constexpr, WINDOWED: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr):
    """Operands, work list and PDL are those of decode.py's kernel, with units in place of chunks. An item is a unit of
    one row for one key head and its G query heads; a program runs the tiles of all its items in one loop."""
    DIMS: tl.constexpr = padded_dims(D)
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    heads, dims = tl.arange(0, BLOCK_H), tl.arange(0, DIMS)
    tiles, num_items, item, n, block, entry, coming = first_tile(WORK, NUM_WORK, TABLE, table_stride, HKV, PAGE, TILE,
                                                                 WINDOWED)
    m, sums, acc = empty(BLOCK_H, DIMS)
    top, total, out = empty(BLOCK_H, DIMS)
    if PDL:
        if PAGE % TILE == 0:
            prefetch_in_page(K_CACHE, item % HKV, block, n, k_strides, D, PAGE, TILE)
            prefetch_in_page(V_CACHE, item % HKV, block, n, v_strides, D, PAGE, TILE)
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    for _ in range(tiles):
        row_and_slot, first, end, unit_of = entry
        row = (row_and_slot & 0xFFFF).to(tl.int64)
        kv_head = item % HKV
        k = load_tile(K, kv_head, block, n, first, end, k_strides, D, PAGE, TILE, TMA, WINDOWED)
        v = load_tile(V, kv_head, block, n, first, end, v_strides, D, PAGE, TILE, TMA, WINDOWED)
        q = tl.load(Q + row * q_strides[0] + (kv_head * G + heads[:, None]) * q_strides[1] + dims[None, :],
                    mask=(heads < G)[:, None] & (dims < D)[None, :], other=0.0)
        visible = visible_keys(n, first, end, TILE, WINDOWED)[None, :]
        m, sums, acc = attend(q, k, v, m, sums, acc, visible, scale_log2, CAP)
        is_last = n + TILE >= end
        if is_last | ends_chunk(n + TILE):
            top, total, out = fold(m, sums, acc, top, total, out)
            m, sums, acc = empty(BLOCK_H, DIMS)
        if is_last:
            _finish_unit(top, total, out, OUT, PARTIAL, WEIGHTS, SINKS, row, kv_head, unit_of, out_strides, HKV, G, D,
                         MAX_UNITS)
            top, total, out = empty(BLOCK_H, DIMS)
        item, n, block, entry, coming = next_tile(is_last, num_items, item, n, entry, coming, WORK, TABLE, table_stride,
                                                  HKV, PAGE, TILE, WINDOWED)


class FixedOrderScratch(DecodeScratch):
    """Partial results of units; `lse` holds maximum and sum of each."""

    @classmethod
    def for_specs(cls, plans: dict[AttentionSpec, DecodePlan], device: torch.device) -> "FixedOrderScratch":
        scratch = super().for_specs(plans, device)
        return cls(scratch.partial, torch.cat([scratch.lse, scratch.lse]))


class FixedOrderDecode(DecodeAttention):
    """DecodeAttention by the kernels above; its plan is a FixedOrderPlan."""

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
                 max_context_len: int, out: torch.Tensor, sinks: torch.Tensor | None = None,
                 merge_first: bool = False, kv_scales: torch.Tensor | None = None) -> torch.Tensor:
        assert kv_scales is None, "caches of e4m3 are refused"
        num_rows, spec, plan, scratch = q.shape[0], self.spec, self.plan, self.scratch
        c, tile = plan.config(num_rows), tile_keys(spec.head_dim, q.element_size())
        units = plan.max_splits(c)
        most_units = plan.most_chunks(num_rows, max_context_len)
        use_tma = c.use_tma and self.has_tma and self.block_size % tile == 0
        k, v = (paged_descriptor(x, tile) if use_tma else x for x in (k_cache, v_cache))
        programs = min(self.num_sms * c.programs_per_sm, num_rows * spec.num_kv_heads * most_units)
        fixed_order_decode_kernel[(programs,)](
            q, k, v, k_cache, v_cache, sinks, out, block_table, plan.work, plan.num_work, scratch.partial, scratch.lse,
            spec.scale * LOG2_E, q.stride()[:2], k_cache.stride()[:3], v_cache.stride()[:3], block_table.stride(0),
            out.stride()[:2], HKV=spec.num_kv_heads, G=spec.group_size,
            BLOCK_H=max(16, triton.next_power_of_2(spec.group_size)), D=spec.head_dim, PAGE=self.block_size,
            TILE=tile, TMA=use_tma, MAX_UNITS=units, CAP=spec.softcap and spec.softcap * LOG2_E,
            WINDOWED=spec.window is not None, num_warps=c.num_warps, num_stages=c.num_stages, maxnreg=c.max_registers,
            EARLY=num_rows == 1, enable_fp_fusion=False, **pdl_options(q.device))
        if most_units > 1:
            fixed_order_merge_kernel[(num_rows, triton.cdiv(spec.num_heads, c.merge_heads))](
                scratch.partial, scratch.lse, sinks, out, plan.num_chunks, out.stride()[:2], HQ=spec.num_heads,
                HEADS=c.merge_heads, D=spec.head_dim, MAX_UNITS=units, num_warps=1 if c.merge_heads == 1 else 4,
                enable_fp_fusion=False, **pdl_options(q.device, not merge_first))
        return out
