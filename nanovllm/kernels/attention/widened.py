"""Copies in float16 of the e4m3 keys and values that a step's prompt rows read.

Prefill attention would widen each in registers once for every head and tile of queries, and the tensor cores wait for
that. Read from a copy, keys and values go by bulk copies, as 16 bits do, and tiles have as many queries. float16 holds
every e4m3, and the sums of a query have the same order whatever else is in its tile: results have the same bits.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from nanovllm.kernels.attention.e4m3 import packed_scales
from nanovllm.kernels.attention.prefill import PrefillAttention, PrefillConfig, prefill_config
from nanovllm.kernels.attention.scores import LOG2_E
from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.plan.device import Device

LEAST_QUERIES = 128
"""Queries that a key has to have on average, or its copy does not pay."""
LEAST_TOKENS = 512
"""Tokens of a step's prompts that pay for the launches; twice as many where the device chooses."""
MOST_BYTES = 136 << 20
"""Bytes of all copies: 34,048 keys of eight heads with 128 dimensions."""


def widened_config(head_dim: int, most_shared: int) -> PrefillConfig:
    """The tiling of 16 bits, with tiles of keys as e4m3 has them: they decide the order of sums."""
    block_n = prefill_config(head_dim, torch.float16, fp8=True).block_n
    return replace(prefill_config(head_dim, torch.float16, most_shared=most_shared), block_n=block_n)


def copy_room(specs: Collection[AttentionSpec], block_size: int, max_num_seqs: int, max_model_len: int,
              dtype: torch.dtype, device: Device) -> tuple[int, int]:
    """Number of copies that there is room for, and the bytes of all, for layers of these kinds over a cache in e4m3
    beside a model in `dtype`; none where the device would not read them faster."""
    can_load = specs and device.has_tma and dtype.itemsize == 2 and block_size % 64 == 0
    if not can_load or any(spec.value_dim is not None or spec.head_dim not in (64, 128, 256) for spec in specs):
        return 0, 0
    nbytes = block_size * max(spec.num_kv_heads * (4 * spec.head_dim + 8) for spec in specs)  # with scales
    num_blocks = min(MOST_BYTES // nbytes, max_num_seqs * -(-max_model_len // block_size))
    return num_blocks, num_blocks * nbytes


@triton.jit(do_not_specialize=["BLOCKS"])
def widen_kernel(K, V, SCALES, BLOCKS, WIDE_K, WIDE_V, PACKED, scale_log2, k_strides, v_strides, scale_stride,
                 H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr):
    """K, V e4m3 [blocks, H, PAGE, D] and SCALES int32 [blocks, H, PAGE] of the BLOCKS int32 [copies, 2], each a block
    (-1: none) and how many of its keys the row has, into WIDE_K, WIDE_V float16 [copies, H, PAGE, D] and PACKED int64
    [copies, H, PAGE], of packed_scales. Values and scales that the row does not have become zeros: see KVCache.mixed.
    """
    copy = tl.program_id(0) // (PAGE // TILE)
    head = tl.program_id(1)
    block = tl.load(BLOCKS + copy * 2).to(tl.int64)
    if block < 0:
        return
    tokens = tl.program_id(0) % (PAGE // TILE) * TILE + tl.arange(0, TILE)
    known = tokens < tl.load(BLOCKS + copy * 2 + 1)
    dims = tl.arange(0, D)[None, :]
    target = (copy.to(tl.int64) * H + head) * PAGE + tokens
    k = tl.load(K + block * k_strides[0] + head * k_strides[1] + tokens[:, None] * k_strides[2] + dims)
    v = tl.load(V + block * v_strides[0] + head * v_strides[1] + tokens[:, None] * v_strides[2] + dims,
                mask=known[:, None], other=0.0)
    scales = tl.load(SCALES + block * scale_stride + head * PAGE + tokens, mask=known, other=0)
    tl.store(WIDE_K + target[:, None] * D + dims, k.to(tl.float16))
    tl.store(WIDE_V + target[:, None] * D + dims, v.to(tl.float16))
    tl.store(PACKED + target, packed_scales(scales, scale_log2))


class CopiedRows(NamedTuple):
    """The prompt rows of one step, whose copies follow each other."""

    blocks: tuple[torch.Tensor, ...]
    """BLOCKS of widen_kernel, by block table."""
    starts: torch.Tensor
    """int32 [rows]: each row's first copy."""
    tiles: dict[int, torch.Tensor]
    """Tiles of queries that read copies, by their number of queries."""
    uncopied: torch.Tensor | None
    """int32 [rows]: context_lens of the rows that read the cache after all, on the device alone; None: none does."""


class WidenedPages:
    """The copies, and attention that reads them. Layers run one after the other, so those of all kinds share memory."""

    def __init__(self, specs: Iterable[AttentionSpec], block_size: int, max_num_seqs: int, device: torch.device,
                 num_blocks: int, nbytes: int) -> None:
        """num_blocks, nbytes: of copy_room."""
        self.block_size, self.num_blocks, shared = block_size, num_blocks, Device.of(device).shared_bytes
        self.attends = {
            spec: PrefillAttention(spec, block_size, max_num_seqs, device, widened_config(spec.head_dim, shared))
            for spec in specs
        }
        self._numbers = torch.arange(num_blocks, dtype=torch.int32, device=device)
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def pays(self, num_tokens: int, num_rows: int, num_blocks: int | None) -> bool:
        """Whether prompt rows of so many tokens read copies of so many blocks; None: whether the device may choose."""
        if num_blocks is None:
            return num_tokens >= 2 * LEAST_TOKENS
        return num_blocks <= self.num_blocks and num_tokens >= max(LEAST_TOKENS, LEAST_QUERIES * num_rows)

    def list_rows(self, row_slot: torch.Tensor, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor,
                  block_tables: tuple[torch.Tensor, ...], num_tokens: int, num_blocks: int | None) -> CopiedRows:
        """Rows as those of list_tiles, with block tables int32 [slots, width] each. num_blocks: at most so many in all;
        None: the device chooses, by their number and that of queries."""
        counts, uncopied = -(-context_lens // self.block_size), None
        if num_blocks is None:
            total, reads = counts.sum(), (cu_seqlens_q.diff() * context_lens).sum()
            pays = (total <= self.num_blocks) & (reads >= LEAST_QUERIES * self.block_size * total)
            uncopied, context_lens, counts = context_lens * ~pays, context_lens * pays, counts * pays
        kinds = {attend.config.block_m: attend for attend in self.attends.values()}
        tiles = {block_m: each.list_tiles(cu_seqlens_q, context_lens, num_tokens) for block_m, each in kinds.items()}
        ends, copies = counts.cumsum(0, dtype=torch.int32), self._numbers[:num_blocks]
        starts, (slots, width) = ends - counts, block_tables[0].shape
        row = torch.searchsorted(ends, copies, right=True).clamp_(max=len(ends) - 1)
        index = copies - starts[row]
        left = context_lens[row] - index * self.block_size
        where = row_slot[row].clamp_(0, slots - 1), index.clamp_(0, width - 1)
        blocks = (torch.where(copies < ends[-1], table[where], -1) for table in block_tables)
        return CopiedRows(tuple(torch.stack((block, left), 1) for block in blocks), starts, tiles, uncopied)

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_scales: torch.Tensor,
                 rows: CopiedRows, table: int, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor,
                 out: torch.Tensor, spec: AttentionSpec, sinks: torch.Tensor | None = None) -> None:
        """PrefillAttention of this kind over caches in e4m3, of the blocks in this table of `rows`."""
        attend, blocks = self.attends[spec], rows.blocks[table]
        copies, (_, heads, page, dim) = len(blocks), k_cache.shape
        tokens, narrow, tile = copies * heads * page, kv_scales.view(torch.int32), 64
        sizes = (2 * tokens * dim, 2 * tokens * dim, 8 * tokens)
        parts = self._memory[: sum(sizes)].split(sizes)
        k, v = (part.view(torch.float16).view(copies, heads, page, dim) for part in parts[:2])
        scales = parts[2].view(torch.int64).view(copies, heads, page)
        widen_kernel[(copies * page // tile, heads)](
            k_cache, v_cache, narrow, blocks, k, v, scales, spec.scale * LOG2_E, k_cache.stride()[:3],
            v_cache.stride()[:3], narrow.stride(0), H=heads, D=dim, PAGE=page, TILE=tile, num_warps=4)
        places = self._numbers[:, None], rows.starts  # a row's slot is its first copy, and the next one lies behind
        tiles = rows.tiles[attend.config.block_m]
        attend(q, k, v, *places, cu_seqlens_q, context_lens, tiles, out, sinks, scales)
