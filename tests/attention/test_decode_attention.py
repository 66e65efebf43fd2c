from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cases import (
    DEVICE,
    FEATURES,
    TOLERANCE,
    Case,
    items_of,
    make_case,
    make_places_case,
    nan_like,
    rows_of_any_length,
)
from interpreting import nightly
from work_lists import list_chunks_reference

from nanovllm.kernels.attention import decode
from nanovllm.kernels.attention.decode import DecodeAttention, DecodeScratch
from nanovllm.kernels.attention.decode_work_list import DecodeConfig, WorkList
from nanovllm.kernels.fp8.operands import FP8Rows
from nanovllm.kernels.fp8.quantize import quantize_rows

# Small chunks, so that short rows are split too.
SMALL = DecodeConfig(block_n=32, min_chunk=64, max_splits=8, num_warps=4, num_stages=2)
LENGTHS = [1, 63, 64, 65, 0, 200, 590, 17]


def longest_unsplit(config: DecodeConfig) -> int:
    """Keys of the longest row that is one chunk."""
    return config.min_chunk * 3 // 2 - 1


def build(case: Case, config: DecodeConfig | None = SMALL, **places: int) -> DecodeAttention:
    slots, max_blocks = case.metadata.block_tables[0].shape
    spec, block_size, device = case.spec, case.k_cache.shape[2], torch.device(DEVICE)
    kind = (spec.num_kv_heads, spec.head_dim, spec.window)
    work_list = WorkList(*kind, slots, max_blocks * block_size, device, config, case.kv_scales is not None, **places)
    return DecodeAttention(spec, block_size, work_list, DecodeScratch.for_specs({spec: work_list}, device))


def run(case: Case, attention: DecodeAttention | None = None, rounds: bool = False) -> Any:
    attention = attention or build(case)
    m = case.metadata
    attention.work_list.make(m.row_slot, m.context_lens, m.num_rows)
    return attention(case.q, case.k_cache, case.v_cache, m.block_tables[0], m.max_context_len, nan_like(case.q),
                     case.sinks, kv_scales=case.kv_scales, rounds=rounds, mixed=case.is_mixed)


def decode_case(lengths: list[int], *, heads: tuple[int, int] = (4, 2), **options: Any) -> Case:
    return make_case([1] * len(lengths), lengths, len(lengths), num_q_heads=heads[0], num_kv_heads=heads[1], **options)


@pytest.mark.parametrize(("block_size", "heads", "head_dim"), [
    (48, (2, 2), 32), (64, (5, 1), 64), (256, (8, 2), 128),
    nightly(16, (4, 2), 32), nightly(128, (8, 1), 32), nightly(128, (4, 2), 64)])
def test_matches_float64(block_size: int, heads: tuple[int, int], head_dim: int) -> None:
    case = decode_case(LENGTHS, heads=heads, head_dim=head_dim, block_size=block_size, seed=block_size)
    assert case.error_of(run(case)) < TOLERANCE


@pytest.mark.parametrize(
    ("head_dim", "heads", "options", "has_tma"),
    [*((*FEATURES[i], False) for i in (0, 2, 4, 5, 7)), (*FEATURES[6], True),
     *(nightly(*FEATURES[i], False) for i in (1, 3, 6))])
def test_features_match_float64(
    head_dim: int, heads: tuple[int, int], options: dict[str, Any], has_tma: bool
) -> None:
    """With tensor descriptors too, which the interpreter has."""
    case = decode_case([1, 65, 0, 200, 590], heads=heads, head_dim=head_dim, seed=head_dim, **options)
    attention = build(case)
    attention.has_tma = has_tma
    assert case.error_of(run(case, attention)) < (1e-5 if DEVICE == "cpu" else TOLERANCE)


def test_a_window_longer_than_every_row_changes_no_bit() -> None:
    lengths = [1, 65, 0, 200]
    whole, windowed = decode_case(lengths), decode_case(lengths, window=1000)
    assert torch.equal(run(whole).nan_to_num(), run(windowed).nan_to_num())


@pytest.mark.parametrize(("lengths", "config", "fp8"), [
    ([50], DecodeConfig(num_stages=1), False), ([600], replace(SMALL, merge_heads=1), False), ([200, 50], SMALL, False),
    ([200, 50], SMALL, True)], ids=["no merge", "one row", "one of two is merged", "fp8"])
def test_rows_are_rounded_as_by_a_kernel_of_its_own(lengths: list[int], config: DecodeConfig, fp8: bool) -> None:
    case = decode_case(lengths, heads=(6, 2), head_dim=128, block_size=64, fp8=fp8)
    assert_rounds_as_a_kernel_of_its_own(case, build(case, config))


def assert_rounds_as_a_kernel_of_its_own(case: Case, attention: DecodeAttention) -> None:
    real = case.metadata.row_slot >= 0
    want, got = quantize_rows(run(case, attention).flatten(1)), run(case, attention, rounds=True)
    assert isinstance(got, FP8Rows) and got.dtype == want.dtype
    assert torch.equal(got.values[real].float(), want.values[real].float())
    assert torch.equal(got.scales[real], want.scales[real])


def rank(num_kv_heads: int, max_num_seqs: int = 1100, places: int = 1, together: int = 1) -> WorkList:
    device = torch.device(DEVICE)
    return WorkList(num_kv_heads, 32, None, max_num_seqs, 512, device, places=places, together=together)


@pytest.mark.parametrize(("num_kv_heads", "max_num_seqs"), [(8, 256), (2, 200), (3, 300), (10, 5), (1, 1000), (8, 17)])
@pytest.mark.parametrize(("places", "together"), [(1, 1), (4, 4), (5, 3), (16, 2), (16, 1)])
def test_size_classes_are_all_that_a_batch_can_be(
    num_kv_heads: int, max_num_seqs: int, places: int, together: int
) -> None:
    attention = rank(num_kv_heads, max_num_seqs, places, together)

    def kind(rows: int) -> tuple[tuple[DecodeConfig, DecodeConfig], int]:
        return attention.cuts(rows), max(16, 1 << (rows - 1).bit_length())

    sizes = attention.size_classes()
    assert max(sizes) <= max_num_seqs and len(sizes) <= (12 if together == 1 else 18)
    assert {kind(rows) for rows in sizes} == {kind(rows) for rows in range(1, max_num_seqs + 1)}


def test_nothing_is_merged_up_to_the_bound_and_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = decode_case([longest_unsplit(SMALL), 1, 0, 64, 60])
    expected = run(case)
    monkeypatch.setattr(decode, "merge_chunks_kernel", None)
    case.metadata.max_context_len = longest_unsplit(SMALL)
    assert torch.equal(run(case).nan_to_num(), expected.nan_to_num())
    case.metadata.max_context_len += 1
    with pytest.raises(TypeError):
        run(case)


def test_row_has_the_same_bits_alone_and_in_a_crowd() -> None:
    crowd = decode_case(LENGTHS)
    together = run(crowd)
    m = crowd.metadata
    for row in (3, 5, 6):
        attention = build(crowd)
        attention.work_list.make(m.row_slot[row : row + 1], m.context_lens[row : row + 1], 1)
        alone = attention(crowd.q[row : row + 1], crowd.k_cache, crowd.v_cache, m.block_tables[0], LENGTHS[row],
                          nan_like(crowd.q[:1]))
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("change", [{"programs_per_sm": 5}, {"merge_heads": 1}])
def test_bits_do_not_depend_on_who_does_the_work(change: dict[str, Any]) -> None:
    """How many programs there are, or how many heads one of them merges."""
    case = decode_case([65, 0, 200, 590], heads=(10, 2))
    expected = run(case)
    assert case.error_of(expected) < TOLERANCE
    assert torch.equal(run(case, build(case, replace(SMALL, **change))).nan_to_num(), expected.nan_to_num())


def test_nan_stays_in_its_row() -> None:
    case = decode_case([65, 200, 17])
    expected = run(case)
    case.q[1] = float("nan")
    out = run(case)
    assert out[1].isnan().all()
    assert torch.equal(out[::2], expected[::2])


@pytest.mark.parametrize(("window", "max_model_len"), [
    (None, 5000), (1, 512), (150, 512), nightly(None, 512), nightly(1, 5000), nightly(150, 5000)])
def test_work_list_holds_every_chunk_once_long_ones_first(window: int | None, max_model_len: int) -> None:
    slots, lengths = rows_of_any_length(max_model_len, seed=max_model_len)
    work_list = WorkList(1, 32, window, 40, max_model_len, torch.device(DEVICE), SMALL)
    work_list.make(slots.to(DEVICE), lengths.to(DEVICE), 37)
    items = items_of(work_list.entries, work_list.num_entries)
    assert sorted(items) == sorted(list_chunks_reference(slots, lengths, SMALL, window))
    full = [end - start // 32 * 32 for _, _, start, end, chunk, num_chunks in items if chunk < num_chunks - 1]
    assert full == sorted(full, reverse=True)
    assert max(num_chunks for *_, num_chunks in items) <= work_list.most_chunks(37, max_model_len)
    for row, length in enumerate(lengths.tolist()):
        keys = [key for r, _, start, end, *_ in items if r == row for key in range(start, end)]
        expected = range(max(0, length - window) if window else 0, length if slots[row] >= 0 else 0)
        assert sorted(keys) == list(expected)


COUNTS, CONTEXTS = [4, 3, 1, 0, 4, 2, 4, 4], [4, 65, 64, 0, 67, 200, 590, 99]
"""Tokens of decodes of up to four places, and what the last ones see: past a block, a tile, a chunk or not."""


@pytest.mark.parametrize(("places", "heads", "head_dim", "options"), [
    (2, (16, 2), 64, {}), (4, (4, 1), 32, {"block_size": 48}), (4, (6, 2), 32, {"window": 66, "has_sinks": True}),
    (8, (2, 2), 32, {"window": 3, "softcap": 5.0}), (4, (8, 2), 32, {"window": 140, "fp8": True}), (5, (7, 1), 72, {}),
    nightly(8, (8, 2), 64, {}), nightly(8, (2, 1), 32, {"fp8": True}), nightly(4, (8, 1), 256, {"window": 7})])
@pytest.mark.parametrize("has_tma", [False, True])
def test_rows_of_one_sequence_share_its_keys(
    places: int, heads: tuple[int, int], head_dim: int, options: dict[str, Any], has_tma: bool
) -> None:
    counts = [min(places, 2 * count if places > 4 else count) for count in COUNTS]
    contexts = [max(context, count) for context, count in zip(CONTEXTS, counts, strict=True)]
    case = make_places_case(counts, contexts, places, num_q_heads=heads[0], num_kv_heads=heads[1],
                            **{"head_dim": head_dim, "block_size": 64, **options})
    together = WorkList.places_together(places, heads[0] // heads[1], head_dim, "fp8" in options)
    attention = build(case, places=places, together=together)
    attention.has_tma = has_tma and head_dim % 32 == 0 and case.k_cache.shape[2] == 64
    assert case.error_of(run(case, attention)) < (1e-5 if DEVICE == "cpu" else TOLERANCE)
    entries = {row for row, *_ in items_of(attention.work_list.entries, attention.work_list.num_entries)}
    assert len(entries) == sum(-(-count // together) for count in counts)


def test_rows_without_drafts_keep_their_bits_where_drafts_may_come() -> None:
    case = decode_case([*LENGTHS, 70, 3], heads=(8, 2), window=150)
    assert torch.equal(run(case, build(case, places=4, together=4)).nan_to_num(), run(case).nan_to_num())


def test_chunks_are_cut_for_as_many_sequences_as_there_are() -> None:
    def chunks(sequences: int, places: int) -> int:
        work_list = WorkList(8, 32, None, 64, 2048, torch.device(DEVICE), places=4, together=4)
        rows = {"dtype": torch.int32, "device": DEVICE}
        slots = torch.arange(sequences, **rows).repeat_interleave(places)
        lengths = torch.arange(2000, 2000 + places, **rows).repeat(sequences)
        work_list.make(slots, lengths, 64)
        counts = work_list.num_chunks.unique().tolist()
        assert len(work_list.entries) >= int(work_list.num_entries) == sequences * counts[0] and len(counts) == 1
        assert counts[0] <= work_list.most_chunks(64, 2048) <= work_list.room(64)
        return counts[0]

    assert (chunks(64, 1), chunks(16, 4)) == (1, 8)
