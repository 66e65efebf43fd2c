"""Pauses from any thread, everything aborted, and outputs that go on from given tokens."""

import threading
import time
from collections import deque
from typing import Any

import pytest
from stepping import drain, ends_of, tokens_of, wait_for_tokens
from tiny_policy import Policy

from nanovllm import LLM, SamplingParams

SEEDED = SamplingParams(seed=7, max_tokens=40, ignore_eos=True)


class Generating(threading.Thread):
    """generate() in a thread of its own."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(daemon=True)
        self._llm = llm
        self.outputs: list[Any] = []
        self.start()

    def run(self) -> None:
        self.outputs = self._llm.generate([[n, 5, 9] for n in range(4)], SEEDED, use_tqdm=False)


def test_kept_requests_go_on_where_they_were(llm: LLM) -> None:
    alone = Generating(llm)
    alone.join(60)
    paused = Generating(llm)
    wait_for_tokens(llm, 8)
    llm.pause()
    assert llm.is_paused
    computed = llm.engine.computed[1]
    assert llm.step() == [] and not llm.engine.is_busy()
    time.sleep(0.15)
    assert llm.engine.computed[1] == computed and paused.is_alive()
    assert not llm.wait_for_work(0.01)
    with pytest.raises(ValueError, match="mode='wait': requests that have begun do not end"):
        llm.pause("wait")
    llm.resume()
    paused.join(60)
    assert [output.token_ids for output in paused.outputs] == [output.token_ids for output in alone.outputs]


def test_new_weights_in_a_pause(llm: LLM, policies: tuple[Policy, Policy]) -> None:
    """As a trainer beside a server does it: what runs elsewhere only waits."""
    running = Generating(llm)
    wait_for_tokens(llm, 8)
    llm.pause()
    llm.begin_update(in_flight="keep")
    for pair in policies[1].weights.items():
        llm.update([pair])
    llm.finish_update()
    llm.resume()
    running.join(60)
    counts = {len(output.outputs[0].weight_versions) for output in running.outputs}
    assert 2 in counts and counts <= {1, 2}  # a replica may not have begun when the pause came


def test_who_sleeps_through_a_wait_for_requests_hears_of_its_end(llm: LLM) -> None:
    """Requests that came meanwhile begin then."""
    if llm.config.has_front:
        pytest.skip("replicas hold their own requests back")
    short = SamplingParams(max_tokens=4, ignore_eos=True)
    llm.add_request([3], short)
    llm.step()
    waiting = llm.engine.control.end_requests("wait", "mode")
    next(waiting)
    llm.add_request([5], short)
    while llm.engine.is_busy():
        llm.step()
    woken: list[bool] = []
    sleeper = threading.Thread(target=lambda: woken.append(llm.wait_for_work(20.0)), daemon=True)
    sleeper.start()
    time.sleep(0.1)
    assert next(waiting, "ended") == "ended"
    sleeper.join(5.0)
    assert woken == [True]
    drain(llm)


def test_a_pause_that_waits(llm: LLM) -> None:
    running = Generating(llm)
    wait_for_tokens(llm, 8)
    llm.pause("wait")
    running.join(60)
    assert {len(output.token_ids) for output in running.outputs} == {40}
    late = llm.add_request([3], SamplingParams(max_tokens=2, ignore_eos=True))
    assert llm.step() == [] and llm.has_unfinished_requests()
    llm.resume()
    assert ends_of(drain(llm)) == {late: "length"}


def test_a_resume_ends_a_pause_that_waits(llm: LLM) -> None:
    """A pause never comes after a resume that was asked for later."""
    llm.add_request([3], SamplingParams(max_tokens=1000, ignore_eos=True))
    while not llm.step():
        pass
    waiting = llm.engine.call("pause", mode="wait")
    next(waiting)
    llm.resume()
    with pytest.raises(RuntimeError, match="resumed before it was done"):
        deque(waiting, 0)
    assert not llm.is_paused
    llm.abort_all()
    drain(llm)


@pytest.mark.parametrize("by_pause", [True, False])
def test_all_are_aborted(llm: LLM, by_pause: bool) -> None:
    running = Generating(llm)
    wait_for_tokens(llm, 8)
    if by_pause:
        llm.pause("abort")
    else:
        assert len(llm.abort_all()) == 4
    running.join(60)
    assert {output.finish_reason for output in running.outputs} == {"abort"}
    assert any(output.token_ids for output in running.outputs)
    llm.resume()
    assert llm.abort_all() == []
    if not llm.config.has_front:
        llm.engine.scheduler.check_integrity()
    with pytest.raises(ValueError, match="mode='gently'"):
        llm.pause("gently")
    assert not llm.is_paused


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 2, "logprobs_mode": "processed", "sampling_mask": True},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logprobs": 0},
        {"min_tokens": 20, "stop_token_ids": list(range(0, 301, 3)), "max_tokens": 60},
    ],
    ids=str,
)
def test_an_output_goes_on_as_if_it_had_not_been_cut(llm: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(**{"seed": 11, "max_tokens": 30, "ignore_eos": True, **options})
    prompt = list(range(30, 60))
    [output] = llm.generate([prompt], params, use_tqdm=False)
    whole = output.outputs[0]
    for cut in (1, 2, 15, 18, len(whole.token_ids) - 1):
        [row] = llm.engine.book.rows[llm.add_request(prompt, params, output_token_ids=whole.token_ids[:cut])]
        [gained] = tokens_of(drain(llm)).values()
        assert gained == whole.token_ids[cut:]
        found = llm.engine.book.completion(row)
        assert (found.token_ids, found.finish_reason) == (whole.token_ids, whole.finish_reason)
        assert found.weight_versions[0][1:] == (cut, len(whole.token_ids))
        for name in ("logprobs", "sampling_mask"):
            of_rest, of_whole = getattr(found, name) or (), getattr(whole, name) or ()
            assert len(of_rest) == len(of_whole) and all(row is None for row in of_rest[:cut])
            for token, one, other in zip(gained, of_rest[cut:], of_whole[cut:], strict=bool(of_rest)):
                if name == "logprobs":
                    assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-5)
                else:
                    assert one.tolist() == other.tolist()


@pytest.mark.parametrize(
    ("options", "given"),
    [({"max_tokens": 3}, [1, 2, 3]), ({"n": 2}, [1]), ({}, [301]), ({}, [-1]), ({"stop_token_ids": [5]}, [4, 5]),
     ({}, ["a"])],
)  # fmt: skip
def test_outputs_that_cannot_go_on_are_refused(llm: LLM, options: dict[str, Any], given: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"^output_token_ids: "):
        llm.add_request([1, 2], SamplingParams(**options), output_token_ids=given)
    assert not llm.has_unfinished_requests()
