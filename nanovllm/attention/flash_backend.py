"""FlashAttention-4 (package flash-attn-4) for prompt chunks, the project's own Triton kernel for decode rows. It reads
the paged cache through a table of the prefill rows' blocks."""

import logging
from typing import Any, NamedTuple

import torch

from nanovllm.attention import flash_import
from nanovllm.attention.base import AttentionMetadata, AttentionSetup, AttentionSpec, KVCache
from nanovllm.attention.triton_backend import PrefillRows, TritonBackend
from nanovllm.errors import refuse

logger = logging.getLogger(__name__)

if not flash_import.installed():
    raise ImportError("flash-attn-4 is not installed")


class _PagedRows(NamedTuple):
    context_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    block_tables: list[torch.Tensor]
    """Their lines of each of the step's block tables, side by side."""


class FlashBackend(TritonBackend):
    """FlashAttention's grid comes from host-side lengths: chunks of a captured step are left to the Triton kernel.

    The package takes seconds to import, so that happens in the background, from when a backend is made until it is
    first needed. If it fails then, Triton takes all of the work, unless FlashAttention was asked for by name.
    """

    name = "flash"
    prefers_eager_prompts = True

    def __init__(self, setup: AttentionSetup) -> None:
        super().__init__(setup)
        self._is_loaded = False
        flash_import.start()

    @classmethod
    def check(cls, setup: AttentionSetup) -> None:
        super().check(setup)
        where, device, dtype = f"attention_backend={cls.name!r}", setup.device, setup.dtype
        if setup.kv_dtype not in (None, dtype):
            refuse("kv_cache_dtype", "fp8", f"'auto' with {where}")
        if device.type != "cuda":
            raise ValueError(f"device={str(device)!r}: {where} needs a CUDA device")
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype={dtype}: {where} takes bfloat16 or float16")
        major, minor = torch.cuda.get_device_capability(device)
        if major not in (9, 10):
            needed = f"compute capability 9.x or 10.x, not {major}.{minor}"
            raise ValueError(f"device={str(device)!r}: {where} needs {needed}")
        for spec in setup.specs:
            if major == 9:  # others do not compile for pages, or read outside them (version 4.0.0b)
                fits, taken = spec.head_dim in (*range(16, 129, 16), 192, 256), "multiples of 16 up to 128, 192 and 256"
            else:
                fits, taken = spec.head_dim in (64, 128), "64 or 128"
            if not fits:
                raise ValueError(f"head_dim={spec.head_dim}: {where} takes {taken} on this device")

    def _has_flash(self) -> bool:
        """Waits for the import. Where it failed: False from now on, or ValueError where FlashAttention is required."""
        if not self._is_loaded and not self.fallen_back_from:
            try:
                self._forward = flash_import.start().result()
                self._is_loaded = True
            except flash_import.ImportFailed as error:
                if self.is_required:
                    raise ValueError(f"attention_backend='flash': must be installed ({error})") from error
                self.name, self.fallen_back_from = super().name, f"flash: {error}"
                logger.warning("attention_backend='auto': triton, for flash cannot be used: %s", error)
        return self._is_loaded

    def _prepare_prefill(self, metadata: AttentionMetadata) -> PrefillRows | _PagedRows:
        if metadata.is_captured or not self._has_flash():
            return super()._prepare_prefill(metadata)
        n = metadata.num_decode_rows
        context_lens = metadata.context_lens[n:]
        slots = metadata.row_slot[n:].clamp(min=0)
        block_tables = [table.index_select(0, slots) for table in metadata.block_tables]
        return _PagedRows(context_lens, metadata.cu_seqlens_q[n:], block_tables)

    def _forward_prefill(self, q: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, out: torch.Tensor,
                         spec: AttentionSpec, sinks: torch.Tensor | None) -> None:
        rows = metadata.workspace
        if isinstance(rows, PrefillRows):
            return super()._forward_prefill(q, cache, metadata, out, spec, sinks)
        # As FlashAttention names it, [blocks, tokens, heads, head_dim]: the same memory under other strides.
        k, v = cache.k.transpose(1, 2), cache.v.transpose(1, 2)
        options: dict[str, Any] = {}
        if spec.window:
            options |= {"window_size_left": spec.window - 1, "window_size_right": 0}
        if spec.softcap:
            options["softcap"] = spec.softcap
        if sinks is not None:
            options["learnable_sink"] = sinks
        self._forward(
            q, k, v, cu_seqlens_q=rows.cu_seqlens_q, seqused_k=rows.context_lens, max_seqlen_q=metadata.max_seqlen_q,
            max_seqlen_k=metadata.max_context_len, page_table=rows.block_tables[cache.table], softmax_scale=spec.scale,
            causal=not spec.window, num_splits=1, out=out, **options)
