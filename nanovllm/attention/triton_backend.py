"""Attention by the project's own Triton kernels: split-KV decode, causal prefill. Capturable whole in CUDA graphs."""

import logging
import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from nanovllm.attention.base import AttentionBackend, AttentionMetadata, AttentionSetup, AttentionSpec, KVCache
from nanovllm.kernels.attention.decode import DecodeAttention, DecodeScratch
from nanovllm.kernels.attention.decode_work_list import WorkList
from nanovllm.kernels.attention.fixed_order_work_list import FixedOrderWorkList
from nanovllm.kernels.attention.prefill import PrefillAttention, PrefillConfig, fixed_order_config, prefill_config
from nanovllm.kernels.attention.widened import LEAST_TOKENS, CopiedRows, WidenedPages, copy_room
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.latent.decode import LatentDecode, LatentWorkList
from nanovllm.kernels.latent.prefill import LatentPrefill, latent_prefill_config
from nanovllm.kernels.plan.device import Device
from nanovllm.kernels.plan.plan import NO_LAUNCH, Launch

logger = logging.getLogger(__name__)

MAX_NUM_SEQS = 32768
"""The decode kernel's work list keeps row and slot in 16 bits each."""


class PrefillRows(NamedTuple):
    """The prefill rows of a step, and their tiles where the Triton kernel runs them."""

    row_slot: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    tiles: dict[int, torch.Tensor]
    """Tiles by their number of queries."""
    copied: CopiedRows | None
    """Rows that read copies in float16; the tiles are those of rows that read the cache."""


class TritonBackend(AttentionBackend):
    """Needs a GPU (or TRITON_INTERPRET=1). Block sizes that are multiples of 64 run fastest."""

    name = "triton"
    widest = 512
    """Largest head_dim."""
    _work_list = WorkList

    def __init__(self, setup: AttentionSetup) -> None:
        super().__init__(setup)
        rows, block_size, device = setup.max_num_seqs, setup.block_size, setup.device
        if rows > MAX_NUM_SEQS:
            raise ValueError(f"max_num_seqs={rows}: attention_backend={self.name!r} takes at most {MAX_NUM_SEQS}")
        sizes, fp8 = (rows, setup.max_model_len, device), setup.has_fp8_cache
        work_lists: dict[tuple[int, int, int | None, int], WorkList] = {}
        self.work_lists: dict[AttentionSpec, WorkList] = {}
        self.prefill: dict[AttentionSpec, PrefillAttention] = {}
        for spec in setup.specs:
            kind_of_list = self._work_list if spec.value_dim is None else LatentWorkList
            together = kind_of_list.places_together(setup.places, spec.group_size, spec.head_dim, fp8)
            kind = (spec.num_kv_heads, spec.head_dim, spec.window)
            work_list = kind_of_list(*kind, *sizes, fp8=fp8, places=setup.places, together=together)
            self.work_lists[spec] = work_lists.setdefault((*kind, together), work_list)
            prefill = PrefillAttention if spec.value_dim is None else LatentPrefill
            self.prefill[spec] = prefill(spec, block_size, rows, device, self._prefill_config(spec))
        room = copy_room(setup.specs, block_size, rows, setup.max_model_len, setup.dtype, Device.of(device))
        self.widened = WidenedPages(setup.specs, block_size, rows, device, *room) if fp8 and room[0] else None
        if setup.places > 1:
            logger.info("decode attention: %s", "; ".join(sorted({each.why for each in work_lists.values()})))
        scratch = DecodeScratch.for_specs(self.work_lists, device)
        self.decode = {
            spec: (DecodeAttention if spec.value_dim is None else LatentDecode)(spec, block_size, work_list, scratch)
            for spec, work_list in self.work_lists.items()
        }

    def _prefill_config(self, spec: AttentionSpec) -> PrefillConfig:
        dtype, most_shared = self.setup.dtype, Device.of(self.device).shared_bytes
        if spec.value_dim is not None:
            return latent_prefill_config(dtype, most_shared)
        return prefill_config(spec.head_dim, dtype, self.setup.has_fp8_cache, most_shared)

    @classmethod
    def check(cls, setup: AttentionSetup) -> None:
        where, block_size, dtype = f"attention_backend={cls.name!r}", setup.block_size, setup.dtype
        if setup.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(f"device={str(setup.device)!r}: {where} needs a CUDA device")
        if block_size < 16 or block_size % 16:
            raise ValueError(f"kvcache_block_size={block_size}: {where} takes multiples of 16, at least 16")
        for spec in setup.specs:
            if spec.value_dim is not None:
                cls._check_latents(spec, setup)
            elif spec.head_dim % 8 or not 8 <= spec.head_dim <= cls.widest:
                raise ValueError(f"head_dim={spec.head_dim}: {where} takes multiples of 8 up to {cls.widest}")
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype={dtype}: {where} takes bfloat16, float16 or float32")

    @classmethod
    def _check_latents(cls, spec: AttentionSpec, setup: AttentionSetup) -> None:
        where, rope = f"attention_backend={cls.name!r}", spec.head_dim - spec.out_dim
        if cls._work_list.fixed_order:
            raise ValueError(f"exact_bits: {where} has no fixed order for latent attention")
        if spec.out_dim % 8 or rope % 8 or spec.out_dim > 512 or not 8 <= rope <= 128:
            raise ValueError(
                f"kv_lora_rank={spec.out_dim}, qk_rope_head_dim={rope}: {where} takes multiples of 8 up to 512 and 128"
            )
        if setup.has_fp8_cache:
            raise ValueError(f"kv_cache_dtype='fp8': {where} keeps latents in the model's dtype")

    def prefer_small_shared_memory(self, wanted: bool) -> None:
        for work_list in self.work_lists.values():
            work_list.prefer_small_shared_memory(wanted)

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Lists decodes' work in this object's buffers: one step at a time is between prepare and last forward."""
        if metadata.num_decode_rows:
            for work_list in dict.fromkeys(self.work_lists.values()):
                work_list.make(metadata.row_slot, metadata.context_lens, metadata.num_decode_rows)
        metadata.workspace = self._prepare_prefill(metadata) if metadata.num_prefill_rows else ()

    def forward(self, q: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, out: torch.Tensor,
                spec: AttentionSpec, sinks: torch.Tensor | None = None,
                behind: Launch = NO_LAUNCH) -> torch.Tensor | FP8Rows:
        n, decoded = metadata.num_decode_rows, None
        if metadata.num_prefill_rows:
            self._forward_prefill(q, cache, metadata, out, spec, sinks)
        if n:
            table, decode = metadata.block_tables[cache.table], self.decode[spec]
            if isinstance(decode, LatentDecode):
                decode(q[:n], cache.k, table, metadata.max_context_len, out[:n], behind.merge_first)
                return out
            decoded = decode(q[:n], cache.k, cache.v, table, metadata.max_context_len, out[:n], sinks,
                             merge_first=behind.merge_first, kv_scales=cache.scales,
                             rounds=behind.rounded and not metadata.num_prefill_rows, mixed=cache.mixed)
        return decoded if isinstance(decoded, FP8Rows) else out

    def _prepare_prefill(self, metadata: AttentionMetadata) -> Any:
        n = metadata.num_decode_rows
        rows = metadata.row_slot[n:], metadata.cu_seqlens_q[n:], metadata.context_lens[n:]
        num_tokens, num_blocks, copied = metadata.num_tokens - n, metadata.num_prefill_blocks, None
        kinds, lens = {prefill.config.block_m: prefill for prefill in self.prefill.values()}, rows[2]
        if self.widened is not None and self.widened.pays(num_tokens, metadata.num_prefill_rows, num_blocks):
            copied = self.widened.list_rows(*rows, metadata.block_tables, num_tokens, num_blocks)
            kinds, lens = ({}, lens) if copied.uncopied is None else (kinds, copied.uncopied)
        tiles = {block_m: each.list_tiles(rows[1], lens, num_tokens) for block_m, each in kinds.items()}
        return PrefillRows(*rows, tiles, copied)

    def _forward_prefill(self, q: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, out: torch.Tensor,
                         spec: AttentionSpec, sinks: torch.Tensor | None) -> None:
        rows: PrefillRows = metadata.workspace
        if rows.copied is not None:
            assert self.widened is not None and cache.scales is not None
            of_rows = rows.copied, cache.table, rows.cu_seqlens_q, rows.context_lens
            self.widened(q, cache.k, cache.v, cache.scales, *of_rows, out, spec, sinks)
            if rows.copied.uncopied is None:
                return
        prefill, table = self.prefill[spec], metadata.block_tables[cache.table]
        places = table, rows.row_slot, rows.cu_seqlens_q, rows.context_lens, rows.tiles[prefill.config.block_m], out
        if isinstance(prefill, LatentPrefill):
            prefill.attend(q, cache.k, *places)
        else:
            prefill(q, cache.k, cache.v, *places, sinks, cache.scales, cache.mixed)

    def warmup(self, cache: KVCache, spec: AttentionSpec) -> None:
        """Launches both kernels once, with every size class of the work list."""
        for rows in self.work_lists[spec].size_classes():
            self._warmup_step(cache, spec, num_decode=rows, num_prefill=0)
        self._warmup_step(cache, spec, num_decode=0, num_prefill=1)
        if self.widened is not None:
            self._warmup_step(cache, spec, num_decode=0, num_prefill=1, padding=LEAST_TOKENS)

    def _warmup_step(self, cache: KVCache, spec: AttentionSpec, num_decode: int, num_prefill: int,
                     padding: int = 0) -> None:
        """padding: tokens behind those of the rows; with some, the step's prompts are as those of an eager one."""
        rows, tokens = num_decode + num_prefill, num_decode + num_prefill + padding
        integers: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        max_blocks = -(-self.setup.max_model_len // self.block_size)
        metadata = AttentionMetadata(
            num_rows=rows, num_decode_rows=num_decode, row_slot=torch.zeros(rows, **integers),
            context_lens=torch.ones(rows, **integers), cu_seqlens_q=torch.arange(rows + 1, **integers),
            block_tables=(torch.zeros(self.setup.max_num_seqs, max_blocks, **integers),), max_seqlen_q=1,
            max_context_len=self.setup.max_model_len, num_tokens=tokens, num_prefill_blocks=num_prefill or None)
        # As the layers pass it: a view into the packed query, key and value projections.
        heads = spec.num_heads + 2 * spec.num_kv_heads
        dtype = self.setup.dtype
        q_dtype = torch.float16 if cache.scales is not None and dtype == torch.bfloat16 else dtype
        qkv = torch.zeros(tokens, heads, spec.head_dim, dtype=q_dtype, device=self.device)
        out = torch.empty(tokens, spec.num_heads, spec.out_dim, dtype=dtype, device=self.device)
        sinks = torch.zeros(spec.num_heads, dtype=dtype, device=self.device) if spec.has_sinks else None
        self.prepare(metadata)
        self.forward(qkv[:, : spec.num_heads], replace(cache, table=0), metadata, out, spec, sinks)


class FixedOrderTritonBackend(TritonBackend):
    """Sums in one order (kernels/attention/fixed_order.py), which gives a token the same bits in every step."""

    widest = 256  # two accumulators of wider ones do not fit in registers
    _work_list = FixedOrderWorkList

    def _prefill_config(self, spec: AttentionSpec) -> PrefillConfig:
        return fixed_order_config(spec.head_dim)
