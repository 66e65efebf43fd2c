"""Attention of prompts over latents, in the form of latent/decode.py, so that a token's result does not depend on how
its prompt was cut into chunks. Tiles of queries and their list are those of kernels/attention/prefill.py; the heads of
a tile run side by side, so that they find its keys in the L2 cache.
"""

import torch

from nanovllm.kernels.attention.pages import keys_within, load_tile
from nanovllm.kernels.attention.prefill import PrefillAttention, PrefillConfig
from nanovllm.kernels.attention.query_tiles import causal_mask, load_queries
from nanovllm.kernels.attention.scores import LOG2_E, padded_dims
from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.latent.decode import MOST_SHARED, attend_latents, block_at, latent_descriptors, parts_of
from nanovllm.kernels.plan.config import SHARED_BYTES


def latent_prefill_config(dtype: torch.dtype, most_shared: int = SHARED_BYTES) -> PrefillConfig:
    """The outputs of 64 queries take the registers of eight warps."""
    if dtype.itemsize > 2:
        return PrefillConfig(block_m=16, block_n=16, num_warps=8, num_stages=1)
    if most_shared < MOST_SHARED:
        return PrefillConfig(block_m=32, block_n=16, num_warps=8)
    return PrefillConfig(block_m=64, block_n=64, num_warps=8, num_stages=2)


@triton.jit(do_not_specialize=["ROW_SLOT", "CU_SEQLENS", "CONTEXT_LENS", "table_stride"])
def latent_prefill_kernel(Q, LATENT, ROPE, OUT, TABLE, ROW_SLOT, CU_SEQLENS, CONTEXT_LENS, TILES, scale_log2,
                          q_strides, strides, table_stride, out_strides, H: tl.constexpr, L: tl.constexpr,
                          R: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                          TMA: tl.constexpr):
    """Attention of Q [T, H, L + R] into OUT [T, H, L]. LATENT and ROPE: the parts [blocks, 1, PAGE, L] and [.., R] of
    the cache, descriptors with TMA. The rest as prefill_attention_kernel."""
    tile, head = tl.program_id(0) // H, tl.program_id(0) % H
    row = tl.load(TILES + tile * 2)
    if row < 0:
        return
    query = tl.load(TILES + tile * 2 + 1)
    TABLE_ROW = TABLE + tl.load(ROW_SLOT + row).to(tl.int64) * table_stride
    q, live, tokens, position, first_position, context = load_queries(Q, CU_SEQLENS, CONTEXT_LENS, row, query, head,
                                                                      q_strides, L, BLOCK_M)
    q_rope = load_queries(Q + L, CU_SEQLENS, CONTEXT_LENS, row, query, head, q_strides, R, BLOCK_M)[0]
    DIMS: tl.constexpr = padded_dims(L)
    state = (tl.full([BLOCK_M], -1e30, tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32),
             tl.zeros([BLOCK_M, DIMS], tl.float32))
    end = tl.minimum(context, first_position + BLOCK_M)
    block = block_at(TABLE_ROW, 0, end, PAGE, BLOCK_N)
    for n in range(0, end, BLOCK_N):  # a loop without masks before this one would cost registers, and spill
        known = None if PAGE % BLOCK_N == 0 else keys_within(n, 0, end, BLOCK_N, False)
        latent = load_tile(LATENT, block, 0, n, known, strides, L, PAGE, BLOCK_N, TMA)
        rope = load_tile(ROPE, block, 0, n, known, strides, R, PAGE, BLOCK_N, TMA)
        block = block_at(TABLE_ROW, n + BLOCK_N, end, PAGE, BLOCK_N)
        visible = causal_mask(n, position, 0, BLOCK_N, False)
        state = attend_latents(q, q_rope, latent, rope, state, scale_log2, visible)
    acc = state[2] / tl.sum(state[1], 1)[:, None]
    out = OUT + tokens[:, None] * out_strides[0] + head * out_strides[1] + tl.arange(0, DIMS)[None, :]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=live)


class LatentPrefill(PrefillAttention):
    """PrefillAttention for layers of one kind with a value_dim."""

    def __init__(self, spec: AttentionSpec, block_size: int, max_num_seqs: int, device: torch.device,
                 config: PrefillConfig) -> None:
        super().__init__(spec, block_size, max_num_seqs, device, config)
        self.use_tma = latent_descriptors(spec, device) and block_size % config.block_n == 0

    def attend(self, q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, row_slot: torch.Tensor,
               cu_seqlens_q: torch.Tensor, context_lens: torch.Tensor, tiles: torch.Tensor,
               out: torch.Tensor) -> torch.Tensor:
        """q [T, H, head_dim] and out [T, H, value_dim], tokens numbered as in cu_seqlens_q. cache [num_blocks, 1,
        block_size, head_dim]."""
        c, spec = self.config, self.spec
        latent, rope = parts_of(cache, spec, c.block_n if self.use_tma else None)
        latent_prefill_kernel[(tiles.shape[0] * spec.num_heads,)](
            q, latent, rope, out, block_table, row_slot, cu_seqlens_q, context_lens, tiles, spec.scale * LOG2_E,
            q.stride()[:2], cache.stride()[:3], block_table.stride(0), out.stride()[:2], H=spec.num_heads,
            L=spec.out_dim, R=spec.head_dim - spec.out_dim, PAGE=self.block_size, BLOCK_M=c.block_m, BLOCK_N=c.block_n,
            TMA=self.use_tma, num_warps=c.num_warps, num_stages=c.num_stages, enable_fp_fusion=True)
        return out
