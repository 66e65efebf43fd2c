"""Requests of several engines as one: pure, with frames in and frames out."""

from typing import Any

import pytest
from recorded_engines import INFO, PROMPT, Engines

from nanovllm.host import wire


def test_a_request_goes_on_behind_its_tokens_when_its_engine_is_lost() -> None:
    engines = Engines(2)
    first = engines.add(7)
    engines.fleet.take(first, wire.Step([7], [50]))
    engines.fleet.take(first, wire.Step([7], [51]))
    engines.out()
    engines.fleet.lose(first, "died")
    [(second, add)] = engines.take_sent()
    assert second != first and add.known_ids() == [50, 51]
    assert engines.started == [first]
    engines.fleet.take(second, wire.Step([], [], [wire.Finish(7, 52, "length", None)], [wire.Done(7)]))
    [step] = engines.out()
    assert isinstance(step, wire.Step) and step.finishes[0].token == 52
    assert step.finishes[0].weight_versions == [(0, 0, 3)] and not engines.fleet.requests.num_live


def test_completions_of_one_request_go_on_by_themselves_when_their_engine_is_lost() -> None:
    """With the seeds that they had, behind their own tokens; the request ends once, with the last of them."""
    engines = Engines(2)
    first = engines.add(4, n=4, seed=2**63 - 2, prompt_logprobs=1, top_k=5)
    engines.fleet.take(first, wire.Step([4, 5, 6], [50, 60, 70], [wire.Finish(7, 80, "stop", None)]))
    engines.out()
    engines.fleet.lose(first, "died")
    sent = engines.take_sent()
    assert {number for number, _ in sent} == {1 - first}
    asked: dict[str, Any] = {"max_tokens": 8, "top_k": 5}
    assert [(add.request_id, add.known_ids(), add.params) for _, add in sent] == [
        (4, [50], {**asked, "seed": 2**63 - 2, "prompt_logprobs": 1}),
        (5, [60], {**asked, "seed": 2**63 - 1}),
        (6, [70], {**asked, "seed": -(2**63)}),
    ]
    engines.fleet.take(1 - first, wire.Step([5], [61], [wire.Finish(4, 51, "stop", None)], [wire.Done(4)]))
    engines.fleet.take(first, wire.Ready(INFO))
    engines.fleet.lose(1 - first, "died")
    adds = [add for _, add in engines.take_sent()]
    assert [(add.request_id, add.known_ids()) for add in adds] == [(5, [60, 61]), (6, [70])]
    ends = [wire.Finish(row, 90, "length", None) for row in (5, 6)]
    engines.fleet.take(first, wire.Step([], [], ends, [wire.Done(6), wire.Done(5)]))
    steps = [step for step in engines.out() if isinstance(step, wire.Step)]
    assert [done.request_id for step in steps for done in step.done] == [4]
    spans = [(end.row, end.weight_versions) for step in steps for end in step.finishes]
    assert spans == [(4, [(0, 0, 2)]), (5, [(0, 0, 3)]), (6, [(0, 0, 2)])] and not engines.fleet.requests.num_live


def test_completions_that_have_not_begun_stay_together_when_their_engine_is_lost() -> None:
    engines = Engines(2)
    engines.fleet.lose(engines.add(4, n=3, seed=5), "died")
    [(_, add)] = engines.take_sent()
    assert (add.request_id, add.params["n"], add.params["seed"]) == (4, 3, 5)


@pytest.mark.parametrize("how", ["abort", "refused"])
def test_completions_that_go_on_by_themselves_end_as_one_request(how: str) -> None:
    engines = Engines(2)
    first = engines.add(4, n=3)
    engines.fleet.take(first, wire.Step([4, 5, 6], [50, 60, 70]))
    engines.out()
    engines.fleet.lose(first, "died")
    engines.take_sent()
    if how == "abort":
        engines.fleet.requests.abort(4)
        assert engines.take_sent() == [(1 - first, wire.Abort(row)) for row in (4, 5, 6)]
    for row in (4, 5, 6):
        aborted, refused = wire.aborted(row, 1), wire.Refused(row, "not this")
        engines.fleet.take(1 - first, aborted if how == "abort" else refused)
    steps = [step for step in engines.out() if isinstance(step, wire.Step)]
    assert [[end.row for end in step.finishes] for step in steps] == [[4], [5], [6]]
    assert {end.stop_reason for step in steps for end in step.finishes} == {None if how == "abort" else "not this"}
    assert [done.request_id for step in steps for done in step.done] == [4]


def test_a_request_that_takes_every_engine_with_it_is_ended() -> None:
    """The others go on, and so does one that gains tokens on each engine, however many are lost."""
    engines, where = Engines(2), dict[int, int]()
    engines.fleet.requests.add(3, PROMPT, {"n": 2})
    engines.fleet.requests.add(7, PROMPT, {})
    engines.fleet.requests.bind()
    for number in range(4):
        where |= {frame.request_id: engine for engine, frame in engines.take_sent()}
        engines.fleet.take(where[7], wire.Step([7], [50 + number]))
        if number == 0:
            engines.fleet.take(where[3], wire.Step([4], [70], [wire.Finish(3, 61, "length", None)]))
        lost = where.get(4, where[3])  # of 3 it is completion 4 that goes on
        engines.fleet.lose(lost, "crashed")
        engines.fleet.take(lost, wire.Ready(INFO))
    ends = [end for step in engines.out() if isinstance(step, wire.Step) for end in step.finishes]
    assert [(end.row, end.reason) for end in ends] == [(3, "length"), (4, "abort")]
    assert ends[1].stop_reason == "3 replicas were lost while they computed this request: crashed"
    assert engines.fleet.requests.num_live == 1


def test_an_abort_ends_a_request_wherever_it_is() -> None:
    engines = Engines(2)
    bound = engines.add(0)
    engines.fleet.requests.abort(0)
    assert engines.take_sent() == [(bound, wire.Abort(0))] and not engines.out()
    engines.fleet.lose(bound, "died")
    [step] = engines.out()
    assert isinstance(step, wire.Step) and [end.reason for end in step.finishes] == ["abort"]
    for request_id in range(1, 40):
        engines.fleet.requests.add(request_id, PROMPT, {})
    engines.fleet.requests.abort(39)
    [step] = engines.out()
    assert isinstance(step, wire.Step) and step.done[0].request_id == 39
    assert not engines.take_sent(), "no engine had it"


def test_an_engine_gets_the_bound_of_a_request_or_that_of_the_fleet() -> None:
    """The longest text that all engines can hold: another one may have to continue it."""
    engines, most = Engines(2), INFO["max_model_len"] - len(PROMPT)
    for request_id, (asked, sent) in enumerate([(0, 0), (9, 9), (most, most), (most + 1, most), (None, most)]):
        engines.fleet.requests.add(request_id, PROMPT, {"max_tokens": asked, "min_tokens": 9})
        engines.fleet.requests.bind()
        [(engine, add)] = engines.take_sent()
        assert add.params["max_tokens"] == sent
        engines.fleet.take(engine, wire.Step([], [], done=[wire.Done(request_id)]))
    engines.fleet.requests.add(9, PROMPT, {})
    engines.fleet.requests.bind()
    [(_, add)] = engines.take_sent()
    assert "max_tokens" not in add.params
