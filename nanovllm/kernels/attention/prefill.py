"""Paged causal attention for rows with any number of query tokens (prompt chunks, with or without a cached prefix).

The rows are cut into tiles of BLOCK_M queries; a small kernel lists the tiles once a step, those with most keys first,
so the grid depends on the number of tokens and rows alone (CUDA graphs) and the causal triangle leaves no long tail.
Keys are tiled from the row's first token on: a query's result does not depend on how its prompt was cut into chunks.
The online softmax is FlashAttention-2's (Dao, 2023).
"""

from dataclasses import dataclass, replace

import torch

from nanovllm.kernels.attention.e4m3 import load_scales, split_scales
from nanovllm.kernels.attention.fixed_order import attend_in_order, empty, ends_chunk, fold, tile_keys
from nanovllm.kernels.attention.pages import keys_within, load_tile, look_up
from nanovllm.kernels.attention.query_tiles import causal_mask, key_ranges, load_queries
from nanovllm.kernels.attention.scores import LOG2_E, exp_of_sink, padded_dims, soft_cap, softmax_step
from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.base.device import paged_descriptor
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.plan.config import SHARED_BYTES
from nanovllm.kernels.plan.device import Device


@dataclass(frozen=True)
class PrefillConfig:
    """Tuning of the kernel."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 2
    fixed_order: bool = False
    """Sums in one order; see fixed_order.py."""


def prefill_config(
    head_dim: int, dtype: torch.dtype, fp8: bool = False, most_shared: int = SHARED_BYTES
) -> PrefillConfig:
    """Wider heads get smaller tiles: what does not fit in registers and `most_shared` bytes of shared memory would be
    slow, or not run. Widths without tensor descriptors keep pointers in registers too, and e4m3 is widened there."""
    num_warps = 4 if head_dim == padded_dims(head_dim) else 8
    if head_dim > 256:
        return _of_widest(head_dim, dtype, fp8, most_shared)
    if dtype.itemsize > 2 and head_dim > 64:  # no tensor cores: it multiplies in registers
        return PrefillConfig(block_m=32, block_n=32, num_warps=8, num_stages=1)
    if fp8:
        return PrefillConfig(block_m=64, block_n=64 if head_dim <= 128 else 32, num_warps=num_warps)
    config = PrefillConfig(block_m=128 if head_dim <= 128 else 64, num_warps=num_warps)
    queries = config.block_m * (padded_dims(head_dim) + config.block_n)  # and their weights
    nbytes = dtype.itemsize * (queries + 2 * config.block_n * padded_dims(head_dim))
    return config if nbytes <= most_shared else replace(config, block_n=config.block_n // 2)


def _of_widest(head_dim: int, dtype: torch.dtype, fp8: bool, most_shared: int) -> PrefillConfig:
    """The outputs of 64 queries take the registers of eight warps, and with little shared memory even these are too
    many queries."""
    if dtype.itemsize > 2:
        return PrefillConfig(block_m=16, block_n=16, num_warps=8, num_stages=1)
    if fp8:
        return PrefillConfig(block_m=32, block_n=32, num_warps=8)
    held = dtype.itemsize * padded_dims(head_dim) * (64 + 4 * 32)  # of queries, and of keys and values twice
    return PrefillConfig(64, 32, num_warps=8) if held < most_shared else PrefillConfig(32, 16, num_warps=8)


def fixed_order_config(head_dim: int) -> PrefillConfig:
    """Two accumulators leave room for tiles of 64 queries, by 4 warps where nothing else is in registers."""
    wide = head_dim > 128 or head_dim != padded_dims(head_dim)
    return PrefillConfig(64, tile_keys(head_dim), num_warps=8 if wide else 4, fixed_order=True)


@triton.jit
def _tiles(CU_SEQLENS, CONTEXT_LENS, tile, num_rows, BLOCK_M: tl.constexpr, SEARCH_STEPS: tl.constexpr):
    """Row, first query within the row, and keys that the tile's last query sees, for a vector of tile indices; no keys
    where the index belongs to no queries. Row r's tiles start at index cu_seqlens[r] // BLOCK_M + r, which leaves room
    for the partly filled tile of every row before it."""
    first_token = tl.load(CU_SEQLENS)
    low = tl.zeros_like(tile)
    high = tl.zeros_like(tile) + num_rows - 1
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high + 1) // 2
        begin = (tl.load(CU_SEQLENS + middle) - first_token) // BLOCK_M + middle
        low = tl.where(begin <= tile, middle, low)
        high = tl.where(begin <= tile, high, middle - 1)
    token = tl.load(CU_SEQLENS + low)
    count = tl.load(CU_SEQLENS + low + 1) - token
    query = (tile - (token - first_token) // BLOCK_M - low) * BLOCK_M
    context = tl.load(CONTEXT_LENS + low)
    keys = tl.minimum(context, context - count + query + BLOCK_M)
    return low, query, tl.where((query < count) & (context > 0), keys, 0)


@triton.jit(do_not_specialize=["CU_SEQLENS", "CONTEXT_LENS", "num_tiles", "num_rows"])
def list_tiles_kernel(CU_SEQLENS, CONTEXT_LENS, TILES, num_tiles, num_rows, BLOCK_M: tl.constexpr,
                      SEARCH_STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The tiles of rows CU_SEQLENS int32 [num_rows + 1] and CONTEXT_LENS int32 [num_rows], those with most keys first:
    TILES int32 [num_tiles, 2], row (-1: none) and first query within it. A tile's place is the number of tiles before
    it."""
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, query, keys = _tiles(CU_SEQLENS, CONTEXT_LENS, mine, num_rows, BLOCK_M, SEARCH_STEPS)
    place = tl.zeros_like(mine)
    for begin in range(0, num_tiles, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        _, _, other_keys = _tiles(CU_SEQLENS, CONTEXT_LENS, other, num_rows, BLOCK_M, SEARCH_STEPS)
        is_earlier = (other_keys[None, :] == keys[:, None]) & (other[None, :] < mine[:, None])
        ahead = (other_keys[None, :] > keys[:, None]) | is_earlier
        place += tl.sum((ahead & (other[None, :] < num_tiles)).to(tl.int32), 1)
    tl.store(TILES + place * 2, tl.where(keys > 0, row, -1), mask=mine < num_tiles)
    tl.store(TILES + place * 2 + 1, query, mask=mine < num_tiles)


@triton.jit
def _attend(q, k, v, state, KV_SCALES, block, kv_head, start, known, position, scale_log2, window, scale_stride,
            PAGE: tl.constexpr, BLOCK_N: tl.constexpr, CAP: tl.constexpr, WINDOWED: tl.constexpr, MIXED: tl.constexpr,
            MASKED: tl.constexpr):
    """One tile of online softmax, of the keys from `start` on, in `block`. state: running maximum and sum [BLOCK_M],
    unnormalised output [BLOCK_M, D up to a power of two]. The rest: see _walk."""
    m, sums, acc = state
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if KV_SCALES is not None:
        scales = load_scales(KV_SCALES, block, kv_head, start, scale_stride, PAGE, BLOCK_N)
        if MIXED:
            scales = tl.where(known, scales, 0)
        of_key, exponent, inverse, remainder = split_scales(scales, scale_log2)
        scores *= of_key[None, :]
        scale_log2 = 1.0
    if CAP is not None:
        scores = soft_cap(scores * scale_log2, CAP)
        scale_log2 = 1.0
    if KV_SCALES is not None:
        scores += exponent[None, :]
    if MASKED:
        scores = tl.where(causal_mask(start, position, window, BLOCK_N, WINDOWED), scores, float("-inf"))
    m_new, p, alpha = softmax_step(scores, m, scale_log2)
    if KV_SCALES is None:
        sums = sums * alpha + tl.sum(p, 1)
    else:
        sums = sums * alpha + tl.sum(p * inverse[None, :], 1)
        p *= remainder[None, :]
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision="ieee")
    return m_new, sums, acc


@triton.jit
def _walk(q, state, begin, stop, K, V, KV_SCALES, TABLE_ROW, kv_head, first, end, position, scale_log2, window,
          k_strides, v_strides, scale_stride, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
          TMA: tl.constexpr, CAP: tl.constexpr, WINDOWED: tl.constexpr, FIXED: tl.constexpr, MIXED: tl.constexpr,
          MASKED: tl.constexpr):
    """The tiles from key `begin` to `stop`; the query at `position` sees the keys up to itself, of its window if it has
    one. Keys first .. end are all that any query of the tile sees."""
    for n in range(begin, stop, BLOCK_N):
        known = None if PAGE % BLOCK_N == 0 and not MIXED else keys_within(n, first, end, BLOCK_N, True)
        block = look_up(TABLE_ROW, n, None if PAGE % BLOCK_N == 0 else known, PAGE, BLOCK_N)
        k = load_tile(K, block, kv_head, n, known, k_strides, D, PAGE, BLOCK_N, TMA)
        v = load_tile(V, block, kv_head, n, known, v_strides, D, PAGE, BLOCK_N, TMA and not MIXED)
        if FIXED:
            visible = causal_mask(n, position, window, BLOCK_N, WINDOWED) if MASKED else None
            state = attend_in_order(q, k, v, state, scale_log2, visible, CAP, ends_chunk(n + BLOCK_N))
        else:
            state = _attend(q, k, v, state, KV_SCALES, block, kv_head, n, known, position, scale_log2, window,
                            scale_stride, PAGE, BLOCK_N, CAP, WINDOWED, MIXED, MASKED)
    return state


@triton.jit(do_not_specialize=["ROW_SLOT", "CU_SEQLENS", "CONTEXT_LENS", "table_stride", "window"])
def prefill_attention_kernel(Q, K, V, KV_SCALES, SINKS, OUT, TABLE, ROW_SLOT, CU_SEQLENS, CONTEXT_LENS, TILES,
                             scale_log2, window, q_strides, k_strides, v_strides, scale_stride, table_stride,
                             out_strides, HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
                             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAP: tl.constexpr, WINDOWED: tl.constexpr,
                             TMA: tl.constexpr, FIXED: tl.constexpr, MIXED: tl.constexpr = False):
    """attention_reference of Q [T, HQ, D] into OUT of this shape. K, V [blocks, HQ / G, PAGE, D], tensor descriptors
    with TMA; KV_SCALES int32 [blocks, HQ / G, PAGE], a key's and a value's bfloat16, where they are e4m3, int64 of
    packed_scales where they are copies of such, else None;
    SINKS [HQ] or None; TABLE int32 [slots, table_stride]; ROW_SLOT, CONTEXT_LENS int32 [rows], CU_SEQLENS int32 [rows +
    1]; TILES of list_tiles_kernel. A program computes one tile of queries of one head; the heads of a tile run side
    by side, so that those which share keys find them in the L2 cache. CAP: the soft-cap in units of log2, or None.
    FIXED: sums in the order of fixed_order.py. MIXED: a value that the row does not have may be NaN, see KVCache;
    then V is no descriptor."""
    tile = tl.program_id(0) // HQ
    head = tl.program_id(0) % HQ
    row = tl.load(TILES + tile * 2)
    if row < 0:
        return
    query = tl.load(TILES + tile * 2 + 1)
    TABLE_ROW = TABLE + tl.load(ROW_SLOT + row).to(tl.int64) * table_stride
    q, live, tokens, position, first_position, context = load_queries(Q, CU_SEQLENS, CONTEXT_LENS, row, query, head,
                                                                      q_strides, D, BLOCK_M)
    DIMS: tl.constexpr = padded_dims(D)
    if FIXED:
        state = (empty(BLOCK_M, DIMS), empty(BLOCK_M, DIMS))
    else:  # the maximum is not -inf: the first tiles may hold no key of a query's window, and leave these as they are
        m = tl.full([BLOCK_M], -1e30, tl.float32)
        state = (m, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, DIMS], tl.float32))
    kv_head = head // G
    first, begin, begin_full, end_full, end = key_ranges(first_position, context, window, BLOCK_M, BLOCK_N, WINDOWED)
    for part in tl.static_range(0 if WINDOWED else 1, 3):  # the tiles of part 1 need no mask
        start = begin if part == 0 else begin_full if part == 1 else tl.maximum(begin_full, end_full)
        stop = tl.minimum(begin_full, end) if part == 0 else end_full if part == 1 else end
        state = _walk(q, state, start, stop, K, V, KV_SCALES, TABLE_ROW, kv_head, first, end, position, scale_log2,
                      window, k_strides, v_strides, scale_stride, D, PAGE, BLOCK_N, TMA, CAP, WINDOWED, FIXED,
                      MIXED, part != 1)
    if FIXED:
        chunk, before = state
        m, sums, acc = fold(chunk[0], chunk[1], chunk[2], before[0], before[1], before[2])
        sums = tl.max(sums, 1)
    else:
        m, sums, acc = state
    if SINKS is not None:
        sums += exp_of_sink(SINKS, head, True, m)
    acc = acc / sums[:, None]
    dims = tl.arange(0, DIMS)
    out = OUT + tokens[:, None] * out_strides[0] + head * out_strides[1] + dims[None, :]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=live)


class PrefillAttention:
    """The kernel for one kind of layers. `list_tiles` once per step serves all kinds of one BLOCK_M."""

    def __init__(self, spec: AttentionSpec, block_size: int, max_num_seqs: int, device: torch.device,
                 config: PrefillConfig) -> None:
        self.spec, self.block_size, self.config = spec, block_size, config
        self.search_steps = max(1, max_num_seqs.bit_length())
        self.use_tma = Device.of(device).has_tma and block_size % config.block_n == 0
        self.use_tma &= spec.head_dim == padded_dims(spec.head_dim)

    def list_tiles(self, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The list of tiles, int32 [cdiv(num_tokens, BLOCK_M) + rows, 2], of rows cu_seqlens_q int32 [rows + 1] (which
        may start at any token; a padded step may have more of them than max_num_seqs) with context_lens int32 [rows].
        num_tokens: any bound on their tokens."""
        num_rows = context_lens.shape[0]
        num_tiles = triton.cdiv(num_tokens, self.config.block_m) + num_rows
        tiles = torch.empty(num_tiles, 2, dtype=torch.int32, device=cu_seqlens_q.device)
        list_tiles_kernel[(triton.cdiv(num_tiles, 64),)](
            cu_seqlens_q, context_lens, tiles, num_tiles, num_rows, BLOCK_M=self.config.block_m,
            SEARCH_STEPS=max(self.search_steps, num_rows.bit_length()), BLOCK=64, num_warps=4)
        return tiles

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
                 row_slot: torch.Tensor, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, tiles: torch.Tensor,
                 out: torch.Tensor, sinks: torch.Tensor | None = None,
                 kv_scales: torch.Tensor | None = None, mixed: bool = False) -> torch.Tensor:
        """q and out [T, Hq, D], tokens numbered as in cu_seqlens_q. kv_scales: KVCache's, or packed ones. mixed: see
        KVCache."""
        c, spec = self.config, self.spec
        k = paged_descriptor(k_cache, c.block_n) if self.use_tma else k_cache
        v = paged_descriptor(v_cache, c.block_n) if self.use_tma and not mixed else v_cache
        scales = kv_scales.view(torch.int32) if kv_scales is not None and kv_scales.itemsize == 2 else kv_scales
        scale_stride = None if scales is None else scales.stride(0)
        if scales is not None and scales.dtype == torch.int64 and self.use_tma:
            scales = paged_descriptor(scales, c.block_n)
        prefill_attention_kernel[(tiles.shape[0] * spec.num_heads,)](
            q, k, v, scales, sinks, out, block_table, row_slot, cu_seqlens_q, context_lens, tiles, spec.scale * LOG2_E,
            spec.window or 0, q.stride()[:2], k_cache.stride()[:3], v_cache.stride()[:3],
            scale_stride, block_table.stride(0), out.stride()[:2], HQ=spec.num_heads, G=spec.group_size,
            D=spec.head_dim, PAGE=self.block_size, BLOCK_M=c.block_m, BLOCK_N=c.block_n,
            CAP=spec.softcap and spec.softcap * LOG2_E,
            WINDOWED=spec.window is not None, TMA=self.use_tma, FIXED=c.fixed_order, MIXED=mixed, num_warps=c.num_warps,
            num_stages=c.num_stages, enable_fp_fusion=not c.fixed_order)
        return out
