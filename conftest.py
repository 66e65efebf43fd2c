"""Tests marked `gpu` are skipped where torch sees no CUDA device. Hypothesis draws the same examples each time where CI
is set, many more on demand, and never fails for being slow."""

import os
from pathlib import Path

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


def pytest_configure() -> None:
    """Lets the workers of pytest-xdist start at different GPUs: worker 1 of four GPUs sees 1, 2, 3, 0."""
    worker, visible = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(count_gpus())]
    if worker and len(gpus) > 1:
        first = int(worker.removeprefix("gw")) % len(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def count_gpus() -> int:
    """NVIDIA GPUs of this machine, counted without torch, which most tests do not need."""
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
