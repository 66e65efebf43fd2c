"""Steps verify drafts where counts say that it pays."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanovllm.config import EngineConfig
from nanovllm.engine.drafting import Drafting, PlaceCost, cost
from nanovllm.engine.engine_stats import EngineStats
from nanovllm.models.published import PUBLISHED_SHAPES
from nanovllm.models.registry import parse_config
from nanovllm.serve.metrics import Metrics


def verify(drafting: Drafting, num_right: int, found: int, rows: int = 1) -> None:
    """A step of `rows` decodes with three drafts each, of which so many are right."""
    drafting.note_verified([3] * rows, [1 + num_right] * rows)
    drafting.note_found(found * rows, rows)


def places(drafting: Drafting, rows: int = 1, waiting: int = 0, budget: int = 10_000, length: int = 100) -> int:
    return drafting.places(rows, waiting, budget, [length] * rows)


def test_an_engine_without_drafts_has_one_place() -> None:
    assert places(Drafting(1, 256, PlaceCost())) == 1


def test_a_step_verifies_where_tokens_were_found_that_are_likely_to_be_right() -> None:
    drafting = Drafting(4, 256, PlaceCost())
    for found, expected in ((0, 1), (3, 4), (0, 1), (1, 4)):
        drafting.note_found(found, 1)
        assert places(drafting) == expected
    drafting.note_found(3, 20)  # one row of many
    assert places(drafting, rows=20) == 1


def test_drafts_that_are_wrong_are_left_alone_and_tried_again_now_and_then() -> None:
    drafting, tried = Drafting(4, 256, PlaceCost()), []
    for step in range(2000):
        if places(drafting) > 1:
            tried.append(step)
            verify(drafting, 0, 3)
        else:
            drafting.note_plain()
            drafting.note_found(3, 1)
    assert len(tried) > 20 and tried[-1] > 1900
    assert len(tried) * (cost(1, 4, 100, PlaceCost()) - 1) < 0.02 * 2000, "others pay at most 2 %"
    while places(drafting) == 1:
        drafting.note_plain()
    for _ in range(4):
        verify(drafting, 3, 3)
    assert all(places(drafting) == 4 for _ in range(9))


def test_no_step_has_more_rows_or_tokens_than_fit() -> None:
    drafting = Drafting(4, 64, PlaceCost())
    assert places(drafting, rows=16) == 4
    assert places(drafting, rows=16, waiting=1) == places(drafting, rows=17) == places(drafting, rows=2, budget=7) == 1


def test_more_tokens_cost_more_and_so_do_longer_texts_and_experts() -> None:
    costs = [cost(rows, 4, 0, PlaceCost()) for rows in (1, 4, 5, 16, 32, 64, 65)]
    assert costs == sorted(costs) and costs[-1] == float("inf")
    assert cost(1, 4, 0, PlaceCost(factor=10.0)) > 2 > cost(1, 4, 0, PlaceCost())
    alone = PlaceCost(together=1)
    assert cost(1, 4, 32_000, alone) > 1.6 > cost(1, 4, 32_000, PlaceCost()) == cost(1, 4, 0, PlaceCost())
    assert cost(1, 9, 32_000, PlaceCost()) > cost(1, 8, 32_000, PlaceCost())
    drafting = Drafting(4, 256, alone)
    drafting.note_found(1, 1)
    assert (places(drafting), places(drafting, length=100_000)) == (4, 1)


@pytest.mark.parametrize(
    ("shape", "options", "together", "num_keys"),
    [
        ("Qwen3-8B", {}, 8, 98_304), ("Qwen3-8B", {"kv_cache_dtype": "fp8"}, 4, 98_304),
        ("Qwen3-8B", {"exact_bits": "batch"}, 4, 98_304), ("Qwen3-8B", {"attention_backend": "torch"}, 1, 98_304),
        ("Qwen3.5-9B", {}, 4, 393_216), ("Qwen3.5-9B", {"exact_bits": "batch"}, 1, 393_216),
    ],
)  # fmt: skip
def test_places_that_read_keys_together_are_those_of_the_attention_kernel(
    shape: str, options: dict[str, str], together: int, num_keys: int
) -> None:
    """Three layers of four of the second have no keys."""
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    config = EngineConfig(shape, load_format="dummy", speculative_config=speculative, **options)  # type: ignore[arg-type]
    found = PlaceCost.of(parse_config(PUBLISHED_SHAPES[shape]), config)
    assert (found.together, found.num_keys) == (together, num_keys)


def test_accepted_drafts_count_by_place() -> None:
    drafting = Drafting(4, 256, PlaceCost())
    drafting.note_verified([3, 3, 0, 2], [3, 1, 1, 3])
    assert (drafting.num_drafts, drafting.num_draft_tokens, drafting.accepted) == (3, 8, [2, 2, 0])


def test_metrics_of_drafts_have_vllms_names() -> None:
    assert "spec_decode" not in Metrics("model").text().decode()
    counts = {"spec_decode_num_drafts": 5, "spec_decode_num_draft_tokens": 10, "spec_decode_num_accepted_tokens": 7}
    stats = EngineStats(**counts, spec_decode_accepted_per_pos=(4, 3))  # type: ignore[arg-type]
    metrics = Metrics("model", stats=lambda: stats)
    found = {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}
    assert {name: found[f"vllm:{name}"].samples[0].value for name in counts} == counts
    by_place = found["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert [(sample.labels["position"], sample.value) for sample in by_place] == [("0", 4), ("1", 3)]
