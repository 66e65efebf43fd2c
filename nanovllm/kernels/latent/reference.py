"""Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) in plain PyTorch: the twin of its kernel.

All query heads attend to one row a token: its normalised latent, of which keys and values are projections, and a
rotated key. The projections stand on the other side of the products ("absorbed"): a head's query is multiplied by that
to keys before, and the result by that to values behind. So prompts, chunks and decodes are one arithmetic.
"""

import torch

from nanovllm.kernels.latent.rows import LatentRows


def latent_attention_reference(
    q: torch.Tensor, pages: torch.Tensor, block_table: torch.Tensor, rows: LatentRows, width: int, scale: float
) -> torch.Tensor:
    """q [T, heads, width + rope] -> [T, heads, width] of q's dtype: softmax of scale * (q . row) over the rows that a
    token sees, times their first `width` elements; scores and sums in float32.

    pages [blocks, block_size, width + rope], of q's dtype, any strides but the last: token n of a row is in block
    block_table[slot, n // block_size], at n % block_size; block_table int32 [slots, max_blocks]. What a token does not
    see may be NaN behind `width`, and is finite before. Tokens of no row come out as anything, here as zeros.
    """
    out, starts = torch.zeros_like(q[..., :width]), rows.cu_seqlens_q.tolist()
    for r, (slot, context) in enumerate(zip(rows.row_slot.tolist(), rows.context_lens.tolist(), strict=True)):
        tokens, count = slice(starts[r], starts[r + 1]), starts[r + 1] - starts[r]
        if slot < 0 or context == 0 or count == 0:
            continue
        blocks = block_table[slot, : -(-context // pages.shape[1])].long()
        keys = pages[blocks].flatten(0, 1)[:context].float()
        scores = q[tokens].float() @ keys.T * scale
        unseen = torch.ones(count, context, dtype=torch.bool, device=q.device).triu(context - count + 1)[:, None]
        out[tokens] = (scores.masked_fill(unseen, float("-inf")).softmax(-1) @ keys[:, :width]).to(q.dtype)
    return out
