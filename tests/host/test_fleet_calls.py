"""Calls to several engines as one, and what an engine that was lost is told of them when it returns."""

from typing import Any
from unittest.mock import Mock

import pytest
from recorded_engines import INFO, Engines, answer

from nanovllm.engine.calls import CALLS, CallSpec
from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.step import Done, Step
from nanovllm.errors import OutOfMemory, ReplicaError
from nanovllm.host import fleet, wire


@pytest.mark.parametrize(
    ("name", "values", "result"),
    [
        ("sleep", [{"freed_bytes": 3}, {"freed_bytes": 4}], {"freed_bytes": 7}),
        ("checksum", [{"checksums": {"a": "1"}}, {"checksums": {"a": "1"}}], {"checksums": {"a": "1"}}),
        ("checksum", [{"checksums": {"a": "1"}}, {"checksums": {"a": "2"}}], "replicas hold different values of a"),
    ],
)
def test_a_call_ends_with_the_last_answer(name: str, values: list[Any], result: Any) -> None:
    engines = Engines(2)
    pending = engines.fleet.call(name, {})
    for engine, value in enumerate(values):
        assert engine in pending.waiting
        engines.fleet.take(engine, answer(1, value))
    if isinstance(result, str):
        with pytest.raises(RuntimeError, match=result):
            pending.result()
    else:
        assert pending.result() == result


NEW = EngineState(weight_version=1)


def computing(engines: Engines, first: int = 100) -> set[int]:
    """Engines that get requests, of two with nothing in common: `first` and the next."""
    bound = {}
    for request_id in range(first, first + 2):
        engines.fleet.requests.add(request_id, Prompt([request_id] * 20), {})
        engines.fleet.requests.bind()
        [(bound[request_id], _)] = engines.take_sent()
    for request_id, engine in bound.items():
        engines.fleet.take(engine, Step([], [], done=[Done(request_id)]))
    return set(bound.values())


def test_an_engine_that_is_lost_after_new_weights_computes_with_the_next() -> None:
    """It is started at once, with the checkpoint's."""
    engines = Engines(2)
    engines.complete("load_weights", NEW, folder="x")
    engines.fleet.lose(1, "died")
    assert engines.started == [1]
    engines.fleet.take(1, wire.Ready(INFO))
    assert computing(engines) == {0}
    engines.fleet.call("checksum", {})
    [(engine, call)] = engines.take_sent()
    assert engine == 0, "the other's weights are not to be those of all"
    engines.fleet.take(0, answer(call.number, {"checksums": {}}, NEW))
    number = engines.call("load_weights", folder="a wrong one")
    for engine, state in enumerate((NEW, EngineState())):
        engines.fleet.take(engine, answer(number, None, state, kind="ValueError", message="not this"))
    assert computing(engines, 102) == {0}, "it has the checkpoint's still"
    engines.complete("load_weights", EngineState(weight_version=2), folder="x")
    assert computing(engines, 104) == {0, 1}


def test_an_engine_that_is_lost_while_a_trainer_has_its_device_returns_with_the_weights_after_those() -> None:
    """The device is the trainer's until all of the others' memory is awake."""
    engines = Engines(2)
    asleep = EngineState(asleep=["kv_cache", "weights"], level=2, incomplete="dropped")
    has_room, awake = EngineState(asleep=["kv_cache"], level=2, incomplete="dropped"), EngineState(weight_version=1)
    engines.complete("sleep", asleep, level=2)
    engines.fleet.lose(1, "died")
    engines.complete("wake_up", has_room, tags=["weights"])
    engines.complete("load_weights", EngineState(asleep=["kv_cache"], weight_version=1), folder="x")
    assert not engines.started
    engines.complete("wake_up", awake, tags=["kv_cache"])
    assert engines.started == [1]
    engines.fleet.take(1, wire.Ready(INFO))
    assert computing(engines, 106) == {0}
    engines.complete("sleep", asleep, level=2)
    engines.complete("wake_up", has_room, tags=["weights"])
    engines.complete("load_weights", EngineState(asleep=["kv_cache"], weight_version=2), folder="x")
    engines.complete("wake_up", EngineState(weight_version=2), tags=["kv_cache"])
    assert computing(engines, 108) == {0, 1}


@pytest.mark.parametrize("answers", [1, 2])
def test_engines_with_the_checkpoints_weights_alone_are_the_end(answers: int) -> None:
    """Where others have had newer ones, and no trainer is heard of: requests would wait for ever."""
    engines = Engines(2)
    number = engines.call("load_weights", folder="x")
    for engine in range(answers):
        engines.fleet.take(engine, answer(number, {}, NEW))
    engines.fleet.lose(0, "died")
    assert engines.fleet.ended is None
    engines.fleet.lose(1, "died too")
    assert engines.fleet.ended == "no replica is left: replica 1: died too"


PAUSED = EngineState(pause_mode="keep")


def test_an_engine_that_returns_is_first_made_as_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever calls say that it missed them: those of today, and such as change something else."""
    spec = CallSpec(Mock(), missed=lambda own, others: [{"to": others.level}] if others.level > own.level else [])
    monkeypatch.setitem(CALLS, "raise", spec)
    engines, both = Engines(2), EngineState(pause_mode="keep", level=2)
    for name in ("pause", "raise"):
        engines.complete(name, both)
    engines.fleet.lose(1, "died")
    assert engines.started == [1] and not engines.take_sent(), "it must compute first"
    engines.fleet.take(1, wire.Ready(INFO))
    calls = engines.take_sent()
    wanted = [(1, "pause", {"mode": "keep"}), (1, "raise", {"to": 2})]
    assert [(engine, call.name, call.options) for engine, call in calls] == wanted
    for _, call in calls:
        assert {*engines.add_all(10 * call.number, 10 * call.number + 1)} <= {0}
        engines.fleet.take(1, answer(call.number, {}, PAUSED if call.name == "pause" else both))
    assert 1 in engines.add_all(0, 1) and engines.fleet.state == both


def test_an_engine_that_cannot_become_as_the_others_is_given_up() -> None:
    engines = Engines(2)
    engines.complete("pause", PAUSED)
    engines.fleet.lose(1, "died")
    engines.fleet.take(1, wire.Ready(INFO))
    [(_, call)] = engines.take_sent()
    engines.fleet.take(1, answer(call.number, None, kind="ValueError", message="not this"))
    assert engines.given_up == [(1, "could not catch up with the others: pause: not this")]
    assert engines.add_all(1) == [0]
    engines.fleet.lose(1, "given up")
    assert engines.started == [1, 1]


def test_an_engine_that_is_lost_during_a_call_starts_after_it_and_misses_nothing() -> None:
    engines = Engines(2)
    number = engines.call("pause", mode="wait")
    engines.fleet.lose(1, "died")
    assert not engines.started, "it would not hear of the pause"
    engines.fleet.take(0, answer(number, {}, PAUSED))
    assert engines.started == [1]
    engines.fleet.take(0, answer(engines.call("resume"), {}))
    engines.fleet.take(1, wire.Ready(INFO))
    assert not engines.take_sent(), "what is over by then is not missed"


def test_what_an_engine_that_starts_says_of_itself_is_not_the_state_of_all() -> None:
    engines = Engines(2)
    engines.complete("pause", PAUSED)
    engines.fleet.lose(0, "died")
    engines.fleet.lose(1, "died")
    assert engines.started == [0, 1]
    number = engines.call("info")
    for engine in range(2):
        engines.fleet.take(engine, wire.Ready(INFO))
        engines.fleet.take(engine, answer(number, {}))
    assert engines.fleet.state.is_paused and {call.name for _, call in engines.take_sent()} == {"pause"}


@pytest.mark.parametrize("begun", [True, False], ids=["sent", "asked for"])
def test_the_pause_that_a_resume_ends_is_over_whenever_engines_answer(begun: bool) -> None:
    """One engine has paused at once; the other, where a request runs, hears of the resume first, and has not answered
    the pause before."""
    engines = Engines(2)
    pause = engines.call("pause", mode="wait")
    engines.fleet.take(0, answer(pause, {}, EngineState(pause_mode="wait")))
    resume = engines.call("resume") if begun else 0
    engines.fleet.is_resuming = not begun
    engines.fleet.take(1, answer(pause, None, kind="RuntimeError", message="resumed before it was done"))
    assert not engines.fleet.state.is_paused
    resume = resume or engines.call("resume")
    for engine in (1, 0):
        engines.fleet.take(engine, answer(resume, {}))
        assert not engines.fleet.state.is_paused
    engines.complete("pause", PAUSED)
    assert engines.fleet.state.is_paused


def test_versions_go_on_from_those_of_lost_engines() -> None:
    """New weights have one number more than those before, also where nobody is left who had these."""
    engines = Engines(2)
    engines.complete("load_weights", EngineState(weight_version=7), folder="x", weight_version=7)
    engines.fleet.lose(1, "died")
    number = engines.call("begin_update")
    for engine in range(2):
        state = EngineState(weight_version=7 - 7 * engine, incomplete="an update")
        engines.fleet.take(engine, answer(number, {}, state))
    engines.fleet.take(1, wire.Ready(INFO))
    engines.fleet.lose(0, "died")
    engines.fleet.take(1, answer(engines.call("update"), {}, EngineState(incomplete="an update")))
    engines.fleet.call("finish_update", {})
    [(_, call)] = engines.take_sent()
    assert call.options == {"weight_version": 8}


@pytest.mark.parametrize(
    ("name", "options", "ends"),
    [
        ("pause", {}, True), ("pause", {"mode": "keep"}, False), ("sleep", {}, True), ("sleep", {"mode": None}, False),
        ("begin_update", {"in_flight": "abort"}, True), ("begin_update", {}, False), ("load_weights", {}, False),
        ("resume", {}, False), ("update", {}, False),
    ],
)  # fmt: skip
def test_a_call_that_ends_requests_ends_those_that_no_engine_has(
    name: str, options: dict[str, Any], ends: bool
) -> None:
    engines = Engines(2)
    waiting = 40 - len(engines.add_all(*range(40)))
    assert waiting > 0
    engines.fleet.call(name, options)
    assert len(engines.out()) == waiting * ends


def test_weights_from_a_trainer_reach_the_other_engines_through_the_first() -> None:
    engines = Engines(3)
    engines.fleet.call("receive", {"update_info": {"names": []}})
    calls = dict(engines.take_sent())
    assert [calls[n].name for n in range(3)] == ["receive", "update", "update"]
    assert calls[0].relays and calls[1].takes_weights and calls[2].takes_weights
    bucket = wire.Bucket(calls[0].number, b"weights")
    engines.fleet.take(0, bucket)
    assert engines.take_sent() == [(1, bucket), (2, bucket)]


def test_weights_do_not_come_any_more_when_the_engine_that_receives_them_is_lost() -> None:
    """The others would wait for them; nor does the end come twice, or for one that had them already."""
    engines = Engines(3)
    pending = engines.fleet.call("receive", {"update_info": {"names": []}})
    number = engines.take_sent()[0][1].number
    engines.fleet.take(0, wire.Bucket(number, b"weights"))
    engines.fleet.take(1, answer(number, None, kind="ValueError", message="not this"))
    engines.take_sent()
    engines.fleet.lose(0, "died")
    assert engines.take_sent() == [(2, wire.Bucket(number, None, "replica 0, which received them, was lost: died"))]
    engines.fleet.take(2, answer(number, None, kind="RuntimeError", message="replica 0, which received them"))
    with pytest.raises(ValueError, match="not this"):
        pending.result()
    number = engines.call("pause")
    engines.fleet.lose(1, "died")
    assert not engines.take_sent(), "a call without weights has none to end"


def test_the_end_of_the_last_engine_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MOST_RESTARTS", 0)
    engines = Engines(2)
    pending = engines.fleet.call("checksum", {})
    engines.fleet.lose(0, "died")
    assert engines.fleet.ended is None
    engines.fleet.lose(1, "died too")
    assert engines.fleet.ended == "no replica is left: replica 1: died too"
    with pytest.raises(ReplicaError, match="every replica was lost"):
        pending.result()
    alone = Engines(1, restarts=False)
    alone.fleet.lose(0, "died")
    assert alone.fleet.ended == "died"


def test_an_engine_is_restarted_three_times_an_hour() -> None:
    engines = Engines(2)
    for minute, count in ((0, 1), (40, 2), (50, 3), (61, 4), (70, 4)):
        engines.time = 60.0 * minute
        engines.fleet.lose(1, "died")
        assert (engines.started, engines.fleet.num_restarts) == ([1] * count, count)
        engines.fleet.take(1, wire.Ready(INFO))
    assert engines.fleet.numbers == [0]


def test_a_sleep_that_some_could_not_do_is_repeated_by_those_alone() -> None:
    """As is a wake_up; the others have done it already."""
    engines = Engines(2)
    for name, before, after in (("sleep", [], ["weights"]), ("wake_up", ["weights"], [])):
        pending = engines.fleet.call(name, {"tags": ["weights"]})
        (_, call), _ = engines.take_sent()
        engines.fleet.take(0, answer(call.number, {"freed_bytes": 1}, EngineState(asleep=after)))
        error = {"kind": "OutOfMemory", "message": "taken by others"}
        engines.fleet.take(1, answer(call.number, None, EngineState(asleep=before), **error))
        with pytest.raises(OutOfMemory, match="taken by others"):
            pending.result()
        assert engines.fleet.state.asleep == ["weights"], "one of them sleeps"
        pending = engines.fleet.call(name, {"tags": ["weights"]})
        [(engine, call)] = engines.take_sent()
        assert engine == 1
        engines.fleet.take(1, answer(call.number, {"freed_bytes": 1}, EngineState(asleep=after)))
        assert pending.result() == {"freed_bytes": 1} and engines.fleet.state.asleep == after
