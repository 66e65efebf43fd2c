"""What a trainer or a server does to several replicas as one; the rest is in tests/rollouts, which has replicas too."""

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from replica_workload import DEMO, OPTIONS
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams, StructuredOutput
from nanovllm.errors import QueueFull
from nanovllm.replicas.messages import Refused
from nanovllm.replicas.replica import Replica

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
PROMPTS = [[5 + n, 9, 3] for n in range(8)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO, data_parallel_size=2, max_queued_requests=20, **OPTIONS) as llm:
        yield llm


def step_until_tokens(llm: LLM) -> None:
    before = llm.stats().generation_tokens
    while llm.stats().generation_tokens == before:
        llm.step()


def finish(llm: LLM, ids: list[int]) -> list[Any]:
    rows = [llm.engine._completions[request_id][0] for request_id in ids]
    while llm.has_unfinished_requests():
        llm.step()
    return [llm._completion(row) for row in rows]


def test_versions_tell_which_weights_a_token_comes_from(llm: LLM) -> None:
    """New weights under running requests: each token is that of the weights whose version it bears."""
    name = "model.norm.weight"
    old = load_file(f"{DEMO}/model.safetensors")[name]
    new = old * old.new_tensor([1.0, -0.5]).repeat(len(old) // 2)
    ids = [llm.add_request(prompt, LONG) for prompt in PROMPTS]
    step_until_tokens(llm)
    for version, weights in ((3, new), (4, old)):
        llm.begin_update(partial=True)
        llm.update([(name, weights)])
        llm.finish_update(version)
        step_until_tokens(llm)
    outputs = finish(llm, ids)
    assert {version for output in outputs for version, *_ in output.weight_versions} == {0, 3, 4}
    with LLM(DEMO, **OPTIONS) as one:
        for version, weights in ((0, old), (3, new), (4, old)):
            one.begin_update(partial=True)
            one.update([(name, weights)])
            one.finish_update()
            spans = [
                (output.token_ids, prompt, start, end)
                for prompt, output in zip(PROMPTS, outputs, strict=True)
                for found, start, end in output.weight_versions
                if found == version
            ]
            ids = [one.add_request(prompt, LONG, tokens[:start] or None) for tokens, prompt, start, _ in spans]
            for alone, (tokens, _, _, end) in zip(finish(one, ids), spans, strict=True):
                assert alone.token_ids[:end] == tokens[:end]


def test_replicas_that_differ_are_told_apart(llm: LLM) -> None:
    sums = llm.checksum()
    with LLM(DEMO, **OPTIONS) as one:
        assert one.checksum() == sums
    asked = llm.engine._ask  # type: ignore[attr-defined]
    llm.engine.executor._ask = lambda *args: [each | {"model.norm.weight": n} for n, each in enumerate(asked(*args))]  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"replicas hold different values of model.norm.weight"):
        llm.checksum()
    llm.engine.executor._ask = asked  # type: ignore[attr-defined]


def test_a_replica_that_was_lost_comes_back_with_the_next_weights(llm: LLM) -> None:
    """Until then none runs with the weights of the checkpoint, which others have replaced."""
    llm.load_weights(DEMO)
    expected = llm.checksum()
    lost = llm.engine._links[1]  # type: ignore[attr-defined]
    os.kill(lost.pid, signal.SIGKILL)
    while lost in llm.engine._links:  # type: ignore[attr-defined]
        llm.generate(PROMPTS, SamplingParams(max_tokens=4), use_tqdm=False)
    assert llm.engine_info()["num_replicas"] == 1
    llm.load_weights(DEMO)
    assert llm.engine_info()["num_replicas"] == 2
    assert llm.engine._ask("checksum") == [expected] * 2  # type: ignore[attr-defined]


def test_a_slow_grammar_holds_up_its_own_request_alone() -> None:
    done: list[Any] = []
    begun, compiled, all_there = threading.Event(), threading.Event(), threading.Event()

    def add(prompt: list[int], params: SamplingParams, request_id: int, known: list[int]) -> None:
        if params.structured_outputs is not None:
            begun.set()
            assert compiled.wait(20)
        done.append(("add", request_id))

    def abort(request_id: int) -> None:
        done.append(("abort", request_id))
        if compiled.is_set():
            all_there.set()

    replica = Replica(cast(Any, SimpleNamespace(add_request=add, abort=abort)), done.append, Mock())
    slow = SamplingParams(structured_outputs=StructuredOutput(regex="a+"))
    replica.handle(("add", [(1, b"", slow, []), (2, b"", SamplingParams(), []), (3, b"", slow, [])]))
    assert begun.wait(20)
    for number in (1, 3, 1):
        replica.handle(("abort", number))
    refused = [(Refused(number, "the request was aborted"), ("abort", number)) for number in (1, 3)]
    assert done == [("add", 2), *refused[0], *refused[1], ("abort", 1)], "told of once"
    compiled.set()
    assert all_there.wait(20)
    assert done[6:] == [("add", 1), ("abort", 1)], "what was withdrawn before its turn is not compiled"


def test_a_roused_replica_looks_for_a_moment_before_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 100 + 1e-4 * len(waits))
    monkeypatch.setattr("nanovllm.replicas.replica.time", clock)

    def next_message(seconds: float) -> None:
        waits.append(seconds)
        replica._leaving = len(waits) > 2 and seconds > 0

    executor, config = SimpleNamespace(failed=False), SimpleNamespace(device="cpu")
    idle: Any = SimpleNamespace(is_busy=lambda: False, config=config, executor=executor, lacks_weights=0)
    replica = Replica(idle, print, SimpleNamespace(next=next_message, wake=print))
    replica.handle(("rouse",))
    replica.serve()
    assert len(waits) > 3 and not any(waits[:-1])


def test_a_rank_that_dies_while_nothing_runs_is_noticed() -> None:
    def check() -> None:
        raise RuntimeError("rank 1 died")

    engine: Any = SimpleNamespace(
        is_busy=lambda: False, config=SimpleNamespace(device="cpu"), executor=SimpleNamespace(failed=True, check=check)
    )
    with pytest.raises(RuntimeError, match="rank 1 died"):
        Replica(engine, print, SimpleNamespace(next=lambda seconds: None, wake=print)).serve()


def test_a_full_queue_refuses(llm: LLM) -> None:
    ids = []
    with pytest.raises(QueueFull, match="max_queued_requests=20"):
        for n in range(100):
            ids.append(llm.add_request([3, n], LONG))
            llm.step()
    assert len(ids) >= 20
    assert sorted(llm.abort_all()) == ids
    while llm.has_unfinished_requests():
        llm.step()
