"""Paged split-KV attention for rows with one query token, over a work list that the device builds itself.

A row's keys are cut into chunks at offsets that depend on the row's own length, so that its result does not depend on
its neighbours (within a class of batch sizes: see decode_plan.py). The chunks of all rows form one list, long
ones first; a fixed number of programs walks it, so the grid does not depend on lengths, and ragged batches spread
evenly. A chunk that is not its row's only one leaves a normalised partial result and its log-sum-exp; a
second kernel merges them, in order. (Merging in the program that finishes a row last saves that launch, but its memory
fence stalls the program behind all that it has in flight: slower in every case measured.)
The idea of fixed split offsets with a merge by log-sum-exp is Flash-Decoding's (Dao et al., 2023).
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.attention.decode_plan import DecodeConfig, plan_decode_kernel, tuning
from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.base.device_features import supports_tma
from nanovllm.kernels.base.paged_tma import paged_descriptor
from nanovllm.kernels.base.pdl import pdl_options
from nanovllm.kernels.base.prefetch import prefetch_lines

LOG2_E = 1.4426950408889634


@triton.jit
def _look_up(TABLE_ROW, start, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block of the tile at key `start` (one for each key where tiles do not divide pages); block 0 past `end`."""
    if PAGE % BLOCK_N == 0:
        return tl.load(TABLE_ROW + start // PAGE, mask=start < end, other=0)
    else:
        tokens = start + tl.arange(0, BLOCK_N)
        return tl.load(TABLE_ROW + tokens // PAGE, mask=tokens < end, other=0)


@triton.jit
def _load_tile(CACHE, kv_head, block, start, end, stride_block, stride_head, stride_token, D: tl.constexpr,
               PAGE: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    """Keys (or values) start .. start + BLOCK_N of a row as [BLOCK_N, D]; finite from `end` on (zero without TMA)."""
    if TMA:
        return CACHE.load([block, kv_head, start % PAGE, 0]).reshape(BLOCK_N, D)
    else:
        tokens = tl.arange(0, BLOCK_N)
        dims = tl.arange(0, D)[None, :]
        if PAGE % BLOCK_N == 0:
            tile = CACHE + block.to(tl.int64) * stride_block + kv_head * stride_head + start % PAGE * stride_token
            pointers = tile + ((tokens * stride_token)[:, None] + dims)
        else:
            tile = CACHE + block.to(tl.int64) * stride_block + kv_head * stride_head
            pointers = (tile + (start + tokens) % PAGE * stride_token)[:, None] + dims
        return tl.load(pointers, mask=(start + tokens < end)[:, None], other=0.0)


@triton.jit
def _prefetch_tile(CACHE, kv_head, block, start, stride_block, stride_head, stride_token, D: tl.constexpr,
                   PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Has the L2 cache fetch a tile that lies within a page: its lines of 128 bytes, or each token's first one."""
    LINE: tl.constexpr = 128 * 8 // CACHE.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = D // LINE if D >= LINE else 1
    tile = CACHE + block.to(tl.int64) * stride_block + kv_head * stride_head + start % PAGE * stride_token
    prefetch_lines(tile + (tl.arange(0, BLOCK_N) * stride_token)[:, None] + (tl.arange(0, LINES) * LINE)[None, :])


@triton.jit
def _attend(q, k, v, m, sums, acc, scale_log2, start, end, BLOCK_N: tl.constexpr):
    """One tile of online softmax, in units of log2: running maximum m [H], running sums [H, BLOCK_N] of each column of
    the tiles (added up once a chunk, not once a tile), unnormalised output acc [H, D]."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    scores = tl.where((start + tl.arange(0, BLOCK_N) < end)[None, :], scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp2(scores - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    sums = sums * alpha[:, None] + p
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, sums, acc


@triton.jit
def merge_chunks_kernel(PARTIAL, LSE, OUT, NUM_CHUNKS, out_token, out_head, HQ: tl.constexpr, HEADS: tl.constexpr,
                        D: tl.constexpr, MAX_SPLITS: tl.constexpr, PDL: tl.constexpr):
    """Merges the rows that have several chunks, one chunk after the other. A program takes HEADS query heads of a row,
    of the HQ there are; where most rows have nothing to merge, the number of programs is all it costs."""
    AT_ONCE: tl.constexpr = 8 if MAX_SPLITS >= 8 else MAX_SPLITS
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_chunks = tl.load(NUM_CHUNKS + row)  # the plan's, as below
    if PDL:
        tl.extra.cuda.gdc_wait()
    if num_chunks > 1:
        heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        dims = tl.arange(0, D)[None, :]
        splits = tl.arange(0, MAX_SPLITS)[None, :]
        first = (row * HQ + heads) * MAX_SPLITS
        known = (heads < HQ)[:, None] & (splits < num_chunks)
        lse = tl.load(LSE + first[:, None] + splits, mask=known, other=float("-inf"))
        top = tl.where(heads < HQ, tl.max(lse, 1), 0.0)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, D], tl.float32)
        for begin in tl.static_range(0, MAX_SPLITS, AT_ONCE):
            if begin < num_chunks:
                for i in tl.static_range(AT_ONCE):
                    entry = first + begin + i
                    there = (heads < HQ) & (begin + i < num_chunks)
                    weight = tl.exp2(tl.load(LSE + entry, mask=there, other=float("-inf")) - top)
                    value = tl.load(PARTIAL + entry[:, None] * D + dims, mask=there[:, None], other=0.0)
                    total += weight
                    acc += value * weight[:, None]
        pointers = OUT + row * out_token + heads[:, None] * out_head + dims
        tl.store(pointers, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=(heads < HQ)[:, None])


@triton.jit
def _finish_chunk(m, sums, acc, OUT, PARTIAL, LSE, row, kv_head, chunk_of, out_token, out_head,
                  HKV: tl.constexpr, G: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Stores a chunk's result: where it is its row's only one, the row's."""
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, D)
    chunk = chunk_of & 0xFFFF
    total = tl.sum(sums, 1)
    o = acc / total[:, None]
    if chunk_of >> 16 == 1:
        OUT_HEADS = OUT + row * out_token + kv_head * G * out_head
        tl.store(OUT_HEADS + heads[:, None] * out_head + dims[None, :], o.to(OUT.dtype.element_ty),
                 mask=(heads < G)[:, None])
    else:
        entries = ((row * HKV + kv_head) * G + heads) * MAX_SPLITS + chunk
        tl.store(LSE + entries, m + tl.log2(total), mask=heads < G)
        tl.store(PARTIAL + entries[:, None] * D + dims[None, :], o, mask=(heads < G)[:, None])


@triton.jit
def _count_tiles(WORK, num_items, HKV: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles in all items of this program but its first."""
    AT_ONCE: tl.constexpr = 64
    tiles = 0
    for first in range(tl.program_id(0) + tl.num_programs(0), num_items, AT_ONCE * tl.num_programs(0)):
        items = first + tl.arange(0, AT_ONCE) * tl.num_programs(0)
        entry = WORK + items // HKV * 4
        start = tl.load(entry + 1, mask=items < num_items, other=0)
        end = tl.load(entry + 2, mask=items < num_items, other=0)
        tiles += tl.sum((end - start + BLOCK_N - 1) // BLOCK_N, 0)
    return tiles


@triton.jit
def _load_item(WORK, item, mask, row_and_slot, start, end, chunk_of, HKV: tl.constexpr):
    """The item's entry of the work list where mask is true, else the values given."""
    entry = WORK + item // HKV * 4
    row_and_slot = tl.load(entry, mask=mask, other=row_and_slot)
    start = tl.load(entry + 1, mask=mask, other=start)
    end = tl.load(entry + 2, mask=mask, other=end)
    chunk_of = tl.load(entry + 3, mask=mask, other=chunk_of)
    return row_and_slot, start, end, chunk_of


@triton.jit(do_not_specialize=["table_stride"])
def decode_attention_kernel(Q, K, V, K_CACHE, V_CACHE, OUT, TABLE, WORK, NUM_WORK, PARTIAL, LSE, scale_log2,
                            q_token, q_head, k_block, k_head, k_token, v_block, v_head, v_token, table_stride,
                            out_token, out_head, HKV: tl.constexpr, G: tl.constexpr,
                            BLOCK_H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
                            TMA: tl.constexpr, MAX_SPLITS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr):
    """See decode_attention_reference. An item of work is one chunk of one row for one key head and its G query heads. A
    program runs the tiles of all its items in one loop, so that the next item's keys are on their way while this one's
    result is stored. K and V are tensor descriptors with TMA, else K_CACHE and V_CACHE themselves.

    With PDL the way to the first tile is gone before the queries are there. What it reads is the plan's, and between
    the plan and this kernel stand ordinary ones (the embedding), so it is complete. EARLY: the next kernel may come at
    once; else when this one begins to work, which spares it programs that only wait (0.3 % of a step)."""
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, D)
    num_items = tl.load(NUM_WORK) * HKV
    item = tl.program_id(0)
    step = tl.num_programs(0)
    # The first entry is read before it is known to be one, which it is in all but the smallest batches.
    row_and_slot, n, end, chunk_of = _load_item(WORK, item, True, 0, 0, 0, 0, HKV)
    end = tl.where(item < num_items, end, n)
    tiles = (end - n + BLOCK_N - 1) // BLOCK_N + _count_tiles(WORK, num_items, HKV, BLOCK_N)
    next_row_and_slot, next_start, next_end, next_chunk_of = _load_item(WORK, item + step, item + step < num_items,
                                                                        0, 0, 0, 0, HKV)
    block = _look_up(TABLE + (row_and_slot >> 16).to(tl.int64) * table_stride, n, end, PAGE, BLOCK_N)
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_H, D], tl.float32)
    if PDL:
        if PAGE % BLOCK_N == 0:
            _prefetch_tile(K_CACHE, item % HKV, block, n, k_block, k_head, k_token, D, PAGE, BLOCK_N)
            _prefetch_tile(V_CACHE, item % HKV, block, n, v_block, v_head, v_token, D, PAGE, BLOCK_N)
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    for _ in range(tiles):
        row = (row_and_slot & 0xFFFF).to(tl.int64)
        kv_head = item % HKV
        k = _load_tile(K, kv_head, block, n, end, k_block, k_head, k_token, D, PAGE, BLOCK_N, TMA)
        v = _load_tile(V, kv_head, block, n, end, v_block, v_head, v_token, D, PAGE, BLOCK_N, TMA)
        q = tl.load(Q + row * q_token + (kv_head * G + heads[:, None]) * q_head + dims[None, :],
                    mask=(heads < G)[:, None], other=0.0)
        m, sums, acc = _attend(q, k, v, m, sums, acc, scale_log2, n, end, BLOCK_N)
        is_last = n + BLOCK_N >= end
        if is_last:
            _finish_chunk(m, sums, acc, OUT, PARTIAL, LSE, row, kv_head, chunk_of, out_token, out_head,
                          HKV, G, BLOCK_H, D, MAX_SPLITS)
            m = tl.full([BLOCK_H], float("-inf"), tl.float32)
            sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
            acc = tl.zeros([BLOCK_H, D], tl.float32)
        # The next tile's whereabouts, all looked up an iteration or more before they are needed.
        n = tl.where(is_last, next_start, n + BLOCK_N)
        end = tl.where(is_last, next_end, end)
        row_and_slot = tl.where(is_last, next_row_and_slot, row_and_slot)
        chunk_of = tl.where(is_last, next_chunk_of, chunk_of)
        item = tl.where(is_last, item + step, item)
        block = _look_up(TABLE + (row_and_slot >> 16).to(tl.int64) * table_stride, n, end, PAGE, BLOCK_N)
        next_row_and_slot, next_start, next_end, next_chunk_of = _load_item(
            WORK, item + step, is_last & (item + step < num_items), next_row_and_slot, next_start, next_end,
            next_chunk_of, HKV)


def decode_attention_reference(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, row_slot: torch.Tensor,
                               context_lens: torch.Tensor, block_table: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of q [R, Hq, D] over each row's first context_lens[r] keys, in float32 (float64 for float64 input).

    k_cache, v_cache [blocks, Hkv, block_size, D]; row_slot, context_lens int32 [R], with slot -1 or no keys the row
    comes out as zeros; block_table int32 [slots, max_blocks]. Returns [R, Hq, D].
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    num_kv_heads, block_size = k_cache.shape[1:3]
    for r, (slot, length) in enumerate(zip(row_slot.tolist(), context_lens.tolist(), strict=True)):
        if slot < 0 or length == 0:
            continue
        blocks = block_table[slot, : -(-length // block_size)].long()
        k, v = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].to(dtype) for cache in (k_cache, v_cache))
        grouped = q[r].to(dtype).view(num_kv_heads, -1, q.shape[-1])
        out[r] = (torch.softmax(grouped @ k.mT * scale, -1) @ v).flatten(0, 1)
    return out


class DecodeAttention:
    """The kernel with its workspace: `plan` once per step, then `__call__` once per layer. Serves any batch up to
    max_num_seqs from one set of buffers; nothing is allocated after construction."""

    def __init__(self, spec: AttentionSpec, block_size: int, max_num_seqs: int, max_model_len: int,
                 device: torch.device, config: DecodeConfig | None = None) -> None:
        num_q_heads, num_kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.num_q_heads, self.num_kv_heads, self.head_dim = num_q_heads, num_kv_heads, head_dim
        self.block_size, self.max_num_seqs = block_size, max_num_seqs
        self.tuning = tuning(num_kv_heads) if config is None else ((None, config),)
        self.group = num_q_heads // num_kv_heads
        self.scale_log2 = spec.scale * LOG2_E
        self.max_model_len = max_model_len
        splits = max(self._max_splits(config) for _, config in self.tuning)
        is_cuda = device.type == "cuda"
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1
        self.has_tma = supports_tma(device)
        self.work = torch.zeros(max_num_seqs * splits, 4, dtype=torch.int32, device=device)
        self.num_work = torch.zeros(1, dtype=torch.int32, device=device)
        self.num_chunks = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.partial = torch.zeros(max_num_seqs, num_q_heads, splits, head_dim, dtype=torch.float32, device=device)
        self.lse = torch.zeros(max_num_seqs, num_q_heads, splits, dtype=torch.float32, device=device)

    def _config(self, num_rows: int) -> DecodeConfig:
        return next(config for most, config in self.tuning if most is None or num_rows <= most)

    def _max_splits(self, config: DecodeConfig) -> int:
        return min(config.max_splits, triton.next_power_of_2(triton.cdiv(self.max_model_len, config.min_chunk)))

    def size_classes(self) -> list[int]:
        """The largest batch of each: they differ by configuration, and their plans by power of two of rows."""
        powers = (16 << n for n in range(self.max_num_seqs.bit_length()))
        limits = {*powers, *(most for most, _ in self.tuning if most)}
        return sorted({min(most, self.max_num_seqs) for most in limits})

    def plan(self, row_slot: torch.Tensor, context_lens: torch.Tensor, num_rows: int) -> None:
        """Builds the work list of a step from int32 [num_rows] tensors, on the device."""
        config = self._config(num_rows)
        splits, num_classes = self._max_splits(config), 1
        while config.min_chunk * splits << (num_classes - 1) < self.max_model_len:
            num_classes += 1
        rows_per_program = 16
        plan_decode_kernel[(triton.cdiv(num_rows, rows_per_program),)](
            row_slot, context_lens, self.work, self.num_work, self.num_chunks, num_rows,
            MIN_CHUNK=config.min_chunk, MAX_SPLITS=splits, NUM_CLASSES=num_classes, TAIL_CLASSES=12,
            ROWS_PADDED=max(16, triton.next_power_of_2(num_rows)), ROWS_PER_PROGRAM=rows_per_program, num_warps=4)

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
                 max_context_len: int, out: torch.Tensor, merge_first: bool = False) -> torch.Tensor:
        """q and out [num_rows, Hq, D]: the rows of the last plan. max_context_len: any bound on their lengths.
        merge_first: where chunks are merged, nothing behind this may start before they are."""
        num_rows = q.shape[0]
        c = self._config(num_rows)
        splits = self._max_splits(c)
        most_chunks = min(splits, c.most_chunks(max_context_len))
        use_tma = c.use_tma and self.has_tma and self.block_size % c.block_n == 0
        k, v = (paged_descriptor(x, c.block_n) if use_tma else x for x in (k_cache, v_cache))
        programs = min(self.num_sms * c.programs_per_sm, num_rows * self.num_kv_heads * most_chunks)
        dependent = pdl_options(q.device)
        decode_attention_kernel[(programs,)](
            q, k, v, k_cache, v_cache, out, block_table, self.work, self.num_work, self.partial, self.lse,
            self.scale_log2, q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
            block_table.stride(0), out.stride(0), out.stride(1), HKV=self.num_kv_heads, G=self.group,
            BLOCK_H=max(16, triton.next_power_of_2(self.group)), D=self.head_dim, PAGE=self.block_size,
            BLOCK_N=c.block_n, TMA=use_tma, MAX_SPLITS=splits, num_warps=c.num_warps,
            num_stages=c.num_stages, maxnreg=c.max_registers, EARLY=num_rows == 1, **dependent)
        if most_chunks > 1:
            merge_chunks_kernel[(num_rows, triton.cdiv(self.num_q_heads, c.merge_heads))](
                self.partial, self.lse, out, self.num_chunks, out.stride(0), out.stride(1), HQ=self.num_q_heads,
                HEADS=c.merge_heads, D=self.head_dim, MAX_SPLITS=splits, num_warps=1 if c.merge_heads == 1 else 4,
                **pdl_options(q.device, not merge_first))
        return out
