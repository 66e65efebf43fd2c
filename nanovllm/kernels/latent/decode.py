"""Decode attention over latents (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1): all query heads share one key a
token, and its first dimensions are its value. A tile of keys is loaded once for both products, and for as many heads
as a program has lanes.

Work lists, chunks and their merge are those of kernels/attention/, with blocks of query heads in place of key heads.
"""

from typing import Any

import torch

from nanovllm.kernels.attention.chunks import finish_chunk, lanes_of, load_lanes, new_chunk, visible_keys
from nanovllm.kernels.attention.decode import DecodeScratch, merge_chunks
from nanovllm.kernels.attention.decode_work_list import DecodeConfig, Tuning, WorkList
from nanovllm.kernels.attention.pages import keys_within, load_tile, look_up
from nanovllm.kernels.attention.scores import LOG2_E, padded_dims, softmax_step
from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.attention.work_list import load_item, prefetch_in_page
from nanovllm.kernels.base.device import paged_descriptor, pdl_options
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.plan.device import Device

_LANES = 64
"""Query heads of a program, at most: their outputs take the registers of eight warps."""
_FEW_LANES = 16
"""Query heads where there is little shared memory, and of places together."""
MOST_SHARED = 190_000
"""Bytes of shared memory that full tiles take; with less they are shorter, and not loaded ahead."""
_TILES = {16: (32, 4, 3, 2), 32: (64, 8, 3, 1), 64: (32, 8, 3, 1)}
"""Lanes -> keys of a tile, warps, stages, programs a multiprocessor. Measured on an H200, as the table below."""


def _chunks(min_chunk: int, max_splits: int, merge_heads: int = 8) -> DecodeConfig:
    return DecodeConfig(block_n=64, min_chunk=min_chunk, max_splits=max_splits, merge_heads=merge_heads)


LATENT_TUNING: Tuning = (
    (2, _chunks(64, 64, merge_heads=1)), (8, _chunks(256, 32, merge_heads=1)), (32, _chunks(256, 16)),
    (96, _chunks(512, 16)), (None, _chunks(1024, 16)),
)  # fmt: skip
"""Table (most rows, how they are cut), whatever the heads."""


@triton.jit
def attend_latents(q, q_rope, latent, rope, state, scale_log2, visible):
    """One tile of online softmax: queries q [H, L] and q_rope [H, R], keys latent [N, L] and rope [N, R], of which
    latent is the value too. state: running maximum m [H], sums [H, N] of each column of the tiles, unnormalised output
    [H, L]. visible bool [H or 1, N]."""
    m, sums, acc = state
    scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
    m_new, p, alpha = softmax_step(tl.where(visible, scores, float("-inf")), m, scale_log2)
    sums = sums * alpha[:, None] + p
    acc = tl.dot(p.to(latent.dtype), latent, acc * alpha[:, None], input_precision="ieee")
    return m_new, sums, acc


@triton.jit
def block_at(TABLE_ROW, n, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """look_up of the tile at key n, which may lie past `end`."""
    known = n < end if PAGE % BLOCK_N == 0 else keys_within(n, 0, end, BLOCK_N, False)
    return look_up(TABLE_ROW, n, known, PAGE, BLOCK_N)


@triton.jit(do_not_specialize=["table_stride"])
def latent_decode_kernel(Q, LATENT, ROPE, CACHE, OUT, TABLE, WORK, NUM_WORK, PARTIAL, LSE, scale_log2, q_strides,
                         strides, table_stride, out_strides, BLOCKS: tl.constexpr, G: tl.constexpr,
                         LANES: tl.constexpr, L: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
                         BLOCK_N: tl.constexpr, TMA: tl.constexpr, MAX_SPLITS: tl.constexpr, PDL: tl.constexpr,
                         ENDS=None, PLACES: tl.constexpr = 1):
    """Attention of Q [rows, BLOCKS * G, L + R] into OUT [rows, BLOCKS * G, L], or PARTIAL and LSE as
    merge_chunks_kernel takes them. CACHE [blocks, 1, PAGE, L + R]; LATENT and ROPE are its two parts, descriptors with
    TMA. TABLE int32 [slots, blocks], WORK int32 [entries, 4] and NUM_WORK int32 [1] (work_list.py). An item is one
    chunk of one row for one block of G query heads; with PLACES above 1 see decode_attention_kernel. With PDL work list
    and block table are read before gdc_wait, as there."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place, heads = lanes_of(LANES, G, PLACES)
    dims, rope_dims = tl.arange(0, padded_dims(L)), tl.arange(0, padded_dims(R))
    num_items = tl.load(NUM_WORK) * BLOCKS
    if PDL:
        row_and_slot, n, end, _ = load_item(WORK, tl.program_id(0), tl.program_id(0) < num_items, (0, 0, 0, 0), BLOCKS)
        if PAGE % BLOCK_N == 0:
            block = block_at(TABLE + (row_and_slot >> 16).to(tl.int64) * table_stride, n, end, PAGE, BLOCK_N)
            prefetch_in_page(CACHE, 0, block, n, strides, L + R, PAGE, BLOCK_N)
        tl.extra.cuda.gdc_wait()
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row_and_slot, first, end, chunk_of = load_item(WORK, item, True, (0, 0, 0, 0), BLOCKS)
        TABLE_ROW = TABLE + (row_and_slot >> 16).to(tl.int64) * table_stride
        row, heads_block = (row_and_slot & 0xFFFF).to(tl.int64), item % BLOCKS
        own_end = tl.load(ENDS + row * PLACES + place, mask=place < PLACES, other=0) if PLACES > 1 else end
        q = load_lanes(Q, row, place, heads_block, heads, dims, own_end, q_strides, G, L, PLACES)
        q_rope = load_lanes(Q + L, row, place, heads_block, heads, rope_dims, own_end, q_strides, G, R, PLACES)
        state = new_chunk(LANES, BLOCK_N, padded_dims(L), False, False, PLACES)
        block = block_at(TABLE_ROW, first, end, PAGE, BLOCK_N)
        for n in range(first, end, BLOCK_N):
            known = None if TMA else keys_within(n, first, end, BLOCK_N, False)
            latent = load_tile(LATENT, block, 0, n, known, strides, L, PAGE, BLOCK_N, TMA)
            rope = load_tile(ROPE, block, 0, n, known, strides, R, PAGE, BLOCK_N, TMA)
            visible = visible_keys(n, first, own_end, None, BLOCK_N, False, False, PLACES)
            block = block_at(TABLE_ROW, n + BLOCK_N, end, PAGE, BLOCK_N)
            state = attend_latents(q, q_rope, latent, rope, state, scale_log2, visible)
        finish_chunk(state, OUT, None, PARTIAL, LSE, None, row, heads_block, chunk_of, out_strides, BLOCKS, G, L,
                     MAX_SPLITS, False, False, PLACES, own_end)


def latent_descriptors(spec: AttentionSpec, device: torch.device) -> bool:
    """Whether tensor descriptors load keys of this kind: both parts are powers of two wide."""
    rope = spec.head_dim - spec.out_dim
    return Device.of(device).has_tma and all(dims == padded_dims(dims) for dims in (spec.out_dim, rope))


def parts_of(cache: torch.Tensor, spec: AttentionSpec, block_n: int | None) -> list[Any]:
    """Latents and rope keys of cache [num_blocks, 1, block_size, head_dim]; descriptors for tiles of block_n keys."""
    parts = [cache[..., : spec.out_dim], cache[..., spec.out_dim :]]
    return parts if block_n is None else [paged_descriptor(part, block_n) for part in parts]


def head_blocks(num_heads: int, most: int = _LANES) -> int:
    """Number of equal blocks, of at most so many, that query heads are cut into."""
    return next(n for n in range(triton.cdiv(num_heads, most), num_heads + 1) if num_heads % n == 0)


def latent_tuning(num_kv_heads: int, head_dim: int, fp8: bool = False) -> Tuning:
    """LATENT_TUNING, whatever the sizes."""
    return LATENT_TUNING


class LatentWorkList(WorkList):
    """WorkList of layers with latents."""

    _tuned = staticmethod(latent_tuning)

    @classmethod
    def places_together(cls, places: int, group_size: int, head_dim: int, fp8: bool = False) -> int:
        return triton.cdiv(places, triton.cdiv(places, max(1, _FEW_LANES // group_size)))


class LatentDecode:
    """DecodeAttention for layers of one kind with a value_dim."""

    def __init__(self, spec: AttentionSpec, block_size: int, work_list: WorkList, scratch: DecodeScratch) -> None:
        self.spec, self.block_size, self.work_list, self.scratch = spec, block_size, work_list, scratch
        device = Device.of(scratch.lse.device)
        self.num_sms, self.is_small = device.processors, device.shared_bytes < MOST_SHARED
        self.has_tma = latent_descriptors(spec, scratch.lse.device)
        self.blocks = head_blocks(spec.num_heads, _FEW_LANES if self.is_small else _LANES)

    def __call__(self, q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, max_context_len: int,
                 out: torch.Tensor, merge_first: bool = False) -> torch.Tensor:
        """q [num_rows, H, head_dim] and out [num_rows, H, value_dim]: the rows of the last work list. cache
        [num_blocks, 1, block_size, head_dim]. The rest as DecodeAttention."""
        num_rows, spec, work_list, scratch = q.shape[0], self.spec, self.work_list, self.scratch
        splits, group = work_list.room(num_rows), spec.num_heads // self.blocks
        lanes = max(16, triton.next_power_of_2(work_list.together * group))
        block_n, warps, stages, at_once = _TILES[lanes]
        if self.is_small or q.dtype.itemsize > 2:
            block_n, warps, stages = 16, 8, 1
        most_chunks = work_list.most_chunks(num_rows, max_context_len)
        use_tma = self.has_tma and self.block_size % block_n == 0
        programs = min(self.num_sms * at_once, num_rows * self.blocks * most_chunks)
        latent_decode_kernel[(programs,)](
            q, *parts_of(cache, spec, block_n if use_tma else None), cache, out, block_table, work_list.entries,
            work_list.num_entries, scratch.partial, scratch.lse, spec.scale * LOG2_E, q.stride()[:2],
            cache.stride()[:3], block_table.stride(0), out.stride()[:2], BLOCKS=self.blocks, G=group, LANES=lanes,
            L=spec.out_dim, R=spec.head_dim - spec.out_dim, PAGE=self.block_size, BLOCK_N=block_n, TMA=use_tma,
            MAX_SPLITS=splits, ENDS=work_list.ends, PLACES=work_list.together, num_warps=warps, num_stages=stages,
            enable_fp_fusion=True, **pdl_options(q.device))
        if most_chunks > 1:
            merge_chunks(spec, work_list, scratch, num_rows, out, merge_first)
        return out
