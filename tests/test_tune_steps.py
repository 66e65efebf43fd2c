"""Choosing kernels by whole steps: the search, with steps whose time is a formula."""

import time
from pathlib import Path
from typing import Any

import pytest
from processes.process_checks import write_tiny_config
from programs import load as load_script

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.base import graph_timing
from nanovllm.kernels.plan.config import KINDS, LIBRARY, SKINNY_ROWS, SUMMED, Choices, Gemm, GemmConfig
from nanovllm.kernels.plan.fits import why_not
from nanovllm.kernels.plan.table import at, load, save
from nanovllm.runner.model_runner import ModelRunner

ROOT = Path(__file__).resolve().parent.parent
GEMMS = [Gemm(kind, 512, 512, "bfloat16", True) for kind in KINDS]
CONFIGS = [GemmConfig("tile", block_n, 32, 64, 3) for block_n in (16, 32, 64)]
ROWS = 32


@pytest.fixture(scope="module")
def tune_steps() -> Any:
    return load_script(ROOT / "scripts" / "tune_steps.py")


def formula(choices: Choices, replays: int) -> float:
    """1,000 us, less what each choice brings."""
    gains: dict[GemmConfig, float] = {LIBRARY: 0.0, CONFIGS[0]: 30.0, CONFIGS[1]: -20.0, CONFIGS[2]: 0.5}
    return 1000 - sum(gains[choices.get(gemm, {}).get(ROWS, LIBRARY)] for gemm in GEMMS)


def search(tune_steps: Any, start: Choices, seconds: float = 60.0, step_us: Any = formula) -> Choices:
    contending = {gemm: [LIBRARY, *CONFIGS] for gemm in GEMMS}
    return tune_steps.improve(start, ROWS, contending, step_us, time.monotonic() + seconds)


def test_every_gemm_takes_what_is_best_for_the_step(tune_steps: Any) -> None:
    start: Choices = {}
    assert search(tune_steps, start) == {gemm: {ROWS: CONFIGS[0]} for gemm in GEMMS}
    assert start == {}, "as it was"


def test_less_than_noise_changes_nothing(tune_steps: Any) -> None:
    kept: Choices = {gemm: {ROWS: CONFIGS[2]} for gemm in GEMMS}

    def noisy(choices: Choices, replays: int) -> float:
        """Lucky where it is timed for the first time; what counts is the second."""
        return formula({}, replays) - (40 if replays < 8 and choices != kept else 0)

    assert search(tune_steps, kept, step_us=noisy) == kept


def test_the_time_is_kept(tune_steps: Any) -> None:
    start: Choices = {gemm: {ROWS: LIBRARY} for gemm in GEMMS}
    assert search(tune_steps, start, seconds=-1.0) == start


@pytest.mark.parametrize("rows", [1, 2, 4, 16, 17, 256])
def test_contenders_fit_and_have_the_library_among_them(tune_steps: Any, rows: int) -> None:
    for kind in KINDS:
        for n, k in ((4096, 1024), (24576, 4096), (512, 1100), (151936, 4096)):
            gemm = Gemm(kind, n, k, "bfloat16", True)
            found = tune_steps.contenders(gemm, rows)
            assert found[0] == LIBRARY and not any(why_not(gemm, config) for config in found)
            skinny = any(config.is_skinny for config in found)
            assert skinny == (rows <= SKINNY_ROWS and k % 8 == 0)


def test_what_lies_between_tuned_rows_takes_the_larger(tune_steps: Any) -> None:
    by_rows = {1: LIBRARY, 2: LIBRARY, 8: CONFIGS[0], 16: LIBRARY, 24: CONFIGS[1], 32: LIBRARY}
    filled = tune_steps.fill_between({GEMMS[0]: by_rows}, [8, 24])
    assert filled == {GEMMS[0]: {**by_rows, 16: CONFIGS[1]}}
    before = ((16, LIBRARY), (32, CONFIGS[2]))
    kept = tune_steps.fill_between({GEMMS[0]: by_rows}, [8, 24], lambda gemm: before)
    assert kept == {GEMMS[0]: by_rows}, "16 rows were told from 24"


def test_a_table_is_added_to(tune_steps: Any, tmp_path: Path) -> None:
    """What was tuned replaces its like, and leaves other models' entries alone."""
    first, second = (Gemm(kind, 512, 512, "bfloat16", True) for kind in SUMMED)
    path = tmp_path / "choices.json"
    save(path, tune_steps.table_of("NVIDIA X", {first: {16: LIBRARY, 32: CONFIGS[0]}}))
    half = first._replace(dtype="float16")
    save(path, tune_steps.table_of("NVIDIA X", {second: {32: CONFIGS[1]}}, load(path)))
    assert at(load(path).measured(half), 20) == CONFIGS[0] and at(load(path).measured(second), 20) == CONFIGS[1]
    save(path, tune_steps.table_of("NVIDIA X", {half: {32: CONFIGS[2]}}, load(path)))
    assert at(load(path).measured(first), 20) == CONFIGS[2] and load(path).devices == ("NVIDIA X",)


def test_all_numbers_of_rows_of_a_running_engine(
    tune_steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script's whole way on a CPU, where a step takes so long as there are GEMMs by the library."""
    timed: list[int] = []

    def time_step(runner: Any, choices: Choices, rows: int, replays: int) -> float:
        timed.append(rows)
        return 100.0 + sum(by_rows[rows] == LIBRARY for by_rows in choices.values())

    monkeypatch.setattr(ModelRunner, "time_step", time_step)
    options = {"max_num_seqs": 4, "max_model_len": 512, "num_kvcache_blocks": 128, "skip_tokenizer_init": True}
    model = write_tiny_config(tmp_path, max_position_embeddings=512)
    with LLM(model, device="cpu", load_format="dummy", **options) as llm:
        found = tune_steps.tune_all(llm, [4, 1], 60.0)
    assert set(timed) == {1, 4} and {gemm.kind for gemm in found} == set(KINDS)
    for by_rows in found.values():
        assert by_rows[4] != LIBRARY and by_rows[1] != LIBRARY
    save(tmp_path / "choices.json", tune_steps.table_of("NVIDIA X", found))
    table = load(tmp_path / "choices.json")
    assert all(at(table.measured(gemm), rows) == found[gemm][rows] for gemm in found for rows in (1, 4))


def test_a_timed_step_is_the_last_one_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step moves its rows on. What is timed begins where the last one did, and leaves rows where they were."""
    seen: list[int] = []

    def graph_us(calls: list[Any], replays: int) -> float:
        for _ in range(replays):
            calls[0]()
        return 7.0

    monkeypatch.setattr(graph_timing, "graph_us", graph_us)
    options = {"max_num_seqs": 4, "max_model_len": 64, "num_kvcache_blocks": 16, "skip_tokenizer_init": True}
    with LLM(write_tiny_config(tmp_path), device="cpu", load_format="dummy", **options) as llm:
        llm.add_request([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
        for _ in range(3):
            llm.step()
        runner: Any = llm.engine.executor.runner  # type: ignore[attr-defined]
        computed = runner.work.state.num_computed
        before, [slot] = computed.clone(), computed.nonzero().flatten().tolist()

        def run_padded(shape: Any) -> None:
            seen.append(computed[slot].item())
            computed[slot] += 1

        monkeypatch.setattr(runner.work, "run_padded", run_padded)
        assert llm.engine.executor.call("time_step", {}, 1, 3) == [7.0]
        assert seen == [before[slot] - 1] * 3 and computed[slot] == before[slot]
