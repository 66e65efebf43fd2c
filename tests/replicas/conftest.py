"""The outputs of one engine, and a look for processes that a test leaves behind."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from processes.process_checks import MARK, marked_processes, wait_until
from replica_workload import DEMO, OPTIONS, batch, facts

from nanovllm import LLM


@pytest.fixture(scope="session")
def expected() -> list[Any]:
    with LLM(DEMO, **OPTIONS) as llm:
        return facts(llm.generate(*batch(60), use_tqdm=False))


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks the processes of this test; after it, none of them may be left."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield mark
    assert wait_until(lambda: not marked_processes(mark)), "processes are left"
