"""The server of tests/serve, for commands that talk to one."""

from collections.abc import Iterator

import pytest
from serve.serving import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as started:
        started.wait_until_ready()
        yield started
