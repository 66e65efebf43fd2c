"""Requests of several engines as one: pure, with frames in and frames out."""

from typing import Any

from recorded_engines import INFO, PROMPT, Engines, answer

from nanovllm.engine.engine_state import EngineState, LoadedAdapter
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.step import Done, Finish, Step
from nanovllm.host import wire


def test_completions_of_one_request_go_on_by_themselves_when_their_engine_is_lost() -> None:
    """With their seeds and versions; also where one of them is refused."""
    engines = Engines(2)
    first = engines.add(4, n=3, seed=2**63 - 2, prompt_logprobs=1, top_k=5)
    engines.fleet.take(first, Step([4, 5, 6], [50, 60, 70]))
    engines.fleet.lose(first, "died")
    asked: dict[str, Any] = {"max_tokens": 8, "top_k": 5}
    assert [(add.request_id, add.known_ids(), add.params) for _, add in engines.take_sent()] == [
        (4, [50], {**asked, "seed": 2**63 - 2, "prompt_logprobs": 1}),
        (5, [60], {**asked, "seed": 2**63 - 1}),
        (6, [70], {**asked, "seed": -(2**63)}),
    ]
    ends = [Finish(row, 90, "length", None) for row in (4, 6)]
    engines.fleet.take(1 - first, Step([], [], ends, [Done(4), Done(6)]))
    engines.fleet.take(1 - first, wire.Refused(5, "not this"))
    steps = [step for step in engines.out() if isinstance(step, Step)]
    spans = [(end.row, end.weight_versions, end.stop_reason) for step in steps for end in step.finishes]
    assert spans == [(4, [(0, 0, 2)], None), (6, [(0, 0, 2)], None), (5, [(0, 0, 1)], "not this")]
    assert [done.request_id for step in steps for done in step.done] == [4] and not engines.fleet.requests.num_live


def test_a_request_that_takes_every_engine_with_it_is_ended() -> None:
    """The others go on, and so does one that gains tokens on each engine, however many are lost."""
    engines, where = Engines(2), dict[int, int]()
    engines.fleet.requests.add(3, PROMPT, {"n": 2})
    engines.fleet.requests.add(7, PROMPT, {})
    engines.fleet.requests.bind()
    for number in range(4):
        where |= {frame.request_id: engine for engine, frame in engines.take_sent()}
        engines.fleet.take(where[7], Step([7], [50 + number]))
        if number == 0:
            engines.fleet.take(where[3], Step([4], [70], [Finish(3, 61, "length", None)]))
        lost = where.get(4, where[3])  # of 3 it is completion 4 that goes on
        engines.fleet.lose(lost, "crashed")
        engines.fleet.take(lost, wire.Ready(INFO))
    ends = [end for step in engines.out() if isinstance(step, Step) for end in step.finishes]
    assert [(end.row, end.reason) for end in ends] == [(3, "length"), (4, "abort")]
    assert ends[1].stop_reason == "3 replicas were lost while they computed this request: crashed"
    assert engines.fleet.requests.num_live == 1


def test_rows_whose_adapter_has_no_name_go_to_engines_that_hold_it() -> None:
    """Not to one that was started later; and where all that held it are lost, they end with the reason."""
    engines, prompt = Engines(2), Prompt.of([*range(20)], None, "a")
    for request_id in range(6):
        engines.fleet.requests.add(request_id, prompt if request_id % 2 else PROMPT, {"max_tokens": 8})
    engines.fleet.requests.bind()
    lost = {add.request_id: engine for engine, add in engines.take_sent()}[1]
    engines.fleet.lose(lost, "died")
    engines.fleet.take(lost, wire.Ready(INFO))
    for request_id in range(6, 12):
        engines.fleet.requests.add(request_id, prompt if request_id % 2 else PROMPT, {"max_tokens": 8})
    engines.fleet.requests.bind()
    where = {add.request_id: engine for engine, add in engines.take_sent()}
    assert {engine for request_id, engine in where.items() if request_id % 2} == {1 - lost} and lost in where.values()
    engines.fleet.take(lost, answer(0, {}, EngineState(adapters={"other": LoadedAdapter("b", "/b")})))
    engines.fleet.lose(1 - lost, "died")
    finishes = [end for step in engines.out() if isinstance(step, Step) for end in step.finishes]
    assert sorted(end.row for end in finishes) == [1, 3, 5, 7, 9, 11] and engines.fleet.requests.num_live == 6
    assert {end.stop_reason for end in finishes} == {
        "its adapter was removed or replaced, and the replicas that held it were lost"}  # fmt: skip
    engines.fleet.requests.bind()
    engines.take_sent()
    engines.fleet.take(lost, answer(0, {}, EngineState(adapters={"again": LoadedAdapter("a", "/a")})))
    engines.fleet.requests.add(13, prompt, {})
    assert engines.fleet.requests.num_live == 7


def test_an_engine_gets_the_bound_of_a_request_or_that_of_the_fleet() -> None:
    """The longest text that all engines can hold: another one may have to continue it."""
    engines, most = Engines(2), INFO["max_model_len"] - len(PROMPT)
    for request_id, (asked, sent) in enumerate([(0, 0), (9, 9), (most, most), (most + 1, most), (None, most)]):
        engines.fleet.requests.add(request_id, PROMPT, {"max_tokens": asked, "min_tokens": 9})
        engines.fleet.requests.bind()
        [(engine, add)] = engines.take_sent()
        assert add.params["max_tokens"] == sent
        engines.fleet.take(engine, Step([], [], done=[Done(request_id)]))
    engines.fleet.requests.add(9, PROMPT, {})
    engines.fleet.requests.bind()
    [(_, add)] = engines.take_sent()
    assert "max_tokens" not in add.params
