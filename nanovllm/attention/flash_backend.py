"""FlashAttention for prompt chunks, the project's own Triton kernel for decode rows.

FlashAttention-4 (package flash-attn-4, module flash_attn.cute) is preferred, FlashAttention-2 (package flash-attn)
serves where only it is installed. Both read the paged cache through a table of the chunk rows' blocks.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch

from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.triton_backend import PrefillRows, TritonBackend

try:
    from flash_attn.cute import interface as flash4
except ImportError:
    flash4 = None
try:
    from flash_attn import flash_attn_varlen_func as flash2
except ImportError:
    flash2 = None
if flash4 is None and flash2 is None:
    raise ImportError("neither flash-attn-4 nor flash-attn can be imported")

FLASH2_BLOCK = 256
"""FlashAttention-2 wants KV blocks of a multiple of so many tokens."""


class _ChunkRows(NamedTuple):
    context_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None


class FlashBackend(TritonBackend):
    """FlashAttention's grid comes from host-side lengths: chunks of a captured step are left to the Triton kernel."""

    name = "flash"

    @classmethod
    def check(cls, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().check(block_size, head_dim, dtype, device)
        where = f"attention_backend={cls.name!r}"
        if torch.device(device).type != "cuda":
            raise ValueError(f"device={str(device)!r}: {where} needs a CUDA device")
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype={dtype}: {where} takes bfloat16 or float16")
        if head_dim not in (64, 128):
            raise ValueError(f"head_dim={head_dim}: {where} takes 64 or 128")
        if _use_flash4(device):
            return
        if flash2 is None:
            major, minor = torch.cuda.get_device_capability(device)
            raise ValueError(f"device={str(device)!r}: {where} with flash-attn-4 needs compute capability 9.x or 10.x, "
                             f"not {major}.{minor}")
        if block_size % FLASH2_BLOCK:
            raise ValueError(
                f"kvcache_block_size={block_size}: {where} with flash-attn 2 takes multiples of {FLASH2_BLOCK}")

    def _prepare_prefill(self, metadata: AttentionMetadata) -> PrefillRows | _ChunkRows:
        if metadata.is_captured:
            return super()._prepare_prefill(metadata)
        n = metadata.num_decode_rows
        context_lens = metadata.context_lens[n:]
        slots = metadata.row_slot[n:].clamp(min=0)
        metadata.prefill_block_tables = metadata.block_table.index_select(0, slots)
        cu_seqlens_k = None
        if not _use_flash4(self.device):
            cu_seqlens_k = torch.nn.functional.pad(context_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return _ChunkRows(context_lens, metadata.cu_seqlens_q[n:], cu_seqlens_k)

    def _forward_prefill(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                         metadata: AttentionMetadata, out: torch.Tensor) -> None:
        rows = metadata.workspace
        if isinstance(rows, PrefillRows):
            return super()._forward_prefill(q, k_cache, v_cache, metadata, out)
        # As FlashAttention names it, [blocks, tokens, heads, head_dim]: the same memory under other strides.
        k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        if rows.cu_seqlens_k is not None:
            flash2_out = flash2(
                q, k, v, cu_seqlens_q=rows.cu_seqlens_q, cu_seqlens_k=rows.cu_seqlens_k,
                max_seqlen_q=metadata.max_seqlen_q, max_seqlen_k=metadata.max_context_len, softmax_scale=self.scale,
                causal=True, block_table=metadata.prefill_block_tables)
            out[metadata.num_decode_rows :] = flash2_out[metadata.num_decode_rows :]
            return
        _flash4_forward()(
            q, k, v, cu_seqlens_q=rows.cu_seqlens_q, seqused_k=rows.context_lens, max_seqlen_q=metadata.max_seqlen_q,
            max_seqlen_k=metadata.max_context_len, page_table=metadata.prefill_block_tables, softmax_scale=self.scale,
            causal=True, num_splits=1, out=out)


def _use_flash4(device: torch.device | str) -> bool:
    return flash4 is not None and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _flash4_forward() -> Callable[..., object]:
    """The forward pass that writes into a given tensor, which the package keeps below its public function; the public
    one allocates its result, which would cost a copy."""
    forward = getattr(flash4, "_flash_attn_fwd", None)
    if forward is not None and "out" in inspect.signature(forward).parameters:
        return forward

    def copying(*args: torch.Tensor, out: torch.Tensor, **options: object) -> None:
        result = flash4.flash_attn_varlen_func(*args, **options)
        out.copy_(result[0] if isinstance(result, tuple) else result)

    return copying
