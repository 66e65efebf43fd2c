"""Tests marked `gpu` are skipped where torch sees no CUDA device. Hypothesis draws the same examples each time where CI
is set, many more on demand, and never fails for being slow. With --quick each test that imports torch or starts a
process is skipped when it does."""

import gc
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="skip tests that import torch or start a process")


def pytest_configure(config: pytest.Config) -> None:
    """Lets the workers of pytest-xdist start at different GPUs: worker 1 of four GPUs sees 1, 2, 3, 0."""
    if config.getoption("--quick") and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Quick())
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # while tests are collected: nothing of that can go
    worker, visible = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(index) for index in range(count_gpus())]
    if worker and len(gpus) > 1:
        first = int(worker.removeprefix("gw")) % len(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


def count_gpus() -> int:
    """NVIDIA GPUs of this machine, counted without torch, which most tests do not need."""
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if not config.getoption("--quick"):
        import torch

        if torch.cuda.is_available():
            return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # no full collection looks at what is imported, from now on
    gc.enable()
    if session.config.getoption("--quick"):
        return
    if "triton.runtime.interpreter" in sys.modules:  # chosen before the kernels were imported
        import quick_interpreter

        quick_interpreter.quicken()
    import fork_server

    if fork_server.is_fit():
        fork_server.install()


class Quick:
    """Refuses what takes long, in any thread, and skips the tests that need it."""

    def __init__(self) -> None:
        self._refused = ""
        """The reason to skip the test at hand."""
        sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Looks from now on: pytest-xdist may start a process before, to say where a worker runs. What stands for a
        process that was refused has none to wait for when it goes, be that in the middle of something else."""
        sys.addaudithook(self._look)
        subprocess.Popen.__del__ = lambda self: None  # type: ignore[attr-defined]

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" and arguments[0].partition(".")[0] == "torch":
            self._refuse("imports torch")
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self._refuse("starts a process")

    def _refuse(self, what: str) -> None:
        self._refused = what
        pytest.skip(what, allow_module_level=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and self._refused:
            report.outcome, report.longrepr = "skipped", (report.fspath, 0, f"Skipped: {self._refused}")
        if report.when == "teardown":
            self._refused = ""
        return report
