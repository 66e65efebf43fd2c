"""Looks and aborts from threads that do not step, while one does."""

import sys
import time
from collections.abc import Iterator

import pytest
from fake_executor import fake_engine
from threads import run_in_threads

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.prompt import Prompt
from nanovllm.sampling_params import SamplingParams

SECONDS = 1.0


@pytest.fixture
def engine() -> LLMEngine:
    return fake_engine(max_num_seqs=2, max_model_len=64, num_kvcache_blocks=8, kvcache_block_size=16)


@pytest.fixture(autouse=True)
def eager_threads() -> Iterator[None]:
    """Threads that take turns far more often than by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def requests(engine: LLMEngine, count: int) -> None:
    for number in range(count):
        engine.add_request(Prompt([number, 2, 3]), SamplingParams(max_tokens=2))


def test_a_look_may_come_while_a_step_takes_requests_in(engine: LLMEngine) -> None:
    end = time.monotonic() + SECONDS
    engine.scheduler.holds_new = True  # so that a look asks which of those that wait have begun

    def serve() -> None:
        while time.monotonic() < end:
            requests(engine, 50)
            engine.step()

    def look() -> None:
        while time.monotonic() < end:
            engine.is_busy()

    assert run_in_threads(serve, look) == [None] * 2
    engine.scheduler.check_integrity()


def test_all_may_be_aborted_while_some_are_forgotten(engine: LLMEngine) -> None:
    end = time.monotonic() + SECONDS

    def serve() -> None:
        while time.monotonic() < end:
            requests(engine, 50)
            for output in engine.book.outputs(engine.step()):
                engine.book.forget(output.request_id)

    def abort() -> None:
        while time.monotonic() < end:
            engine.abort_all()

    assert run_in_threads(serve, abort) == [None] * 2
    engine.scheduler.check_integrity()
