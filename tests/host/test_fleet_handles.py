"""A fleet's engines as processes: another takes the place of one that is lost."""

import os
import signal
import threading
import time
from typing import Any
from unittest.mock import Mock

import pytest
from recorded_engines import INFO, PROMPT

from nanovllm.errors import ReplicaError
from nanovllm.host import fleet_handles, wire
from nanovllm.host.fleet_handles import FleetHandles
from nanovllm.host.handle import Lost
from nanovllm.host.start import await_ready


@pytest.mark.parametrize(("blocks", "longest", "is_given_up"), [(40, 256, False), (8, 128, True)])
def test_an_engine_may_return_with_less_room(
    blocks: int, longest: int, is_given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for what its options give, as at its first start; the longest text that is served must fit."""
    monkeypatch.setattr(fleet_handles, "ChildHandle", lambda start: Mock(number=start.number, start=start))
    handles = FleetHandles("model", {"data_parallel_size": 2})
    handles.form([wire.Ready(INFO)] * 2)
    first: Any = handles.all[0]
    handles.take(first, Lost("died"))
    second: Any = handles.all[0]
    assert second is not first and second.start == first.start
    handles.take(second, wire.Ready({**INFO, "num_kvcache_blocks": blocks, "max_model_len": longest}))
    if is_given_up:
        second.give_up.assert_called_once_with("restarted with room for 128 tokens a request, and 256 are served")
    handles.fleet.requests.add(1, PROMPT, {"max_tokens": 8})
    handles.fleet.requests.add(2, PROMPT, {"max_tokens": 8})
    handles.fleet.requests.bind()
    assert bool(second.send.called) != is_given_up


def test_an_engine_that_is_silent_while_it_starts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.host.handle.MODULE", "echo_engine")  # it says nothing of itself
    monkeypatch.setattr(fleet_handles, "SILENCE", 0.5)
    handles = FleetHandles("model", {"data_parallel_size": 2})
    try:
        with pytest.raises(ReplicaError, match="could not start: gave no sign of life for"):
            await_ready(handles)
    finally:
        handles.close(patience=0)


def test_an_engine_that_cannot_be_killed_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a driver may hold a process whose device is gone. Another is started in its place at once."""
    started: list[Any] = []

    def start(start: wire.Start) -> Any:
        started.append(Mock(number=start.number, close=lambda patience: goes_on.wait(20)))
        return started[-1]

    goes_on = threading.Event()
    monkeypatch.setattr(fleet_handles, "ChildHandle", start)
    handles = FleetHandles("model", {"data_parallel_size": 2})
    handles.form([wire.Ready(INFO)] * 2)
    begin = time.monotonic()
    handles.take(handles.all[0], Lost("died"))
    assert time.monotonic() - begin < 5 and handles.all == [started[2], started[1]]
    goes_on.set()


def test_all_engines_together_have_the_time_of_one_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.host.handle.MODULE", "echo_engine")
    handles = FleetHandles("model", {"data_parallel_size": 4})
    for each in handles.all:
        os.kill(each.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
    begin = time.monotonic()
    handles.close(patience=2.0)
    assert time.monotonic() - begin < 6
    assert all(each.process.returncode == -signal.SIGKILL for each in handles.all)  # type: ignore[attr-defined]
