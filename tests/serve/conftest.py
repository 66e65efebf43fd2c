"""Servers started by the real command, on the demo checkpoint and the CPU."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from parsing import MODELS, Model
from serving import Server, ready_server, server  # noqa: F401


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:  # noqa: F811
    with server.client() as opened:
        yield opened


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Model]:
    return {key: Model(*key, tmp_path_factory.mktemp(key[0])) for key in MODELS}


@pytest.fixture(scope="session", params=MODELS, ids=lambda key: key[0] + ("" if key[1] else "-text"))
def model(request: pytest.FixtureRequest, models: dict[tuple[str, bool], Model]) -> Model:
    return models[request.param]


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo checkpoint behind the template of Qwen3: it writes calls because a grammar makes it."""
    template = Path(__file__).with_name("templates") / "hermes.jinja"
    options = ("--chat-template", str(template), "--default-chat-template-kwargs", '{"enable_thinking": false}')
    with ready_server(tmp_path_factory.mktemp("hermes"), *options) as started:
        yield started


@pytest.fixture(scope="session")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys that waits two seconds where others wait ten or sixty."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("from-file\n")
    arguments = ("--api-key", "sesame", "--api-key", f"@{keys}")
    limits = {"BODIES_BYTES": 40 << 20, "HEADER_SECONDS": 2.0, "BODY_SECONDS": 2.0, "SLOW_SECONDS": 1.0}
    folder, environment = tmp_path_factory.mktemp("impatient"), {"NANOVLLM_API_KEY": "from-environment"}
    with ready_server(folder, *arguments, env=environment, limits=limits) as started:
        yield started
