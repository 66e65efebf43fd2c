"""Fixtures of the process tests: a tiny model, and a look for leftovers around a test."""

import gc
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator

import process_checks
import pytest

from nanovllm.processes import child


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return process_checks.write_tiny_config(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def warmed_up(tiny: str) -> list[list[int]]:
    """One engine has been here: what libraries open once and keep is open. What it says to [5] * 9."""
    with process_checks.tiny_llm(tiny) as llm:
        return process_checks.token_ids(llm, [5] * 9)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and ranks are started as by a user's program, where how they are started is what is tested."""
    monkeypatch.setattr(child, "subprocess", subprocess)


@pytest.fixture
def new_mark() -> Iterator[str]:
    """Mark of a program of the test's own, and of its workers."""
    mark = uuid.uuid4().hex
    yield mark
    for process in process_checks.marked_processes(mark):  # a failed test leaves nothing running either
        os.kill(process, signal.SIGKILL)


@pytest.fixture
def mark(warmed_up: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks the workers of this test; after it, nothing of any engine may be left."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(process_checks.MARK, mark)
    gc.collect()
    leftovers = process_checks.Leftovers(mark)
    yield mark
    gc.collect()
    leftovers.assert_none()
