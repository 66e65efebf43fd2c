"""scripts/bench_kernels.py without a GPU: every case builds its contenders, and small ones give equal results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_kernels import CASES, make_parser
from programs import ROOT, run

from bench_cases.harness import Point, Setup, compare


def dry_setup(*flags: str) -> Setup:
    return Setup(make_parser().parse_args(["gemm", "--dry", "--check-only", *flags]), torch.device("cpu"))


@pytest.mark.parametrize(
    ("cases", "fewest"), [(("sampling",), 1), pytest.param(CASES, 10, marks=pytest.mark.slow)]
)
def test_every_case_runs_dry(cases: tuple[str, ...], fewest: int, tmp_path: Path) -> None:
    result = tmp_path / "lines.json"
    script = ROOT / "scripts" / "bench_kernels.py"
    command = (script, *cases, "--dry", "--model", "0.6B", "--json", result)
    printed = run(*command, cwd=tmp_path, forks=True, TRITON_INTERPRET="1")  # a fork has imported triton already
    lines = json.loads(result.read_text())
    assert set(lines) == set(cases) and all(lines.values())
    assert printed.count("right=True") >= fewest


def test_a_wrong_contender_is_seen() -> None:
    contenders: dict[str, Any] = {"one": lambda index: torch.ones(4), "other": lambda index: torch.full((4,), 1.1)}
    line = compare(dry_setup(), Point({"rows": 1}, contenders))
    assert not line["right"]
    assert compare(dry_setup(), Point({"rows": 1}, contenders, tolerance=0.2))["right"]


@pytest.mark.parametrize("flags", [["nothing"], ["sampling", "--model", "7B", "--dry"]])
def test_mistakes_are_named(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from bench_kernels import main

    with pytest.raises(SystemExit):
        main(flags)
    assert flags[-2 if "--dry" in flags else 0] in capsys.readouterr().err
