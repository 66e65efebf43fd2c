"""The outputs of one engine, and a look for processes that a test leaves behind."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from processes.process_checks import MARK, marked_processes
from replica_workload import DEMO, OPTIONS, batch, facts
from system import wait_for

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
    wait_for(lambda: not marked_processes(mark), "end of the processes")
