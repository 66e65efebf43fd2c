"""Paged causal attention for rows with any number of query tokens (prompt chunks, with or without a cached prefix).

The rows are cut into tiles of BLOCK_M queries; a small kernel lists the tiles once a step, those with most keys first,
so the grid depends on the number of tokens and rows alone (CUDA graphs) and the causal triangle leaves no long tail.
Keys are tiled from the row's first token on: a query's result does not depend on how its prompt was cut into chunks.
The online softmax is FlashAttention-2's (Dao, 2023).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.base.device_features import supports_tma
from nanovllm.kernels.base.paged_tma import paged_descriptor

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class PrefillConfig:
    """Tuning of the kernel."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 2
    use_tma: bool = True
    """Load keys and values by tensor descriptors where a page holds whole tiles (compute capability 9.0 and later)."""


@triton.jit
def _tiles(CU_SEQLENS, CONTEXT_LENS, tile, num_rows, BLOCK_M: tl.constexpr, SEARCH_STEPS: tl.constexpr):
    """For a vector of tile indices: row, first query within the row, and the keys that the tile's last query sees; no
    keys where the index belongs to no queries. Row r's tiles start at index cu_seqlens[r] // BLOCK_M + r, which leaves
    room for the partly filled tile of every row before it."""
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
def plan_prefill_kernel(CU_SEQLENS, CONTEXT_LENS, TILES, num_tiles, num_rows, BLOCK_M: tl.constexpr,
                        SEARCH_STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """See plan_prefill_reference. A tile's place is the number of tiles that come before it."""
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


def plan_prefill_reference(cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor,
                           block_m: int) -> list[tuple[int, int]]:
    """(row, first query within the row) of every tile, those with most keys first."""
    starts, tiles = cu_seqlens_q.tolist(), []
    for row, context in enumerate(context_lens.tolist()):
        count = starts[row + 1] - starts[row]
        for query in range(0, count if context else 0, block_m):
            tiles.append((-min(context, context - count + query + block_m), row, query))
    return [(row, query) for _, row, query in sorted(tiles, key=lambda tile: tile[0])]


@triton.jit
def _load_tile(CACHE, TABLE_ROW, kv_head, start, end, stride_block, stride_head, stride_token,
               D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    """Keys (or values) start .. start + BLOCK_N of a row as [BLOCK_N, D]; finite also past `end`."""
    tokens = start + tl.arange(0, BLOCK_N)
    if TMA:
        block = tl.load(TABLE_ROW + start // PAGE)
        return CACHE.load([block, kv_head, start % PAGE, 0]).reshape(BLOCK_N, D)
    elif PAGE % BLOCK_N == 0:  # a tile never leaves its page, and what its page holds past the row's end is finite
        block = tl.load(TABLE_ROW + start // PAGE).to(tl.int64)
        tile = CACHE + block * stride_block + kv_head * stride_head + start % PAGE * stride_token
        return tl.load(tile + (tl.arange(0, BLOCK_N) * stride_token)[:, None] + tl.arange(0, D)[None, :])
    else:
        block = tl.load(TABLE_ROW + tokens // PAGE, mask=tokens < end, other=0).to(tl.int64)
        rows = CACHE + block * stride_block + kv_head * stride_head + (tokens % PAGE) * stride_token
        return tl.load(rows[:, None] + tl.arange(0, D)[None, :], mask=(tokens < end)[:, None], other=0.0)


@triton.jit
def _attend(q, k, v, m, sums, acc, scale_log2, start, position, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """One tile of online softmax; the query at `position` sees keys up to itself."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        visible = (start + tl.arange(0, BLOCK_N))[None, :] <= position[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale_log2)
    p = tl.exp2(scores * scale_log2 - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    sums = sums * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, sums, acc


@triton.jit(do_not_specialize=["ROW_SLOT", "CU_SEQLENS", "CONTEXT_LENS", "table_stride"])
def prefill_attention_kernel(Q, K, V, OUT, TABLE, ROW_SLOT, CU_SEQLENS, CONTEXT_LENS, TILES, scale_log2,
                             q_token, q_head, k_block, k_head, k_token, v_block, v_head, v_token, table_stride,
                             out_token, out_head, HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
                             PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    """See prefill_attention_reference. A program computes one tile of queries of one head; the heads of a tile run side
    by side, so that those which share keys find them in the L2 cache."""
    tile = tl.program_id(0) // HQ
    head = tl.program_id(0) % HQ
    row = tl.load(TILES + tile * 2)
    if row < 0:
        return
    query = tl.load(TILES + tile * 2 + 1)
    token = tl.load(CU_SEQLENS + row)
    count = tl.load(CU_SEQLENS + row + 1) - token
    context = tl.load(CONTEXT_LENS + row)
    TABLE_ROW = TABLE + tl.load(ROW_SLOT + row).to(tl.int64) * table_stride

    queries = query + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D)
    position = context - count + queries
    q_rows = (token + queries).to(tl.int64)
    q = tl.load(Q + q_rows[:, None] * q_token + head * q_head + dims[None, :], mask=(queries < count)[:, None],
                other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    kv_head = head // G
    end = tl.minimum(context, context - count + query + BLOCK_M)
    # Tiles that even the first query sees whole need no mask.
    end_full = (context - count + query + 1) // BLOCK_N * BLOCK_N
    for n in range(0, end_full, BLOCK_N):
        k = _load_tile(K, TABLE_ROW, kv_head, n, end, k_block, k_head, k_token, D, PAGE, BLOCK_N, TMA)
        v = _load_tile(V, TABLE_ROW, kv_head, n, end, v_block, v_head, v_token, D, PAGE, BLOCK_N, TMA)
        m, sums, acc = _attend(q, k, v, m, sums, acc, scale_log2, n, position, BLOCK_N, False)
    for n in range(end_full, end, BLOCK_N):
        k = _load_tile(K, TABLE_ROW, kv_head, n, end, k_block, k_head, k_token, D, PAGE, BLOCK_N, TMA)
        v = _load_tile(V, TABLE_ROW, kv_head, n, end, v_block, v_head, v_token, D, PAGE, BLOCK_N, TMA)
        m, sums, acc = _attend(q, k, v, m, sums, acc, scale_log2, n, position, BLOCK_N, True)
    acc = acc / sums[:, None]
    tl.store(OUT + q_rows[:, None] * out_token + head * out_head + dims[None, :], acc.to(OUT.dtype.element_ty),
             mask=(queries < count)[:, None])


def prefill_attention_reference(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, row_slot: torch.Tensor,
                                cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, block_table: torch.Tensor,
                                scale: float) -> torch.Tensor:
    """Causal attention of q [T, Hq, D], in float32 (float64 for float64 input). A row's last query sees context_lens[r]
    keys, the one before it one less. Tokens of no row come out as zeros.

    k_cache, v_cache [blocks, Hkv, block_size, D]; row_slot int32 [R], -1 for padding; cu_seqlens_q int32 [R + 1], where
    each row's tokens start; context_lens int32 [R]; block_table int32 [slots, max_blocks]. Returns [T, Hq, D].
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    starts, group, block_size = cu_seqlens_q.tolist(), q.shape[1] // k_cache.shape[1], k_cache.shape[2]
    for r, (slot, context) in enumerate(zip(row_slot.tolist(), context_lens.tolist(), strict=True)):
        tokens = slice(starts[r], starts[r + 1])
        if slot < 0 or context == 0 or tokens.start == tokens.stop:
            continue
        blocks = block_table[slot, : -(-context // block_size)].long()
        k, v = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context].to(dtype).repeat_interleave(group, 0)
                for cache in (k_cache, v_cache))
        scores = q[tokens].to(dtype).transpose(0, 1) @ k.mT * scale
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(context - scores.shape[-2])
        out[tokens] = (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v).transpose(0, 1)
    return out


class PrefillAttention:
    """The kernel with its list of tiles: `plan` once per step, then `__call__` once per layer."""

    def __init__(self, spec: AttentionSpec, block_size: int, max_num_seqs: int, device: torch.device,
                 config: PrefillConfig | None = None) -> None:
        self.num_q_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.block_size = block_size
        self.config = config or PrefillConfig()
        self.scale_log2 = spec.scale * LOG2_E
        self.search_steps = max(1, max_num_seqs.bit_length())
        self.use_tma = self.config.use_tma and supports_tma(device) and block_size % self.config.block_n == 0

    def plan(self, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The list of tiles, int32 [cdiv(num_tokens, BLOCK_M) + rows, 2], of rows cu_seqlens_q int32 [rows + 1] (which
        may start at any token; a padded step may have more of them than max_num_seqs) with context_lens int32 [rows].
        num_tokens: any bound on their tokens."""
        num_rows = context_lens.shape[0]
        num_tiles = triton.cdiv(num_tokens, self.config.block_m) + num_rows
        tiles = torch.empty(num_tiles, 2, dtype=torch.int32, device=cu_seqlens_q.device)
        plan_prefill_kernel[(triton.cdiv(num_tiles, 64),)](
            cu_seqlens_q, context_lens, tiles, num_tiles, num_rows, BLOCK_M=self.config.block_m,
            SEARCH_STEPS=max(self.search_steps, num_rows.bit_length()), BLOCK=64, num_warps=4)
        return tiles

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
                 row_slot: torch.Tensor, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, tiles: torch.Tensor,
                 out: torch.Tensor) -> torch.Tensor:
        """q and out [T, Hq, D], tokens numbered as in cu_seqlens_q."""
        c = self.config
        k, v = (paged_descriptor(x, c.block_n) if self.use_tma else x for x in (k_cache, v_cache))
        prefill_attention_kernel[(tiles.shape[0] * self.num_q_heads,)](
            q, k, v, out, block_table, row_slot, cu_seqlens_q, context_lens, tiles, self.scale_log2,
            q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0),
            out.stride(0), out.stride(1), HQ=self.num_q_heads, G=self.num_q_heads // self.num_kv_heads, D=self.head_dim,
            PAGE=self.block_size, BLOCK_M=c.block_m, BLOCK_N=c.block_n, TMA=self.use_tma,
            num_warps=c.num_warps, num_stages=c.num_stages)
        return out
