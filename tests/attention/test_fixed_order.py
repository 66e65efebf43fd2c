"""Attention in one order of sums: right, and the same whoever computes which keys."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from cases import DEVICE, TOLERANCE, Case, items_of, make_case, make_places_case, nan_like, rows_of_any_length, setup_of
from interpreting import nightly
from work_lists import list_units_reference

from nanovllm.attention import select_backend
from nanovllm.kernels.attention.decode import DecodeAttention, DecodeScratch
from nanovllm.kernels.attention.decode_work_list import DecodeConfig
from nanovllm.kernels.attention.fixed_order import CHUNK, WIDE_FROM
from nanovllm.kernels.attention.fixed_order_work_list import FixedOrderWorkList
from nanovllm.kernels.attention.prefill import PrefillAttention, fixed_order_config

LENGTHS = [1, 64, 0, 65, 128, 300]
FEATURES: list[dict[str, Any]] = [
    {"head_dim": 64, "block_size": 128},
    {"window": 100, "has_sinks": True, "num_q_heads": 3, "num_kv_heads": 1},
    {"softcap": 5.0, "block_size": 48},
]


def case_of(query_lens: list[int], contexts: list[int], num_decode_rows: int, **options: Any) -> Case:
    heads = {"num_q_heads": 4, "num_kv_heads": 2}
    return make_case(query_lens, contexts, num_decode_rows, **{**heads, **options})


def decode(case: Case, first_unit: int, **places: int) -> torch.Tensor:
    """Decodes by units whose first has so many keys."""
    m, spec = case.metadata, case.spec
    slots, blocks = m.block_tables[0].shape
    size, config = case.k_cache.shape[2], DecodeConfig(min_chunk=first_unit, num_stages=2)
    kind = (spec.num_kv_heads, spec.head_dim, spec.window)
    work_list = FixedOrderWorkList(*kind, slots, blocks * size, torch.device(DEVICE), config, **places)
    scratch = DecodeScratch.for_specs({spec: work_list}, torch.device(DEVICE))
    work_list.make(m.row_slot, m.context_lens, m.num_rows)
    attention = DecodeAttention(spec, size, work_list, scratch)
    args = (case.q, case.k_cache, case.v_cache, m.block_tables[0], m.max_context_len)
    return attention(*args, nan_like(case.q), case.sinks, mixed=case.is_mixed)


def prefill(case: Case) -> torch.Tensor:
    m, config = case.metadata, fixed_order_config(case.spec.head_dim)
    attention = PrefillAttention(case.spec, case.k_cache.shape[2], 32, torch.device(DEVICE), config)
    tiles = attention.list_tiles(m.cu_seqlens_q, m.context_lens, case.q.shape[0])
    rows = (m.row_slot, m.cu_seqlens_q, m.context_lens, tiles)
    return attention(case.q, case.k_cache, case.v_cache, m.block_tables[0], *rows, nan_like(case.q), case.sinks,
                     mixed=case.is_mixed)


@pytest.mark.parametrize("options", FEATURES)
def test_decode_matches_float64_whoever_computes_which_keys(options: dict[str, Any]) -> None:
    case = case_of([1] * len(LENGTHS), LENGTHS, len(LENGTHS), **options)
    expected = decode(case, WIDE_FROM)
    assert case.error_of(expected) < TOLERANCE
    for first_unit in (CHUNK, 2 * CHUNK):
        assert torch.equal(decode(case, first_unit).nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(("places", "heads"), [(2, (4, 2)), (4, (4, 1)), nightly(8, (2, 1)), (2, (8, 1))])
@pytest.mark.parametrize("options", [*FEATURES, {"window": 3}])
def test_rows_that_share_keys_have_the_bits_of_rows_alone(
    places: int, heads: tuple[int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu":  # the library's products depend on which row of a tile a query is

        def product(a: Any, b: Any, matmul: Any = np.matmul, **how: Any) -> Any:
            return np.concatenate([matmul(row[None], b, **how) for row in a])

        monkeypatch.setattr(np, "matmul", product)
    counts = [places, places - 1, 1, 0, places]
    contexts = [places, 65, 128, 0, 257 + places // 2]
    options = {**options, "num_q_heads": heads[0], "num_kv_heads": heads[1]}
    case = make_places_case(counts, contexts, places, **options)
    for first_unit in (CHUNK, WIDE_FROM):
        alone = decode(case, first_unit)
        assert case.error_of(alone) < TOLERANCE
        together = FixedOrderWorkList.places_together(places, heads[0] // heads[1], case.spec.head_dim)
        assert together == places
        shared = decode(case, first_unit, places=places, together=together)
        assert torch.equal(shared.nan_to_num(), alone.nan_to_num())


@pytest.mark.parametrize("options", FEATURES)
def test_prefill_matches_float64(options: dict[str, Any]) -> None:
    case = case_of([70, 33], [70, 290], 0, **options)
    assert case.error_of(prefill(case)) < TOLERANCE


def test_the_backend_serves_decodes_beside_prompts() -> None:
    case = case_of([1, 1, 40], [30, 200, 90], 2)
    m, setup = case.metadata, setup_of(case)
    backend = select_backend("fixed-order triton", setup).backend(setup)
    backend.prepare(m)
    out = backend.forward(case.q, case.cache, m, nan_like(case.q), case.spec)
    assert case.error_of(out) < TOLERANCE
    backend.warmup(case.cache, case.spec)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's products are the library's")
@pytest.mark.parametrize("options", [{"head_dim": 128, "block_size": 128}, {"head_dim": 64, **FEATURES[1]}])
def test_a_prompts_tokens_get_the_bits_of_decodes(options: dict[str, Any]) -> None:
    context = 700
    case = case_of([context], [context], 0, **options)
    m, whole = case.metadata, prefill(case)
    m.row_slot, m.context_lens = m.row_slot.repeat(context), torch.arange(1, context + 1, device=DEVICE).int()
    m.num_rows = context
    m.block_tables = (m.block_tables[0].repeat(context, 1),)  # so many slots
    for first_unit in (CHUNK, WIDE_FROM):
        assert torch.equal(decode(case, first_unit), whole)


@pytest.mark.parametrize("window", [None, 150, 5000])
def test_work_list_holds_every_unit_once(window: int | None) -> None:
    slots, lengths = rows_of_any_length(9000, seed=7)
    for first_unit in (CHUNK, 512, WIDE_FROM):
        config = DecodeConfig(min_chunk=first_unit)
        work_list = FixedOrderWorkList(1, 32, window, 40, 9000, torch.device(DEVICE), config)
        work_list.make(slots.to(DEVICE), lengths.to(DEVICE), 37)
        items = items_of(work_list.entries, work_list.num_entries)
        expected = list_units_reference(slots, lengths, first_unit, window)
        assert sorted(items) == sorted(expected)
        assert max(units for *_, units in expected) <= work_list.max_splits(config)
        covered = sum(end - start for _, _, start, end, _, _ in items)
        assert covered == sum(min(int(n), window or 9000) for n, slot in zip(lengths, slots, strict=True) if slot >= 0)
