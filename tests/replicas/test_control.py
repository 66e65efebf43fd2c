"""Calls of a trainer or a server to several replicas as one; the rest is in tests/rollouts, which has replicas too."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from replica_workload import DEMO, OPTIONS
from safetensors.torch import load_file
from stepping import clear, drain, ends_of, finish, replace_one, wait_for_tokens
from system import alive

from nanovllm import LLM, SamplingParams
from nanovllm.errors import QueueFull

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
PROMPTS = [[5 + n, 9, 3] for n in range(8)]


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    with LLM(DEMO, data_parallel_size=2, max_queued_requests=20, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """The engine, in which a test leaves nothing behind."""
    yield engine
    clear(engine)


def test_versions_tell_which_weights_a_token_comes_from(llm: LLM) -> None:
    """New weights under running requests: each token is that of the weights whose version it bears."""
    name = "model.norm.weight"
    old = load_file(f"{DEMO}/model.safetensors")[name]
    new = old * old.new_tensor([1.0, -0.5]).repeat(len(old) // 2)
    ids = [llm.add_request(prompt, LONG) for prompt in PROMPTS]
    wait_for_tokens(llm, step=llm.step)
    for version, weights in ((3, new), (4, old)):
        replace_one(llm, name, weights, version)
        wait_for_tokens(llm, step=llm.step)
    outputs = finish(llm, ids)
    assert {version for output in outputs for version, *_ in output.weight_versions} == {0, 3, 4}
    with LLM(DEMO, **OPTIONS) as one:
        for version, weights in ((0, old), (3, new), (4, old)):
            replace_one(one, name, weights)
            spans = [
                (prompt, output.token_ids, start, end)
                for prompt, output in zip(PROMPTS, outputs, strict=True)
                for found, start, end in output.weight_versions if found == version
            ]  # fmt: skip
            again = [one.add_request(prompt, LONG, ids[:start] or None) for prompt, ids, start, _ in spans]
            for (_, ids, _, end), alone in zip(spans, finish(one, again), strict=True):
                assert alone.token_ids[:end] == ids[:end]


def test_an_abort_while_new_weights_come_is_reported(llm: LLM) -> None:
    ids = [llm.add_request(prompt, LONG) for prompt in PROMPTS]
    wait_for_tokens(llm, step=llm.step)

    def weights() -> Iterator[tuple[str, Any]]:
        for number, pair in enumerate(load_file(f"{DEMO}/model.safetensors").items()):
            if number == 3:
                llm.abort(ids[2])
            yield pair

    llm.load_weights(weights())
    assert ends_of(drain(llm)) == {number: "abort" if number == ids[2] else "length" for number in ids}


def test_a_replica_that_was_lost_comes_back_with_the_next_weights(llm: LLM) -> None:
    """Until then none runs with the weights of the checkpoint, which others have replaced."""
    weights = load_file(f"{DEMO}/model.safetensors")
    name, few = "model.norm.weight", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.load_weights({**weights, name: -weights[name]}.items())
    expected = [output.token_ids for output in llm.generate(PROMPTS, few, use_tqdm=False)]
    restarts = llm.engine_info()["num_restarts"]
    os.kill(llm.engine.engines.all[1].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    while llm.engine_info()["num_restarts"] == restarts:
        llm.generate(PROMPTS, few, use_tqdm=False)
    changed = llm.checksum()
    assert [output.token_ids for output in llm.generate(PROMPTS, few, use_tqdm=False)] == expected
    llm.load_weights(DEMO)
    assert llm.engine_info()["num_replicas"] == 2
    assert llm.checksum()[name] != changed[name], "and both have the same"


def test_the_end_of_a_fork_leaves_the_replicas_alone(llm: LLM) -> None:
    pids = {handle.process.pid for handle in llm.engine.engines.all}  # type: ignore[attr-defined]
    if (child := os.fork()) == 0:
        llm.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert alive(pids) == pids
    assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=4), use_tqdm=False)) == len(PROMPTS)


def test_a_prompt_that_is_only_scored_has_no_output(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        assert output.token_ids == [] and output.prompt_logprobs is not None
        assert [row is None for row in output.prompt_logprobs] == [True, False, False]


@pytest.mark.parametrize(("name", "option"), [("pause", "mode"), ("begin_update", "in_flight")])
def test_a_call_that_is_left_while_it_waits_for_requests_does_nothing_later(llm: LLM, name: str, option: str) -> None:
    """As Ctrl-C leaves it."""
    ids = [llm.add_request(prompt, LONG) for prompt in PROMPTS]
    wait_for_tokens(llm, step=llm.step)
    call = llm.engine.call(name, **{option: "wait"})
    next(call)
    call.close()
    assert [len(output.token_ids) for output in finish(llm, ids)] == [100] * len(ids)
    llm.reset_prefix_cache()  # all that was asked for before is done by now
    assert not llm.is_paused and not llm.engine.state.lacks_weights


def test_a_full_queue_refuses(llm: LLM) -> None:
    ids = []
    with pytest.raises(QueueFull, match="max_queued_requests=20"):
        for n in range(100):
            ids.append(llm.add_request([3, n], LONG))
            llm.step()
    assert len(ids) >= 20
    assert sorted(llm.abort_all()) == ids
    drain(llm)
