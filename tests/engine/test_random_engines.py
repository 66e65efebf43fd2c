"""Engines drawn at random (random_engines.py): each request gets what it gets alone, and nothing hangs or is left."""

import os

import pytest
from random_engines import draw_case, run_case, run_many

CHOSEN = (71, 348, 667, 953, 1329)
NIGHTLY = (667, *range(1000, 1100))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed in NIGHTLY)) for seed in sorted({*CHOSEN, *NIGHTLY})]
)
def test_requests_get_what_they_get_alone(seed: int) -> None:
    refused = run_case(draw_case(seed, alone=seed in CHOSEN))
    assert refused is None or seed not in CHOSEN


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """For as many seconds, and from the seed on, that these variables have."""
    seconds, first = os.environ.get("NANOVLLM_RANDOM_SECONDS", "60"), os.environ.get("NANOVLLM_RANDOM_SEED", "0")
    assert not run_many("cuda", int(first), float(seconds), 10**9, alone=True)
