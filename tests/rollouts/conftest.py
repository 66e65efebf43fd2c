"""Engines of tiny policies, in all forms that take new weights."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton

from stepping import clear
from threads import one_thread  # noqa: F401
from tiny_policy import OPTIONS, Policy

from nanovllm import LLM


@pytest.fixture(scope="package")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Policy]:
    """Two models of one shape with different weights."""
    return Policy(tmp_path_factory.mktemp("first"), seed=3), Policy(tmp_path_factory.mktemp("second"), seed=4)


ENGINES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": {"tensor_parallel_size": 2},
    "two replicas": {"data_parallel_size": 2},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Replicas where weights or pauses are the subject. They step by themselves, past the tokens of `started`."""
    if "engine" in metafunc.fixturenames:
        of_replicas = metafunc.module.__name__ in ("test_live_weights", "test_pause")
        of_replicas &= "started" not in metafunc.fixturenames
        names: list[Any] = [name for name in ENGINES if name != "two replicas" or of_replicas]
        if {"how", "options"} & {*metafunc.fixturenames}:  # kinds of mistakes, or of requests
            names[0] = pytest.param("one rank", marks=pytest.mark.slow)
        metafunc.parametrize("engine", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, policies: tuple[Policy, Policy]) -> Iterator[LLM]:
    with LLM(policies[0].folder, **ENGINES[request.param], **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM, policies: tuple[Policy, Policy]) -> Iterator[LLM]:
    """The engine with the first policy's weights, idle and with an empty prefix cache; whatever a test does, the next
    one meets none of its requests."""
    engine.load_weights(policies[0].weights.items())
    yield engine
    clear(engine)
