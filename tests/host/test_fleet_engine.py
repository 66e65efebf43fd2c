"""The engine of an LLM over a fleet, with engines that compute nothing."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import bench_replicas
import pytest
from threads import run_in_threads

from nanovllm.host import handle
from nanovllm.host.fleet_engine import FleetEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetEngine]:
    monkeypatch.setattr(handle, "MODULE", handle.MODULE)  # bench_replicas puts its own there
    found = bench_replicas.start(1)
    yield found
    found.close()


def test_a_thread_that_looks_while_another_closes_sees_a_closed_engine(engine: FleetEngine) -> None:
    """And not a descriptor that is gone."""
    looks = threading.Event()

    def look() -> Any:
        while True:
            looks.set()
            engine.is_busy()
            engine.step()

    def close() -> None:
        assert looks.wait(10)
        time.sleep(0.1)
        engine.close()

    error, _ = run_in_threads(look, close)
    assert isinstance(error, RuntimeError) and str(error) == "this engine is closed"
    assert not engine.is_busy()
