"""Requests that take long to check, in the program around an engine: they hold up nobody, and can be taken
back."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nanovllm.engine.calls import CALLS, CallSpec, Steps
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.step import Step, aborted
from nanovllm.host import engine_host, wire
from nanovllm.host.engine_host import EngineHost

SLOW = {"structured_outputs": {"regex": "slow"}, "n": 2}
OTHER = {"structured_outputs": {"regex": "other"}}
KNOWN = {"structured_outputs": {"json_object": True}}


class Room:
    """A host whose engine takes in what is not slow; `goes_on` lets a slow check end."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.began, self.goes_on, self.added = threading.Event(), threading.Event(), threading.Condition()
        self.ids: list[int] = []
        book = SimpleNamespace(check=self._check, knows_grammar=lambda wanted: "json_object" in wanted)
        self.engine = Mock(book=book, add_request=self._add)
        self.engine.loop.take_unreported = Step
        self.engine.state = self.engine.stats = None
        self.host = EngineHost(self.engine, self.said.append, Mock())
        self.host._send_stats = lambda: None  # type: ignore[method-assign]

    def _check(self, prompt: Prompt, params: Any) -> None:
        if params.structured_outputs.regex == "slow":
            self.began.set()
            assert self.goes_on.wait(20)

    def _add(self, prompt: Prompt, params: Any, request_id: int, known: list[int]) -> None:
        with self.added:
            self.ids.append(request_id)
            self.added.notify_all()

    def add(self, request_id: int, params: dict[str, Any]) -> None:
        self.host.handle(wire.Add.of(request_id, Prompt([5]), params))

    def wait_for(self, request_id: int) -> None:
        with self.added:
            assert self.added.wait_for(lambda: request_id in self.ids, 20)


@pytest.fixture
def room() -> Iterator[Room]:
    found = Room()
    yield found
    found.goes_on.set()


def test_an_abort_while_a_grammar_compiles_is_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its completions end at once, as aborted and not as refused, and the engine computes none of them. One that
    waits for a thread to check it never gets there."""
    monkeypatch.setitem(engine_host._SLOW_OPTIONS, "structured_outputs", 1)
    room = Room()
    room.add(3, SLOW)
    assert room.began.wait(20)
    room.host.handle(wire.Abort(3))
    room.add(5, OTHER)
    room.host.handle(wire.Abort(5))
    assert room.said == [aborted(3, 2), aborted(5, 1)]
    room.goes_on.set()
    room.add(7, OTHER)
    room.wait_for(7)
    assert room.ids == [3, 7] and len(room.said) == 2
    assert [call.args for call in room.engine.abort.call_args_list].count((3,)) == 2, "also after it was checked"


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_call_that_ends_requests_ends_those_whose_grammar_compiles(
    room: Room, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CALLS, "pause", replace(CALLS["pause"], run=lambda engine, mode: None))
    for request_id in (3, 5):
        room.add(request_id, SLOW)
    assert room.began.wait(20)
    room.host.handle(wire.Call(1, "pause", {"mode": mode}))
    room.host._advance_calls()
    ended = [aborted(3, 2), aborted(5, 2)] if mode == "abort" else []
    assert room.said[:-1] == ended and room.said[-1].number == 1


def test_known_and_quick_grammars_overtake(room: Room) -> None:
    room.add(3, SLOW)
    assert room.began.wait(20)
    room.add(5, KNOWN)
    assert room.ids == [5]
    room.add(7, OTHER)
    room.wait_for(7)


def test_requests_that_come_on_and_on_leave_time_for_steps() -> None:
    """A thousand requests at once, with 4 KB of options each, held those that ran up for 0.2 s."""
    begin = time.monotonic()

    def come(seconds: float) -> wire.Down:
        assert time.monotonic() < begin + 20, "no step in between"
        return wire.Abort(1)

    engine, intake = Mock(), Mock(next=come)
    engine.step.side_effect = [Step(), EOFError]
    EngineHost(engine, Mock(), intake).run()
    assert engine.step.call_count == 2


def test_resume_waits_for_calls_that_wait_for_no_request(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    read, run = threading.Event(), []

    def load(engine: Any) -> Steps:
        while not read.is_set():
            yield
        run.append("load")

    monkeypatch.setitem(CALLS, "load", CallSpec(load, runs_beside=True))
    monkeypatch.setitem(CALLS, "resume", CallSpec(lambda engine: run.append("resume")))
    for number, name in enumerate(("load", "resume")):
        room.host.handle(wire.Call(number, name, {}))
    room.host._advance_calls()
    assert not run
    read.set()
    room.host._advance_calls()
    assert run == ["load", "resume"] and all(answer.kind is None for answer in room.said)


def test_calls_run_in_the_order_in_which_they_came(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """`resume` ends what waits for steps before it, and overtakes nothing: no pause that was asked for before it comes
    after it."""
    run: list[str] = []

    def pause(engine: Any, number: int, waits: bool = False) -> Steps:
        while waits:
            yield
        run.append(f"pause {number}")

    for name, function in (("pause", pause), ("resume", lambda engine: run.append("resume"))):
        monkeypatch.setitem(CALLS, name, CallSpec(function))
    room.host.handle(wire.Call(1, "pause", {"number": 1, "waits": True}))
    room.host._advance_calls()
    later: list[tuple[str, dict[str, Any]]] = [("pause", {"number": 2}), ("resume", {}), ("pause", {"number": 4})]
    for number, (name, options) in enumerate(later, start=2):
        room.host.handle(wire.Call(number, name, options))
    room.host._advance_calls()
    assert run == ["pause 2", "resume", "pause 4"]
    assert [(answer.number, answer.message) for answer in room.said] == [
        (1, "pause: resumed before it was done"), (2, ""), (3, ""), (4, "")
    ]  # fmt: skip
