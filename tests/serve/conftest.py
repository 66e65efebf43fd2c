"""Servers started by the real command, on the demo checkpoint and the CPU."""

from collections.abc import Iterator

import httpx
import pytest
from serving import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests that only ask questions."""
    with Server(tmp_path_factory.mktemp("server")) as started:
        started.wait_until_ready()
        yield started
        assert "Traceback" not in started.log


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as opened:
        yield opened
