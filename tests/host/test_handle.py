"""An engine elsewhere as its driver sees it: what it says, how it ends, and that silence is loss."""

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm.host import wire
from nanovllm.host.handle import ChildHandle, Lost

DEMO = str(Path(__file__).resolve().parents[2] / "nanovllm" / "demo_model")
OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 64, "max_model_len": 256, "skip_tokenizer_init": True}


def frames_until(handle: ChildHandle, is_it: Callable[[Any], bool], seconds: float = 90.0) -> list[Any]:
    """What it says up to such a frame."""
    found: list[Any] = []
    deadline = time.monotonic() + seconds
    while not any(map(is_it, found)):
        assert time.monotonic() < deadline, found
        select.select([handle], [], [], 1.0)
        found += handle.receive()
    return found


@pytest.fixture(scope="module")
def handle() -> Iterator[ChildHandle]:
    handle = ChildHandle(wire.Start(DEMO, OPTIONS))
    said = frames_until(handle, lambda frame: isinstance(frame, wire.Ready | Lost))
    assert [type(frame) for frame in said[:2]] == [wire.Progress] * 2 and isinstance(said[-1], wire.Ready)
    yield handle
    handle.close()
    assert handle.process.returncode == 0


def test_a_request_gains_its_tokens_and_ends_once(handle: ChildHandle) -> None:
    prompt = b"".join(number.to_bytes(4, "little") for number in (5, 6, 7))
    handle.send(wire.Add(3, prompt, {"max_tokens": 4, "ignore_eos": True, "n": 2}))
    handle.send(wire.Add(9, prompt, {"max_tokens": 100_000, "temperature": -1}))
    said = frames_until(handle, lambda frame: isinstance(frame, wire.Step) and bool(frame.done))
    steps = [frame for frame in said if isinstance(frame, wire.Step)]
    assert sorted(row for step in steps for row in step.rows) == [3] * 3 + [4] * 3
    assert sorted(end.row for step in steps for end in step.finishes) == [3, 4]
    [refused] = [frame for frame in said if isinstance(frame, wire.Refused)]
    assert refused.request_id == 9 and "temperature=-1" in (refused.message or "")


def test_a_call_is_answered_with_the_engines_state(handle: ChildHandle) -> None:
    for number, name in enumerate(("pause", "wake_up", "resume"), 1):
        handle.send(wire.Call(number, name, {}))
    said = frames_until(handle, lambda frame: isinstance(frame, wire.Answer) and frame.number == 2)
    answers = {frame.number: frame for frame in said if isinstance(frame, wire.Answer)}
    if 1 in answers:  # resume, which overtakes, may have come before it
        assert answers[1].kind in (None, "RuntimeError")
    assert answers[2].kind == "RuntimeError" and "not asleep" in answers[2].message


def test_an_engine_that_stands_still_is_silent(handle: ChildHandle) -> None:
    os.kill(handle.pid, signal.SIGSTOP)
    try:
        handle.receive()
        time.sleep(2.5)
        assert not handle.receive() and handle.silent_for() > 2
    finally:
        os.kill(handle.pid, signal.SIGCONT)
    deadline = time.monotonic() + 20
    while handle.silent_for() > 1 and time.monotonic() < deadline:
        select.select([handle], [], [], 1.0)
        handle.receive()
    assert handle.silent_for() <= 1


def test_a_mistake_of_the_user_is_raised_here() -> None:
    handle = ChildHandle(wire.Start(DEMO, {**OPTIONS, "max_model_len": 999999}))
    [lost] = [one for one in frames_until(handle, lambda frame: isinstance(frame, Lost)) if isinstance(one, Lost)]
    assert lost.kind is ValueError and "max_model_len=999999: must be at most" in lost.reason
    handle.close()


def test_an_engine_that_is_killed_is_lost() -> None:
    handle = ChildHandle(wire.Start(DEMO, OPTIONS))
    os.kill(handle.pid, signal.SIGKILL)
    [lost] = frames_until(handle, lambda frame: isinstance(frame, Lost))[-1:]
    assert lost == Lost("died by signal 9 (SIGKILL)") and handle.receive() == []
    handle.close()
