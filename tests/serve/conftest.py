"""Servers of tests: one in this process, over an engine without a model, for what needs no real text; others started by
the real command, on the demo checkpoint and the CPU."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from front import InProcess, ready_front
from parsing import MODELS, Model
from serving import Server, ready_server, server  # noqa: F401

from nanovllm.serve import limits


@pytest.fixture(scope="session")
def front() -> Iterator[InProcess]:
    with ready_front() as started:
        yield started
        assert "Traceback" not in started.log


@pytest.fixture
def client(front: InProcess) -> Iterator[httpx.Client]:
    with front.client() as opened:
        yield opened


@pytest.fixture
def served(server: Server) -> Iterator[httpx.Client]:  # noqa: F811
    """A client of a server with a real engine."""
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
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """A server with keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("from-file\n")
    with ready_front("--api-key", "sesame", "--api-key", f"@{keys}", NANOVLLM_API_KEY="from-environment") as started:
        yield started


@pytest.fixture
def impatient(keyed: InProcess, monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """The same, and it waits two seconds where others wait ten or sixty."""
    shorter = {"BODIES_BYTES": 40 << 20, "HEADER_SECONDS": 2.0, "BODY_SECONDS": 2.0, "SLOW_SECONDS": 1.0}
    for name, value in shorter.items():
        monkeypatch.setattr(limits, name, value)
    return keyed
