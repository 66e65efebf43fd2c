"""Servers started by the real command, on the demo checkpoint and the CPU."""

from collections.abc import Iterator

import httpx
import pytest
from serving import Server, server  # noqa: F401


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:  # noqa: F811
    with server.client() as opened:
        yield opened
