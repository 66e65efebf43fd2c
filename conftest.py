"""Tests marked `gpu` are skipped where torch sees no CUDA device. Hypothesis draws the same examples each time where CI
is set, many more on demand, and never fails for being slow."""

import os

import pytest
from hypothesis import HealthCheck, settings

_common = {
    "deadline": None,
    "stateful_step_count": 40,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}
settings.register_profile("nanovllm", max_examples=60, **_common)
settings.register_profile("nanovllm-ci", max_examples=60, derandomize=True, **_common)
settings.register_profile("nanovllm-thorough", max_examples=3000, **_common)  # NANOVLLM_HYPOTHESIS=thorough
_suffix = os.environ.get("NANOVLLM_HYPOTHESIS", "ci" if os.environ.get("CI") else "")
settings.load_profile("nanovllm" + (f"-{_suffix}" if _suffix else ""))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
