"""States of an engine that sleeps, the same with and without a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
from stepping import drain, ends_of, tokens_of
from tiny_policy import GREEDY, OPTIONS, PROMPTS, Policy, texts

from nanovllm import LLM
from nanovllm.outputs import StepOutput


@pytest.fixture(scope="module", params=[1, 2], ids=["one engine", "two replicas"])
def sleeper(request: pytest.FixtureRequest, policies: tuple[Policy, Policy]) -> Iterator[LLM]:
    with LLM(policies[0].folder, enable_sleep=True, data_parallel_size=request.param, **OPTIONS) as llm:
        yield llm


@pytest.mark.parametrize("tags", [None, ("kv_cache",), ["weights"]])
def test_texts_are_equal_afterwards(sleeper: LLM, tags: Any) -> None:
    before = texts(sleeper)
    sleeper.sleep(tags=tags)
    with pytest.raises(RuntimeError, match="asleep"):
        texts(sleeper)
    with pytest.raises(RuntimeError, match="asleep"):
        sleeper.sleep(tags=tags)
    sleeper.wake_up()
    assert texts(sleeper) == before
    with pytest.raises(RuntimeError, match="not asleep"):
        sleeper.wake_up()


def test_tags_may_be_readable_but_once(sleeper: LLM) -> None:
    before = texts(sleeper)
    sleeper.sleep(tags=iter(["weights"]))
    sleeper.wake_up(tags=iter(["weights"]))
    assert texts(sleeper) == before


def test_dropped_weights_come_anew(sleeper: LLM, policies: tuple[Policy, Policy]) -> None:
    """In the order of a trainer that shares the device: weights awake, new values, then the cache."""
    before = texts(sleeper)
    sleeper.sleep(level=2)
    with pytest.raises(RuntimeError, match="asleep"):
        sleeper.begin_update()
    sleeper.wake_up(tags=["weights"])
    sleeper.begin_update()
    sleeper.update(policies[0].weights.items())
    sleeper.finish_update()
    with pytest.raises(RuntimeError, match="kv_cache"):
        texts(sleeper)
    sleeper.wake_up(tags=["kv_cache"])
    assert texts(sleeper) == before
    sleeper.sleep(level=2, tags="weights")
    sleeper.sleep(tags="kv_cache")
    sleeper.wake_up()
    for call in (sleeper.finish_update, lambda: sleeper.update([])):
        with pytest.raises(RuntimeError, match="begin_update was not called"):
            call()
    with pytest.raises(RuntimeError, match="dropped the weights"):
        texts(sleeper)
    sleeper.load_weights(policies[0].folder)
    assert texts(sleeper) == before


def test_requests_sleep_in_a_pause(sleeper: LLM) -> None:
    expected = texts(sleeper)
    ids = [sleeper.add_request(prompt, GREEDY) for prompt in PROMPTS]
    outputs: list[StepOutput] = []
    while not tokens_of(outputs).get(ids[0]):
        outputs += sleeper.step()
    with pytest.raises(RuntimeError, match="requests are running"):
        sleeper.sleep()
    sleeper.pause()
    sleeper.sleep()
    outputs += sleeper.step()
    sleeper.wake_up()
    sleeper.resume()
    assert [*dict(sorted(tokens_of(outputs + drain(sleeper)).items())).values()] == expected


def test_requests_that_wait_for_a_sleeper_are_aborted(sleeper: LLM) -> None:
    expected = texts(sleeper)
    sleeper.sleep()
    waiting = {sleeper.add_request(prompt, GREEDY) for prompt in PROMPTS}
    sleeper.pause("abort")
    assert ends_of(drain(sleeper)) == dict.fromkeys(waiting, "abort")
    sleeper.wake_up()
    sleeper.resume()
    assert texts(sleeper) == expected


@pytest.mark.parametrize(("options", "said"), [({"level": 3}, "level=3"), ({"tags": ["graphs"]}, "tags=")])
def test_mistakes(sleeper: LLM, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sleeper.sleep(**options)


def test_it_must_be_asked_for(policies: tuple[Policy, Policy]) -> None:
    with LLM(policies[0].folder, **OPTIONS) as llm, pytest.raises(ValueError, match="enable_sleep"):
        llm.sleep()
