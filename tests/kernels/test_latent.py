"""Latent attention: the absorbed products are those of the expanded definition, and kernels equal their twins."""

from itertools import pairwise

import pytest
import torch

from nanovllm.kernels.attention.reference import attention_reference
from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.latent.store import latent_rope_store, latent_rope_store_reference
from nanovllm.kernels.pointwise.norm import Norm

HEADS, NOPE, WIDTH, ROPE, VALUE, BLOCK = 5, 12, 40, 8, 20, 16
LENGTHS = ((0, 1, 18), (1, 1, 19), (2, 1, 40), (-1, 1, 0), (3, 7, 7), (4, 20, 45), (-1, 0, 0))
"""(slot, tokens of the step, context) of each row: four decodes, of which the third is padding, then chunks."""


def test_the_absorbed_form_is_the_expanded_definition(device: torch.device) -> None:
    """Keys and values of each head by its projections of the latents, as papers and checkpoints have it."""
    slots, counts, contexts = (torch.tensor(each, dtype=torch.int32) for each in zip(*LENGTHS, strict=True))
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    tokens = [slice(*each) for each in pairwise(starts.tolist())]
    table = torch.randperm(5 * 4, device=device).to(torch.int32).view(5, 4)
    pages = torch.randn(20, BLOCK, WIDTH + ROPE, dtype=torch.float64, device=device)
    q = torch.randn(tokens[-1].stop, HEADS, NOPE + ROPE, dtype=torch.float64, device=device)
    to_keys = torch.randn(HEADS, NOPE, WIDTH, dtype=torch.float64, device=device) / NOPE**0.5
    to_values = torch.randn(HEADS, VALUE, WIDTH, dtype=torch.float64, device=device) / WIDTH**0.5
    absorbed = torch.cat((torch.einsum("thn,hnw->thw", q[..., :NOPE], to_keys), q[..., NOPE:]), -1)
    whole = pages.clone()
    for slot, _, context in LENGTHS:  # what nobody sees
        if slot >= 0:
            block, place = table[slot, context // BLOCK].item(), context % BLOCK
            whole[block, place:, WIDTH:] = float("nan")
    spec, cache = AttentionSpec(HEADS, 1, WIDTH + ROPE, 0.3, value_dim=WIDTH), whole[:, None]
    latents = attention_reference(absorbed, cache, cache, slots, starts, contexts, table, spec)
    found = torch.einsum("thw,hvw->thv", latents, to_values)
    for (slot, count, context), of_row in zip(LENGTHS, tokens, strict=True):
        if slot < 0:
            continue
        cached = pages[table[slot].long()].flatten(0, 1)[:context]
        keys = torch.einsum("kw,hnw->hkn", cached[:, :WIDTH], to_keys)
        keys = torch.cat((keys, cached[None, :, WIDTH:].expand(HEADS, -1, -1)), -1)
        values = torch.einsum("kw,hvw->hkv", cached[:, :WIDTH], to_values)
        seen = torch.ones(count, context, dtype=torch.bool, device=device).tril(context - count)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[of_row].transpose(0, 1), keys, values, attn_mask=seen, scale=spec.scale
        )
        torch.testing.assert_close(found[of_row], expected.transpose(0, 1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("heads", [1, 5, 20])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_are_stored_as_the_twin_stores_them(
    heads: int, interleaved: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """From strided projections; a token of padding stores nothing, a latent that is not finite spoils its key alone."""
    tokens, whole = 6, {"dtype": dtype, "device": device}
    projected = torch.randn(tokens, heads * (NOPE + ROPE) + WIDTH + ROPE + 3, **whole)
    q = projected[:, : heads * (NOPE + ROPE)].unflatten(1, (heads, -1))
    kv = projected[:, heads * (NOPE + ROPE) : -3]
    kv[2, 3], kv[4, 1] = float("inf"), float("nan")
    angles = torch.outer(torch.arange(64.0), torch.rand(ROPE // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(device)
    positions = torch.tensor([3, 63, 0, 7, 21, 9], dtype=torch.int32, device=device)
    slots = torch.tensor([5, 17, 40, -1, 0, 63], dtype=torch.int32, device=device)
    norm = Norm(torch.rand(WIDTH, **whole) + 0.5, 1e-6)
    results = []
    for store in (latent_rope_store, latent_rope_store_reference):
        pages, out = (torch.full((*shape, WIDTH + ROPE), 7.0, **whole) for shape in ((4, BLOCK), (tokens, heads)))
        store(q, kv, norm, positions, cos_sin, slots, pages, out, interleaved)
        results.append((pages, out))
    ours, theirs = results
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for mine, twins in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, twins, **tolerance, equal_nan=True)
    flat = theirs[0].flatten(0, 1)
    assert flat[[0, 40], WIDTH:].isnan().all() and flat[:, :WIDTH].isfinite().all()
    assert (flat != 7.0).all(1).nonzero().flatten().tolist() == [0, 5, 17, 40, 63]
    assert (theirs[1][..., :WIDTH] == 7.0).all()
