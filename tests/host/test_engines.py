"""A fleet's engines as processes: another takes the place of one that is lost."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from recorded_engines import INFO, PROMPT

from nanovllm.errors import ReplicaError
from nanovllm.host import engines as module
from nanovllm.host import wire
from nanovllm.host.engines import Engines
from nanovllm.host.handle import Lost
from nanovllm.host.start import await_ready


def idle(start: wire.Start, **more: Any) -> Any:
    """A handle whose engine says nothing."""
    fileno = Mock(return_value=os.eventfd(0))
    return Mock(number=start.number, start=start, waits=False, fileno=fileno, **more)


def take(engines: Engines, handle: Any, frame: wire.Up | Lost) -> None:
    engines.reader.frames.append((handle, frame))
    engines.take()


def of_two(monkeypatch: pytest.MonkeyPatch, start: Callable[[wire.Start], Any]) -> Engines:
    """Two engines that are ready."""
    monkeypatch.setattr(module, "Handle", start)
    engines = Engines("model", {"data_parallel_size": 2})
    for handle in engines.all:
        take(engines, handle, wire.Ready({**INFO, "num_kv_tokens": 1024}))
    return engines


@pytest.mark.parametrize(("blocks", "longest", "is_given_up"), [(40, 256, False), (8, 128, True)])
def test_an_engine_may_return_with_less_room(
    blocks: int, longest: int, is_given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for what its options give, as at its first start; the longest text that is served must fit."""
    engines = of_two(monkeypatch, idle)
    assert engines.fleet is not None
    first: Any = engines.all[0]
    take(engines, first, Lost("died"))
    second: Any = engines.all[0]
    assert second is not first and second.start == first.start
    take(engines, second, wire.Ready({**INFO, "num_kvcache_blocks": blocks, "max_model_len": longest}))
    if is_given_up:
        second.give_up.assert_called_once_with("restarted with room for 128 tokens a request, and 256 are served")
    engines.fleet.requests.add(1, PROMPT, {"max_tokens": 8})
    engines.fleet.requests.add(2, PROMPT, {"max_tokens": 8})
    engines.fleet.requests.bind()
    assert bool(second.send.called) != is_given_up


def test_an_engine_may_be_silent_for_longer_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a library from a slow disk holds its interpreter, which then sends no sign of life."""
    monkeypatch.setattr(module, "Handle", partial(idle, silent_for=lambda: 200.0))
    engines = Engines("model", {"data_parallel_size": 2})
    engines._check_silence()
    assert not any(handle.give_up.called for handle in engines.all)
    for handle in engines.all:
        take(engines, handle, wire.Ready({**INFO, "num_kv_tokens": 1024}))
    engines._check_silence()
    assert all(handle.give_up.called for handle in engines.all)


def test_an_engine_that_is_silent_while_it_starts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.host.handle.MODULE", "echo_engine")  # it says nothing of itself
    monkeypatch.setattr(module, "START_SILENCE", 0.5)
    engines = Engines("model", {"data_parallel_size": 2})
    try:
        with pytest.raises(ReplicaError, match="could not start: gave no sign of life for"):
            await_ready(engines)
    finally:
        engines.close(patience=0)


def test_an_engine_that_cannot_be_killed_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a driver may hold a process whose device is gone. Another is started in its place at once."""
    started: list[Any] = []

    def start(start: wire.Start) -> Any:
        started.append(idle(start, close=lambda patience: goes_on.wait(20)))
        return started[-1]

    goes_on = threading.Event()
    engines = of_two(monkeypatch, start)
    begin = time.monotonic()
    take(engines, engines.all[0], Lost("died"))
    assert time.monotonic() - begin < 5 and engines.all == [started[2], started[1]]
    goes_on.set()


def test_all_engines_together_have_the_time_of_one_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.host.handle.MODULE", "echo_engine")
    engines = Engines("model", {"data_parallel_size": 4})
    for each in engines.all:
        os.kill(each.process.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
    begin = time.monotonic()
    engines.close(patience=2.0)
    assert time.monotonic() - begin < 6
    assert all(each.process.returncode == -signal.SIGKILL for each in engines.all)  # type: ignore[attr-defined]
