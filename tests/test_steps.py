"""A server's needs of an engine: steps, sleep without work, counters, prompts that are only computed."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from stepping import assert_nothing_is_left

from nanovllm import LLM, SamplingParams
from nanovllm.engine.step import Step
from nanovllm.errors import QueueFull
from nanovllm.outputs import StepOutput

OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "num_kvcache_blocks": 64, "max_queued_requests": 4}
FIXED = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **OPTIONS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left(llm: LLM) -> Iterator[None]:
    yield
    assert_nothing_is_left(llm)
    assert not llm.engine.book.rows


def run(llm: LLM) -> tuple[Step, list[StepOutput]]:
    """Gains of all requests: as the engine says it, and as users see it."""
    gained, outputs = Step(), []
    while llm.engine.has_unfinished_requests():
        step = llm.engine.step()
        gained.extend(step)
        outputs += llm.engine.book.outputs(step)
    for done in gained.done:
        llm.engine.book.forget(done.request_id)
    return gained, outputs


def test_columns_say_what_the_objects_say(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    requests = [([5, 6, 7], FIXED), ([8, 9], params)]
    runs = []
    for _ in range(2):
        first = llm.add_request(*requests[0])
        llm.add_request(*requests[1])
        runs.append((first, *run(llm)))
    (first, once, objects), (second, again, _) = runs
    assert [number - first for number in once.rows] == [number - second for number in again.rows]
    assert once.tokens == again.tokens and [end.token for end in once.finishes] == [end.token for end in again.finishes]
    expected = llm.generate([prompt for prompt, _ in requests], [param for _, param in requests], use_tqdm=False)
    for offset, output in enumerate(expected):
        for completion in output.outputs:
            mine = [o for o in objects if (o.request_id - first, o.index) == (offset, completion.index)]
            assert [token for o in mine for token in o.new_token_ids] == completion.token_ids
            assert (mine[-1].finished, mine[-1].finish_reason) == (True, completion.finish_reason)
            assert [set(d) for o in mine for d in o.logprobs or ()] == [set(d) for d in completion.logprobs or ()]
    assert {(end.row - first, *end.weight_versions) for end in once.finishes} == {(0,), (1,), (2,)}
    assert [done.request_id - first for done in once.done] == [0, 1]
    lengths = [len(each.prompt_logprobs or ()) for each in expected]
    assert lengths == [0, 2] and all(each.metrics.finished_time for one in expected for each in one.outputs)


def test_max_tokens_0_computes_the_prompt_and_nothing_else(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=2, stop="a", logprobs=1, top_p=0.5)
    prompt = [5, 6, 7, 8] * 5
    [scored], [known] = (
        llm.generate([prompt], param, use_tqdm=False)
        for param in (params, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2))
    )
    assert (scored.text, scored.token_ids, scored.finish_reason) == ("", [], "length")
    assert scored.prompt_logprobs == known.prompt_logprobs and scored.outputs[0].logprobs is None
    request_id = llm.add_request(prompt, params)
    [output] = [output for output in run(llm)[1] if output.request_id == request_id]
    assert (output.new_token_ids, output.finished, output.finish_reason) == ([], True, "length")


@dataclass(frozen=True)
class WithMore(SamplingParams):
    more: str = ""
    """A field that SamplingParams may have one day."""


def test_max_tokens_0_leaves_out_what_shapes_the_output_and_nothing_else(llm: LLM) -> None:
    """Prompts are told apart by parameters, of which there will be more."""
    of_output = {
        "stop": "a", "stop_token_ids": [7], "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1.0,
        "frequency_penalty": 1.0, "repetition_penalty": 2.0, "logprobs": 1, "sampling_mask": True,
        "logit_bias": {3: 1.0}, "bad_words": ["b"], "allowed_token_ids": [5, 6],
        "structured_outputs": {"choice": ["c"]},
    }  # fmt: skip
    of_prompt = {"n": 2, "cache_salt": "mine", "more": "yours"}
    request_id = llm.add_request([5, 6, 7], WithMore(max_tokens=0, **of_output, **of_prompt))
    for seq in llm.engine.book.rows[request_id]:
        assert seq.sampling is None and not seq.may_stop and seq.constants.temperature == 0
        assert {name: getattr(seq.params, name) for name in of_prompt} == of_prompt
    run(llm)


def test_max_tokens_0_takes_prompts_as_long_as_the_context(llm: LLM) -> None:
    [output] = llm.generate([[5] * 128], SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    assert output.token_ids == [] and output.prompt_logprobs is not None and len(output.prompt_logprobs) == 128
    times = output.metrics
    assert times is not None and times.token_times == [] and times.time_to_first_token is None and times.finished_time


def test_waiting_for_work_sleeps_and_wakes(llm: LLM) -> None:
    begin, burnt = time.monotonic(), time.thread_time()
    assert not llm.wait_for_work(0.3)
    assert time.monotonic() - begin >= 0.3 and time.thread_time() - burnt < 0.05
    timer = threading.Timer(0.1, llm.add_request, ([5, 6], FIXED))
    begin = time.monotonic()
    timer.start()
    assert llm.wait_for_work(30.0)
    assert time.monotonic() - begin < 10.0
    run(llm)
    assert not llm.wait_for_work(0.0)


def test_a_sleeper_is_woken_when_the_engine_is_closed() -> None:
    with LLM("demo", **OPTIONS) as other:
        threading.Timer(0.1, other.close).start()
        with pytest.raises(RuntimeError, match="closed"):
            other.wait_for_work(30.0)


def test_the_queue_has_a_bound_that_generate_does_not_know(llm: LLM) -> None:
    for _ in range(4):
        llm.add_request([5, 6], FIXED)
    with pytest.raises(QueueFull, match="max_queued_requests=4"):
        llm.add_request([5, 6], FIXED)
    assert len(llm.generate([[5, 6]] * 8, FIXED, use_tqdm=False)) == 8
    run(llm)
    llm.add_request([5, 6], FIXED)


def test_stats_count(llm: LLM) -> None:
    before = llm.stats()
    prompt = [11, 12, 13, 14] * 10
    llm.add_request(prompt, SamplingParams(temperature=0, n=2, max_tokens=4, ignore_eos=True))
    llm.step()
    during = llm.stats()
    assert during.num_running == 1 and during.kv_cache_usage == 3 / 64
    run(llm)
    llm.abort(llm.add_request(prompt, SamplingParams(max_tokens=50)))
    run(llm)
    llm.generate([prompt], SamplingParams(max_tokens=0), use_tqdm=False)
    after = llm.stats()
    assert (after.num_running, after.num_waiting, after.kv_cache_usage) == (0, 0, 0.0)
    assert after.prompt_tokens - before.prompt_tokens == 2 * len(prompt)
    assert after.prefix_cache_queries - before.prefix_cache_queries == 2 * len(prompt)
    assert after.prefix_cache_hits - before.prefix_cache_hits == 32
    assert after.generation_tokens - before.generation_tokens == 8
    counts = {reason: count - before.finished[reason] for reason, count in after.finished.items()}
    assert counts == {"stop": 0, "length": 3, "abort": 1}
    steps = [now - then for now, then in zip(after.iteration_tokens, before.iteration_tokens, strict=True)]
    computed = after.iteration_tokens_sum - before.iteration_tokens_sum
    assert sum(steps) >= 5 and 40 + 8 + 3 + 8 <= computed <= 40 + 8 + 4 + 8 + 4


def test_a_salt_shares_with_itself_alone(llm: LLM) -> None:
    prompt = list(range(20, 68))
    salts = [None, "a", "b", "a", None, "b"]
    cached = [
        llm.generate([prompt], SamplingParams(max_tokens=1, cache_salt=salt), use_tqdm=False)[0].num_cached_tokens
        for salt in salts
    ]
    assert cached == [0, 0, 0, 47, 47, 47]
