"""An engine elsewhere as its driver sees it: what it says, how it ends, and that silence is loss."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import pytest
from system import alive, wait_for
from threads import run_in_threads

from nanovllm.config import EngineConfig
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.step import Step
from nanovllm.errors import WorkerError
from nanovllm.host import program, wire
from nanovllm.host.frame_reader import FrameReader
from nanovllm.host.handle import Handle, Lost
from nanovllm.processes.child import LEFT_TO_PARENT, start_python
from nanovllm.processes.framing import LENGTH

DEMO = str(Path(__file__).resolve().parents[2] / "nanovllm" / "demo_model")
OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 64, "max_model_len": 256, "skip_tokenizer_init": True}


def frames_until(handle: Handle, is_it: Callable[[Any], bool]) -> list[Any]:
    """Frames of the handle up to such a one."""
    found: list[Any] = []
    deadline = time.monotonic() + 90.0
    while not any(map(is_it, found)):
        assert time.monotonic() < deadline, found
        select.select([handle], [], [], 1.0)
        found += handle.receive()
    return found


def end_of(handle: Handle) -> Lost:
    """Last frame of an engine that ends by itself; closes it."""
    lost = frames_until(handle, lambda frame: isinstance(frame, Lost))[-1]
    assert isinstance(lost, Lost) and handle.receive() == []
    handle.close()
    return lost


@pytest.fixture(scope="module")
def handle() -> Iterator[Handle]:
    handle = Handle(wire.Start(DEMO, OPTIONS))
    said = frames_until(handle, lambda frame: isinstance(frame, wire.Ready | Lost))
    assert [type(frame) for frame in said[:2]] == [wire.Progress] * 2 and isinstance(said[-1], wire.Ready)
    yield handle
    handle.close()
    assert handle.process.returncode == 0


def test_a_prompt_travels_whole_but_for_its_text() -> None:
    sent = wire.Add.of(3, Prompt([5, 2**31 - 1], ((0, b"digest"),), "text"), {}, known=[7])
    add = wire.down_decoder.decode(wire.pack(sent)[LENGTH.size :])
    assert isinstance(add, wire.Add) and add.known_ids() == [7]
    assert add.prompt() == Prompt([5, 2**31 - 1], ((0, b"digest"),))


def test_a_request_gains_its_tokens_and_ends_once(handle: Handle) -> None:
    prompt = Prompt([5, 6, 7])
    handle.send(wire.Add.of(3, prompt, {"max_tokens": 4, "ignore_eos": True, "n": 2}))
    handle.send(wire.Add.of(9, prompt, {"max_tokens": 100_000, "temperature": -1}))
    said = frames_until(handle, lambda frame: isinstance(frame, Step) and bool(frame.done))
    steps = [frame for frame in said if isinstance(frame, Step)]
    assert sorted(row for step in steps for row in step.rows) == [3] * 3 + [4] * 3
    assert sorted(end.row for step in steps for end in step.finishes) == [3, 4]
    [refused] = [frame for frame in said if isinstance(frame, wire.Refused)]
    assert refused.request_id == 9 and "temperature=-1" in (refused.message or "")


def test_a_call_is_answered_with_the_engines_state(handle: Handle) -> None:
    for number, name in enumerate(("pause", "wake_up", "resume"), 1):
        handle.send(wire.Call(number, name, {}))
    said = frames_until(handle, lambda frame: isinstance(frame, wire.Answer) and frame.number == 2)
    answers = {frame.number: frame for frame in said if isinstance(frame, wire.Answer)}
    if 1 in answers:  # resume, which overtakes, may have come before it
        assert answers[1].kind in (None, "RuntimeError")
    assert answers[2].kind == "RuntimeError" and "not asleep" in answers[2].message


def test_an_engine_that_stands_still_is_silent(handle: Handle) -> None:
    os.kill(handle.process.pid, signal.SIGSTOP)
    try:
        handle.receive()
        time.sleep(2.5)
        assert not handle.receive() and handle.silent_for() > 2
    finally:
        os.kill(handle.process.pid, signal.SIGCONT)
    deadline = time.monotonic() + 20
    while handle.silent_for() > 1 and time.monotonic() < deadline:
        select.select([handle], [], [], 1.0)
        handle.receive()
    assert handle.silent_for() <= 1


@pytest.mark.parametrize(
    ("model", "options", "signals", "reason", "code"),
    [
        (DEMO, {"max_model_len": 999999}, (), "max_model_len=999999: must be at most", 0),
        ("no such model", {}, LEFT_TO_PARENT, "no such model", 0),  # it went on, whatever came from the first moment on
        (DEMO, {}, (signal.SIGKILL,), "died by signal 9 (SIGKILL)", -signal.SIGKILL),
    ],
)
def test_the_end_of_an_engine_says_why(
    model: str, options: dict[str, Any], signals: Sequence[int], reason: str, code: int
) -> None:
    """As the error that is to be raised, if it was a mistake of the user."""
    handle = Handle(wire.Start(model, {**OPTIONS, **options}))
    for number in signals:
        os.kill(handle.process.pid, number)
    lost = end_of(handle)
    assert reason in lost.reason and handle.process.returncode == code
    assert (lost.kind is None) == (code != 0) and (lost.kind is ValueError or "max_model_len" not in options)


def test_a_lost_engine_whose_process_lingers_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does whose device is being freed. How it ended is told once that is known."""
    monkeypatch.setattr("nanovllm.host.handle.MODULE", "echo_engine")
    for kills, reason in ((True, "died by signal 9 (SIGKILL)"), (False, "closed its connection")):
        handle = Handle(wire.Start(DEMO, {}))
        reader = FrameReader()
        reader.watch(handle)
        handle.rouse()
        begin = time.thread_time()
        looks, deadline = 0, time.monotonic() + 20
        while not reader.frames and time.monotonic() < deadline:
            reader.read(20)
            looks += 1
            if kills:
                handle.process.kill()
        assert [*reader.frames] == [(handle, Lost(reason))] and not handle.is_ending
        assert looks < 300 and time.thread_time() - begin < 0.5, "it was looked at all the time"
        reader.close()
        handle.close(patience=0)


def test_a_start_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process takes long to start where memory is short. What is sent meanwhile arrives; a failure is a loss."""
    goes_on, error = threading.Event(), OSError(12, "Cannot allocate memory")

    def start(*args: Any, **options: Any) -> Any:
        assert goes_on.wait(20)
        return start_python(*args, **options) if handle.number == 0 else Mock(side_effect=error)()

    monkeypatch.setattr("nanovllm.host.handle.MODULE", "echo_engine")
    monkeypatch.setattr("nanovllm.host.handle.start_python", start)
    for number in (0, 1):
        goes_on.clear()
        begin = time.monotonic()
        handle = Handle(wire.Start(DEMO, {}, number))
        handle.send(sent := wire.Bucket(7, b"abc"))
        assert handle.receive() == [] and time.monotonic() - begin < 5
        goes_on.set()
        said = frames_until(handle, lambda frame: isinstance(frame, wire.Bucket | Lost))
        assert said[-1] == (sent if number == 0 else Lost("cannot be started: [Errno 12] Cannot allocate memory"))
        handle.close(patience=0)


def test_a_start_on_ray_holds_up_nobody() -> None:
    """Calls of Ray wait for its cluster."""
    for error, reason in ((None, "ended"), (RuntimeError("no room"), "RuntimeError: no room")):
        ray, goes_on = MagicMock(), threading.Event()
        ray.get.return_value, ray.exceptions.GetTimeoutError = None, TimeoutError
        ray.remote.return_value.return_value.remote.side_effect = (
            error or (lambda goes_on=goes_on: goes_on.wait(20) and Mock())
        )
        with patch.dict(sys.modules, {"ray": ray}):
            kind = import_module("nanovllm.host.ray_actor").ActorProcess
            handle = Handle(wire.Start(DEMO, {}), partial(kind, {}))
            assert error or handle.receive() == []
            goes_on.set()
            assert frames_until(handle, lambda frame: isinstance(frame, Lost)) == [Lost(reason)]
            handle.close(patience=0)


def test_an_engine_that_is_given_up_while_it_starts_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr("nanovllm.host.handle.MODULE", "echo_engine")
    monkeypatch.setattr(
        "nanovllm.host.handle.start_python", lambda *a, **o: (goes_on.wait(20), start_python(*a, **o))[1]
    )
    handle = Handle(wire.Start(DEMO, {}))
    handle.give_up("silent")
    goes_on.set()
    assert end_of(handle) == Lost("silent") and handle.process.returncode == -signal.SIGKILL


def test_two_threads_may_close_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one does that ends a lost engine, and the one that ends all."""
    monkeypatch.setattr("nanovllm.host.handle.MODULE", "echo_engine")
    handle, asked = Handle(wire.Start(DEMO, {})), []

    def request_exit() -> None:
        asked.append(time.monotonic())
        time.sleep(0.5 * len(asked))

    monkeypatch.setattr(handle, "request_exit", request_exit)
    assert run_in_threads(*[lambda: handle.close(patience=0)] * 2) == [None, None]
    assert len(asked) == 1 and handle.process.returncode is not None


def test_driver_and_engine_that_both_send_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not read while it cannot send, and nothing is taken out meanwhile; all arrives, in order."""
    sent: list[Any] = [wire.Bucket(number, os.urandom(1 << 18)) for number in range(60)]
    monkeypatch.setattr("nanovllm.host.handle.MODULE", "echo_engine")
    echo = Handle(wire.Start(DEMO, {}))
    for frame in sent:
        echo.send(frame)
    assert echo.backlog and echo.waits
    received: list[Any] = []
    deadline = time.monotonic() + 60
    while len(received) < 3 * len(sent) and time.monotonic() < deadline:
        readable, writable, _ = select.select([echo], [echo] if echo.backlog else [], [], 1.0)
        if writable:
            echo.flush()
        received += echo.receive() if readable else []
    assert received[::3] == received[1::3] == received[2::3] == sent
    assert not echo.backlog and not echo.waits
    echo.close(patience=0)


def test_an_engine_of_a_program_without_output_ends_in_order() -> None:
    """Files of ours would get the number of standard output, where the engine writes."""
    output = os.dup(1)
    os.close(1)
    try:
        handle = Handle(wire.Start(DEMO, {**OPTIONS, "max_model_len": 999999}))
        assert handle.process.pid
    finally:
        os.dup2(output, 1)
        os.close(output)
    end_of(handle)
    assert handle.process.returncode == 0, "it had said what is wrong"


@pytest.mark.parametrize("when", ["loading", "loaded"])
def test_an_engine_ends_with_its_driver_though_a_fork_of_it_holds_the_socket(when: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))}
    command = [sys.executable, "-m", "echo_engine", when]
    with (tmp_path / "pids").open("w") as said:
        subprocess.run(command, env=environment, stdout=said, timeout=120)
    pid, fork = map(int, (tmp_path / "pids").read_text().split())
    try:
        wait_for(lambda: not alive({pid}), "end of the engine", 30)
        assert alive({fork})
    finally:
        for left in (pid, fork):
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)


def test_a_rank_that_dies_while_nothing_runs_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its driver says nothing after the first frame."""
    executor = Mock(failed=True, check=Mock(side_effect=WorkerError("rank 1 died by signal 9")))
    config = EngineConfig(DEMO, **{**OPTIONS, "kvcache_block_size": 16})
    engine: Any = Mock(config=config, executor=executor, is_busy=lambda: False, info=dict)
    for name, value in (("_load", engine), ("describe", {}), ("freeze_objects", None)):
        monkeypatch.setattr(program, name, lambda *_, value=value: value)
    said: list[Any] = []
    assert program.run(said.append, Mock(next=Mock(side_effect=[wire.Start(DEMO, OPTIONS), *[None] * 9]))) == 1
    assert said[-1] == wire.Failed("rank 1 died by signal 9")
    engine.close.assert_called_once_with()
