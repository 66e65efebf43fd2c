"""Copies in float16 of the e4m3 keys and values that a step's prompt rows read.

Prefill attention would widen each in registers once for every head and tile of queries, and the tensor cores wait for
that. Read from a copy, keys and values go by bulk copies, as 16 bits do, and tiles have as many queries. float16 holds
every e4m3, and the sums of a query have the same order whatever else is in its tile: results have the same bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from nanovllm.kernels.attention.e4m3 import packed_scales
from nanovllm.kernels.attention.prefill import PrefillAttention, PrefillConfig, prefill_config
from nanovllm.kernels.attention.scores import LOG2_E
from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.plan.device import Device

LEAST_QUERIES = 512
"""Tokens of prompt rows that pay for a pass over their keys; and a quarter of them on average in each row."""
MOST_BYTES = 136 << 20
"""Of copies at once: 34,048 keys with eight heads of 128 dimensions."""


def widened_config(head_dim: int, most_shared: int) -> PrefillConfig:
    """The tiling of 16 bits by eight warps, which the scales take the registers of, and the tiles of keys of e4m3: they
    decide the order of sums."""
    fp8 = prefill_config(head_dim, torch.float16, fp8=True)
    wide = prefill_config(head_dim, torch.float16, most_shared=most_shared)
    return replace(wide, block_n=fp8.block_n, num_warps=8 if wide.block_m > 64 else fp8.num_warps)


@dataclass(frozen=True)
class CopyRoom:
    """Size of the copies of one backend."""

    specs: tuple[AttentionSpec, ...]
    """Kinds of layers whose prompts may read copies."""
    block_size: int
    num_blocks: int
    nbytes: int

    @classmethod
    def of(cls, specs: Iterable[AttentionSpec], block_size: int, max_num_seqs: int, max_model_len: int,
           dtype: torch.dtype, device: Device) -> "CopyRoom":
        """Room for layers of these kinds over a cache in e4m3 beside a model in `dtype`: none where the device would
        not read copies faster."""
        found = tuple(spec for spec in specs if spec.value_dim is None and spec.head_dim in (64, 128, 256))
        if not (found and device.has_tma and dtype.itemsize == 2 and block_size % 64 == 0):
            return cls((), block_size, 0, 0)
        of_block = block_size * max(spec.num_kv_heads * (4 * spec.head_dim + 8) for spec in found)  # and scales
        num_blocks = min(MOST_BYTES // of_block, max_num_seqs * -(-max_model_len // block_size))
        return cls(found, block_size, num_blocks, num_blocks * of_block)


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


class Copied(NamedTuple):
    """The copies of one step, those of a row one after the other."""

    blocks: tuple[torch.Tensor, ...]
    """By block table: BLOCKS of widen_kernel."""
    starts: torch.Tensor
    """int32 [rows]: each row's first copy."""


class WidenedPages:
    """The copies, and attention that reads them. Layers run one after the other, so those of all kinds share memory."""

    def __init__(self, room: CopyRoom, max_num_seqs: int, device: torch.device) -> None:
        self.block_size, self.num_blocks, shared = room.block_size, room.num_blocks, Device.of(device).shared_bytes
        self.attends = {
            spec: PrefillAttention(spec, room.block_size, max_num_seqs, device, widened_config(spec.head_dim, shared))
            for spec in room.specs
        }
        self._numbers = torch.arange(room.num_blocks, dtype=torch.int32, device=device)
        self._memory = torch.empty(room.nbytes, dtype=torch.uint8, device=device)

    def list_blocks(self, row_slot: torch.Tensor, context_lens: torch.Tensor, block_tables: tuple[torch.Tensor, ...],
                    num_blocks: int) -> Copied:
        """The blocks of rows with slots row_slot and context_lens int32 [rows], num_blocks in all or fewer."""
        ends = (-(-context_lens // self.block_size)).cumsum(0, dtype=torch.int32)
        starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        copies = self._numbers[:num_blocks]
        row = torch.searchsorted(ends, copies, right=True).clamp_(max=len(ends) - 1)
        exists = copies < ends[-1]
        index = torch.where(exists, copies - starts[row], 0)
        slots, left = row_slot[row].clamp_(min=0), context_lens[row] - index * self.block_size
        blocks = (torch.where(exists, table[slots, index], -1) for table in block_tables)
        return Copied(tuple(torch.stack((block, left), 1) for block in blocks), starts)

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_scales: torch.Tensor,
                 blocks: torch.Tensor, starts: torch.Tensor, cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor,
                 tiles: torch.Tensor, out: torch.Tensor, spec: AttentionSpec,
                 sinks: torch.Tensor | None = None) -> torch.Tensor:
        """PrefillAttention of this kind over caches in e4m3; blocks, starts: of list_blocks."""
        copies, (_, heads, page, dim) = len(blocks), k_cache.shape
        elements = copies * heads * page * dim
        sizes = (2 * elements, 2 * elements, 8 * elements // dim)
        k, v, scales = self._memory[: sum(sizes)].split(sizes)
        k, v = (part.view(torch.float16).view(copies, heads, page, dim) for part in (k, v))
        scales = scales.view(torch.int64).view(copies, heads, page)
        narrow, tile = kv_scales.view(torch.int32), 32
        widen_kernel[(copies * page // tile, heads)](
            k_cache, v_cache, narrow, blocks, k, v, scales, spec.scale * LOG2_E, k_cache.stride()[:3],
            v_cache.stride()[:3], narrow.stride(0), H=heads, D=dim, PAGE=page, TILE=tile, num_warps=4)
        table = self._numbers[:, None]  # a row's slot is its first copy, and the next one lies behind
        return self.attends[spec](q, k, v, table, starts, cu_seqlens_q, context_lens, tiles, out, sinks, scales)
