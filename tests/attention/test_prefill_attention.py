from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cases import DEVICE, DTYPE, FEATURES, TOLERANCE, Case, make_case, nan_like
from interpreting import nightly
from work_lists import list_tiles_reference

from nanovllm.kernels.attention.prefill import PrefillAttention, PrefillConfig, prefill_config
from nanovllm.kernels.attention.spec import AttentionSpec

SMALL = PrefillConfig(block_m=64 if DEVICE == "cuda" else 32, block_n=32, num_warps=4, num_stages=2)
# Whole prompts, chunks behind a prefix, one token, and two padding rows (with and without tokens of their own).
QUERIES = [5, 1, 32, 40, 0, 33, 2]
CONTEXTS = [5, 40, 32, 100, 0, 97, 0]


def build(case: Case, config: PrefillConfig = SMALL) -> PrefillAttention:
    slots, block_size = case.metadata.block_tables[0].shape[0], case.k_cache.shape[2]
    return PrefillAttention(case.spec, block_size, slots, torch.device(DEVICE), config)


def run(case: Case, attention: PrefillAttention | None = None) -> torch.Tensor:
    attention = attention or build(case)
    m = case.metadata
    tiles = attention.list_tiles(m.cu_seqlens_q, m.context_lens, case.q.shape[0])
    return attention(case.q, case.k_cache, case.v_cache, m.block_tables[0], m.row_slot, m.cu_seqlens_q, m.context_lens,
                     tiles, nan_like(case.q), case.sinks, mixed=case.is_mixed)


def chunk_case(queries: list[int], contexts: list[int], *, heads: tuple[int, int] = (4, 2), **options: Any) -> Case:
    return make_case(queries, contexts, 0, num_q_heads=heads[0], num_kv_heads=heads[1], **options)


@pytest.mark.parametrize(("block_size", "heads", "head_dim"), [
    (16, (4, 2), 32), (48, (2, 2), 32), (256, (8, 2), 128), nightly(64, (5, 1), 64), nightly(128, (8, 1), 32)])
def test_matches_float64(block_size: int, heads: tuple[int, int], head_dim: int) -> None:
    case = chunk_case(QUERIES, CONTEXTS, heads=heads, head_dim=head_dim, block_size=block_size, seed=block_size,
                      padding_tokens=3)
    assert case.error_of(run(case)) < TOLERANCE


@pytest.mark.parametrize(
    ("head_dim", "heads", "options", "use_tma"), [*((*feature, False) for feature in FEATURES), (*FEATURES[-1], True)])
def test_features_match_float64(
    head_dim: int, heads: tuple[int, int], options: dict[str, Any], use_tma: bool
) -> None:
    """With tensor descriptors too, which the interpreter has."""
    case = chunk_case([5, 1, 40, 0, 2], [5, 40, 150, 0, 0], heads=heads, head_dim=head_dim, padding_tokens=2,
                      seed=head_dim, **options)
    attention = build(case)
    attention.use_tma = use_tma
    assert case.error_of(run(case, attention)) < (1e-5 if DEVICE == "cpu" else TOLERANCE)
    reference = case.reference()
    real = ~case.expected.isnan().flatten(1).any(1)
    assert torch.allclose(reference[real], case.expected[real], atol=1e-9)
    assert not reference[~real].any()


def test_tuned_configuration_matches_float64() -> None:
    case = chunk_case([70, 130], [70, 200], head_dim=64, block_size=128)
    assert case.error_of(run(case, build(case, prefill_config(64, DTYPE)))) < TOLERANCE


def test_tensor_descriptors_give_the_same_bits() -> None:
    case = chunk_case(QUERIES, CONTEXTS, block_size=64)
    attention = build(case)
    attention.use_tma = True  # the interpreter has them too
    with_descriptors = run(case, attention)
    attention.use_tma = False
    assert torch.equal(with_descriptors.nan_to_num(), run(case, attention).nan_to_num())


@pytest.mark.parametrize("cuts", [(0, 37, 38, 100), (0, 32, 96, 100)])
@pytest.mark.parametrize("options", [{}, {"window": 45, "softcap": 20.0, "has_sinks": True}])
def test_chunking_does_not_change_a_bit(cuts: tuple[int, ...], options: dict[str, Any]) -> None:
    """In the interpreter only where chunks begin with a tile: numpy's BLAS may sum up a row in another order by its
    place in the tile, depending on the processor."""
    whole = chunk_case([100], [100], **options)
    expected = run(whole)
    m = whole.metadata
    exact = DEVICE == "cuda" or all(cut % 32 == 0 for cut in cuts[:-1])
    for start, stop in pairwise(cuts):
        m.cu_seqlens_q = torch.tensor([start, stop], dtype=torch.int32, device=DEVICE)
        m.context_lens = torch.tensor([stop], dtype=torch.int32, device=DEVICE)
        torch.testing.assert_close(run(whole)[start:stop], expected[start:stop], rtol=0, atol=0 if exact else 1e-5)


@pytest.mark.parametrize("max_num_seqs", [19, 3])
@pytest.mark.parametrize("first_token", [0, 21])
def test_tiles_cover_every_query_once_heavy_ones_first(first_token: int, max_num_seqs: int) -> None:
    """Also where a padded step has more rows than there are slots."""
    rng = torch.Generator().manual_seed(0)
    queries = torch.randint(0, 150, (19,), generator=rng)
    contexts = (queries + torch.randint(0, 300, (19,), generator=rng)).int()
    contexts[4] = 0
    starts = (torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]) + first_token).int()
    attention = PrefillAttention(AttentionSpec(2, 1, 32, scale=1.0), 16, max_num_seqs, torch.device(DEVICE), SMALL)
    tiles = attention.list_tiles(starts.to(DEVICE), contexts.to(DEVICE), int(queries.sum()) + 7)
    real = [(row, query) for row, query in tiles.tolist() if row >= 0]
    assert real == list_tiles_reference(starts, contexts, SMALL.block_m)
