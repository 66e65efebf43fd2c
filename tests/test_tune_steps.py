"""Choosing kernels by whole steps: the search, with steps whose time is a formula."""

import time
from pathlib import Path
from typing import Any

import pytest
from test_bench import load

from nanovllm.kernels.gemm.decode import MidConfig, SplitConfig
from nanovllm.runner.tuning import Choices, Config

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("gate_up", "down", "o", "qkv", "head")
CONFIGS = [MidConfig(block_n, 32, 64, 3) for block_n in (16, 32, 64)]
ROWS = 32


@pytest.fixture(scope="module")
def tune_steps() -> Any:
    return load(ROOT / "scripts" / "tune_steps.py")


def formula(choices: Choices, replays: int) -> float:
    """1,000 us, less what each choice brings."""
    gains: dict[Config | None, float] = {None: 0.0, CONFIGS[0]: 30.0, CONFIGS[1]: -20.0, CONFIGS[2]: 0.5}
    return 1000 - sum(gains[choices[part].get(ROWS)] for part in PARTS)


def search(tune_steps: Any, start: Choices, seconds: float = 60.0, step_us: Any = formula) -> Choices:
    parts = {part: lambda: [None, *CONFIGS] for part in PARTS}
    return tune_steps.improve(start, ROWS, parts, step_us, time.monotonic() + seconds)


def test_every_part_takes_what_is_best_for_the_step(tune_steps: Any) -> None:
    start: Choices = {part: {} for part in PARTS}
    assert search(tune_steps, start) == {part: {ROWS: CONFIGS[0]} for part in PARTS}
    assert start == {part: {} for part in PARTS}, "as it was"


def test_less_than_noise_changes_nothing(tune_steps: Any) -> None:
    kept: Choices = {part: {ROWS: CONFIGS[2]} for part in PARTS}

    def noisy(choices: Choices, replays: int) -> float:
        """Lucky where it is timed for the first time; what counts is the second."""
        return formula({part: {} for part in PARTS}, replays) - (40 if replays < 8 and choices != kept else 0)

    assert search(tune_steps, kept, step_us=noisy) == kept


def test_the_time_is_kept(tune_steps: Any) -> None:
    start: Choices = {part: {} for part in PARTS}
    assert search(tune_steps, start, seconds=-1.0) == start


def test_a_choice_is_for_one_projection_and_number_of_rows(tune_steps: Any) -> None:
    start: Choices = {"o": {16: SplitConfig(2), ROWS: SplitConfig(2)}, "qkv": {}}
    assert tune_steps.with_choice(start, "o", ROWS, None) == {"o": {16: SplitConfig(2)}, "qkv": {}}
    assert tune_steps.with_choice(start, "qkv", ROWS, CONFIGS[0]) == start | {"qkv": {ROWS: CONFIGS[0]}}
