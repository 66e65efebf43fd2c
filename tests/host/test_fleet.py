"""Several engines as one: pure, with frames in and frames out."""

from array import array
from typing import Any
from unittest.mock import Mock

import pytest

from nanovllm.engine.engine_state import EngineState
from nanovllm.errors import OutOfMemory, ReplicaError
from nanovllm.host import fleet_handles, wire
from nanovllm.host.fleet import Fleet
from nanovllm.host.fleet_handles import FleetHandles
from nanovllm.host.handle import Lost

INFO = {"block_size": 16, "num_kvcache_blocks": 64, "page_groups": [(None, 1)], "max_num_seqs": 4, "max_model_len": 256}
PROMPT = array("i", range(20)).tobytes()


class Engines:
    """Recorder of what a fleet sends, and of the engines that it starts again."""

    def __init__(self, count: int, most_restarts: int = 3, restarts: bool = True) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.started: list[int] = []
        restart = self.started.append if restarts else None
        self.fleet = Fleet([INFO] * count, self._send, restart, most_restarts)

    def _send(self, number: int, frames: list[wire.Down]) -> None:
        self.sent += [(number, frame) for frame in frames]

    def take_sent(self) -> list[tuple[int, Any]]:
        sent, self.sent = self.sent, []
        return sent

    def out(self) -> list[wire.Up]:
        out, self.fleet.out = self.fleet.out, []
        return out

    def add(self, request_id: int, **params: Any) -> int:
        """Returns the engine that gets it."""
        self.fleet.add(request_id, PROMPT, {"max_tokens": 8, **params})
        self.fleet.bind()
        [(number, add)] = self.take_sent()
        assert add.request_id == request_id
        return number


def answer(number: int, value: Any, **more: Any) -> wire.Answer:
    return wire.Answer(number, value, EngineState(), **more)


def test_a_request_goes_on_behind_its_tokens_when_its_engine_is_lost() -> None:
    engines = Engines(2)
    first = engines.add(7)
    engines.fleet.take(first, wire.Step([7], [50]))
    engines.fleet.take(first, wire.Step([7], [51]))
    engines.out()
    engines.fleet.lose(first, "died")
    [(second, add)] = engines.take_sent()
    assert second != first and add.known == array("i", [50, 51]).tobytes()
    assert engines.started == [first]
    engines.fleet.take(second, wire.Step([], [], [wire.Finish(7, 52, "length", None)], [wire.Done(7)]))
    [step] = engines.out()
    assert isinstance(step, wire.Step) and step.finishes[0].token == 52
    assert step.finishes[0].weight_versions == [(0, 0, 3)] and not engines.fleet.num_live


def test_tokens_of_several_completions_are_computed_again_and_left_out() -> None:
    engines = Engines(2)
    first = engines.add(4, n=2)
    engines.fleet.take(first, wire.Step([4, 5], [50, 60]))
    engines.fleet.take(first, wire.Step([5], [61], [wire.Finish(4, 51, "stop", None)]))
    engines.out()
    engines.fleet.lose(first, "died")
    [(second, add)] = engines.take_sent()
    assert add.known == b""
    for step in (
        wire.Step([4, 5], [50, 60], logprobs=[(4, b"a"), (5, b"b")]),
        wire.Step([5], [61], [wire.Finish(4, 51, "stop", None)]),
        wire.Step([5], [62], logprobs=[(5, b"c")]),
        wire.Step([], [], [wire.Finish(5, 63, "length", None)], [wire.Done(4)]),
    ):
        engines.fleet.take(second, step)
    steps = [step for step in engines.out() if isinstance(step, wire.Step)]
    assert [(step.rows, step.tokens, step.logprobs) for step in steps if step.rows] == [([5], [62], [(5, b"c")])]
    assert [(end.row, end.token) for step in steps for end in step.finishes] == [(5, 63)]


def test_a_step_may_bring_tokens_that_are_known_and_others() -> None:
    engines = Engines(2)
    first = engines.add(4, n=2)
    engines.fleet.take(first, wire.Step([4, 4, 5], [50, 51, 60]))
    engines.out()
    engines.fleet.lose(first, "died")
    [(second, _)] = engines.take_sent()
    lines = [(4, b"a"), (4, b"b"), (4, b"c"), (4, b"d"), (5, b"e"), (5, b"f")]
    ends = [wire.Finish(4, 53, "length", None), wire.Finish(5, 61, "length", None)]
    engines.fleet.take(second, wire.Step([4, 4, 4, 5], [50, 51, 52, 60], ends, [wire.Done(4)], lines))
    [step] = engines.out()
    assert isinstance(step, wire.Step)
    assert (step.rows, step.tokens, step.logprobs) == ([4], [52], [(4, b"c"), (4, b"d"), (5, b"f")])
    assert [(end.row, end.token) for end in step.finishes] == [(4, 53), (5, 61)]


def test_an_abort_ends_a_request_wherever_it_is() -> None:
    engines = Engines(2)
    bound = engines.add(0)
    engines.fleet.abort(0)
    assert engines.take_sent() == [(bound, wire.Abort(0))] and not engines.out()
    engines.fleet.lose(bound, "died")
    [step] = engines.out()
    assert isinstance(step, wire.Step) and [end.reason for end in step.finishes] == ["abort"]
    for request_id in range(1, 40):
        engines.fleet.add(request_id, PROMPT, {})
    engines.fleet.abort(39)
    [step] = engines.out()
    assert isinstance(step, wire.Step) and step.done[0].request_id == 39
    assert not engines.take_sent(), "no engine had it"


def test_a_call_ends_with_the_last_answer_and_raises_what_the_first_raises() -> None:
    engines = Engines(2)
    pending = engines.fleet.call("sleep", {"mode": None})
    numbers = {frame.number for _, frame in engines.take_sent()}
    [number] = numbers
    engines.fleet.take(0, answer(number, {"freed_bytes": 3}))
    assert pending.waiting == {1}
    engines.fleet.take(1, answer(number, {"freed_bytes": 4}))
    assert pending.result() == {"freed_bytes": 7}
    pending = engines.fleet.call("checksum", {})
    for engine, sums in enumerate(({"a": "1"}, {"a": "2"})):
        engines.fleet.take(engine, answer(number + 1, {"checksums": sums}))
    with pytest.raises(RuntimeError, match="replicas hold different values of a"):
        pending.result()
    pending = engines.fleet.call("wake_up", {})
    engines.fleet.take(0, answer(number + 2, None, kind="ValueError", message="not this"))
    engines.fleet.lose(1, "died")
    with pytest.raises(ValueError, match="not this"):
        pending.result()


def test_an_engine_that_is_lost_after_new_weights_waits_for_the_next() -> None:
    engines = Engines(2)
    pending = engines.fleet.call("load_weights", {"folder": "x"})
    [number] = {frame.number for _, frame in engines.take_sent()}
    for engine in range(2):
        engines.fleet.take(engine, answer(number, {}))
    assert pending.result() == {}
    engines.fleet.lose(1, "died")
    assert not engines.started and engines.fleet.numbers == [0]
    engines.fleet.call("begin_update", {})
    assert engines.started == [1]
    assert [engine for engine, _ in engines.take_sent()] == [0, 1], "it hears of the update as it starts"


def test_weights_from_a_trainer_reach_the_other_engines_through_the_first() -> None:
    engines = Engines(3)
    engines.fleet.call("receive", {"update_info": {"names": []}})
    calls = dict(engines.take_sent())
    assert [calls[n].name for n in range(3)] == ["receive", "update", "update"]
    assert calls[0].relays and calls[1].takes_weights and calls[2].takes_weights
    bucket = wire.Bucket(calls[0].number, b"weights")
    engines.fleet.take(0, bucket)
    assert engines.take_sent() == [(1, bucket), (2, bucket)]


def test_the_end_of_the_last_engine_is_the_end() -> None:
    engines = Engines(2, most_restarts=0)
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


def test_a_sleep_that_some_could_not_do_is_repeated_by_those_alone() -> None:
    """As is a wake_up; the others have done it already."""
    engines = Engines(2)
    for number, (name, before, after) in enumerate((("sleep", [], ["weights"]), ("wake_up", ["weights"], [])), start=1):
        pending = engines.fleet.call(name, {"tags": ["weights"]})
        assert [engine for engine, _ in engines.take_sent()] == [0, 1]
        engines.fleet.take(0, wire.Answer(2 * number - 1, {"freed_bytes": 1}, EngineState(asleep=after)))
        state = EngineState(asleep=before)
        engines.fleet.take(1, wire.Answer(2 * number - 1, None, state, "OutOfMemory", "taken by others"))
        with pytest.raises(OutOfMemory, match="taken by others"):
            pending.result()
        assert engines.fleet.state.asleep == ["weights"], "one of them sleeps"
        pending = engines.fleet.call(name, {"tags": ["weights"]})
        assert [engine for engine, _ in engines.take_sent()] == [1]
        engines.fleet.take(1, wire.Answer(2 * number, {"freed_bytes": 1}, EngineState(asleep=after)))
        assert pending.result() == {"freed_bytes": 1} and engines.fleet.state.asleep == after


@pytest.mark.parametrize(("blocks", "longest", "is_given_up"), [(40, 256, False), (8, 128, True)])
def test_an_engine_may_return_with_less_room(
    blocks: int, longest: int, is_given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for what its options give, as at its first start; the longest text that is served must fit."""
    monkeypatch.setattr(fleet_handles, "ChildHandle", lambda start, module: Mock(number=start.number, start=start))
    handles = FleetHandles("model", {"data_parallel_size": 2})
    handles.form([wire.Ready(INFO)] * 2)
    first: Any = handles.all[0]
    handles.take(first, Lost("died"))
    second: Any = handles.all[0]
    assert second is not first and second.start == first.start
    handles.take(second, wire.Ready({**INFO, "num_kvcache_blocks": blocks, "max_model_len": longest}))
    if is_given_up:
        second.give_up.assert_called_once_with("started with room for texts of 128 tokens, and 256 are served")
    handles.fleet.add(1, PROMPT, {"max_tokens": 8})
    handles.fleet.add(2, PROMPT, {"max_tokens": 8})
    handles.fleet.bind()
    assert bool(second.send_packed.called) != is_given_up
