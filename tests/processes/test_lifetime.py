"""However a program ends, its workers end too; and the program's main module is nobody's business but its own."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import DEFAULT, Mock

import fork_server
import pytest
from process_checks import GREEDY, LONG, MARK, marked_processes, tiny_llm, token_ids
from programs import end_with_test_run, run_forked, start_forked
from system import wait_for
from threads import run_in_threads

from nanovllm import LLM, SamplingParams, terminal, turns
from nanovllm import llm as llm_module
from nanovllm.engine import fair_lock
from nanovllm.executor import processes
from nanovllm.executor.processes import WorkerProcesses
from nanovllm.processes.child import LEFT_TO_PARENT

ROOT = Path(__file__).resolve().parents[2]
LEAVE = 5.0  # seconds for workers to leave after their program has

PROLOGUE = f"""
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, however the tests were started
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(Path(__file__).parent)!r}]
from process_checks import GREEDY, LONG, token_ids, tiny_llm
llm = tiny_llm(sys.argv[1])
"""

ENDINGS = {
    "end of the program": ("print(len(token_ids(llm, [5] * 9)[0]))", 0),
    "exception": ("raise RuntimeError('an error of the user')", 1),
    "os._exit": ("os._exit(4)", 4),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "sys.exit in mid-loop": ("llm.add_request([5] * 9, LONG); llm.step(); llm.step(); sys.exit(3)", 3),
    "SIGKILL": ("llm.add_request([5] * 9, LONG); llm.step(); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
}


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Tests may run in the background of a shell, where Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(code: str, tiny: str, mark: str, forks: bool = False, **options: object) -> "subprocess.Popen[str]":
    """forks: it is a fork, where tests fork, and so are its workers."""
    if forks and fork_server.is_fit():
        return start_forked(code, tiny, **{MARK: mark})
    return subprocess.Popen(
        [sys.executable, "-c", code, tiny], env={**os.environ, MARK: mark}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True, **{"preexec_fn": end_with_test_run, **options},
    )  # type: ignore[call-overload]  # fmt: skip


@pytest.mark.parametrize(
    "ending", ["sys.exit in mid-loop", "SIGKILL", *(pytest.param(e, marks=pytest.mark.slow) for e in list(ENDINGS)[:4])]
)
def test_no_worker_outlives_its_program(ending: str, tiny: str, new_mark: str) -> None:
    code, expected = ENDINGS[ending]
    program = start(PROLOGUE + code, tiny, new_mark, forks=True)
    _, err = program.communicate(timeout=120)
    assert program.returncode == expected, err
    wait_for(lambda: not marked_processes(new_mark), "end of the processes", LEAVE)
    if ending == "exception":
        assert "an error of the user" in err
    elif expected >= 0:
        assert err == "", "nothing to complain about"


@pytest.mark.parametrize(
    "closed",
    [pytest.param([0], id="no input", marks=pytest.mark.slow), pytest.param([0, 1, 2], id="nothing standard")],
)
def test_programs_without_input_or_output(closed: list[int], tiny: str, new_mark: str) -> None:
    """Files of ours would get these numbers, and workers would find something else there."""
    code = PROLOGUE + "sys.exit(len(token_ids(llm, [5] * 9)[0]))"
    program = start(code, tiny, new_mark, preexec_fn=lambda: [os.close(number) for number in closed])
    _, err = program.communicate(timeout=120)
    assert program.returncode == GREEDY.max_tokens, err


def test_no_worker_outlives_a_program_killed_while_they_start(tiny: str, new_mark: str) -> None:
    program = start(PROLOGUE, tiny, new_mark)
    wait_for(lambda: len(marked_processes(new_mark)) == 2, "worker")
    time.sleep(0.3)  # into its imports
    program.kill()
    program.communicate()
    wait_for(lambda: not marked_processes(new_mark), "end of the processes", LEAVE)


def test_ctrl_c_ends_a_program(tiny: str, new_mark: str) -> None:
    code = PROLOGUE + "print('ready', flush=True)\nwhile True: token_ids(llm, [5] * 9, params=LONG)"
    program = start(code, tiny, new_mark)
    assert program.stdout is not None and program.stdout.readline() == "ready\n"
    time.sleep(0.3)
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does
    _, err = program.communicate(timeout=30)
    assert program.returncode == -signal.SIGINT and "KeyboardInterrupt" in err
    assert "nanovllm/executor/worker.py" not in err, "the worker is not part of this"
    wait_for(lambda: not marked_processes(new_mark), "end of the processes", LEAVE)


FORKING = """
child = os.fork()
if child == 0:
    sys.exit(0)  # with all that happens at an interpreter's exit
os.waitpid(child, 0)
print(len(token_ids(llm, [5] * 9)[0]))
child = os.fork()
if child == 0:
    time.sleep(100)
print(child)
begin = time.time()
llm.close()
print(time.time() - begin)
llm = tiny_llm(sys.argv[1])
second = os.fork()
if second == 0:
    time.sleep(100)
print(second, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_forks_of_a_program_neither_disturb_workers_nor_keep_them(tiny: str, new_mark: str) -> None:
    """A fork holds copies of all our files: the end of the stream never comes while it lives."""
    program = start(PROLOGUE + FORKING, tiny, new_mark, forks=True)
    assert program.stdout is not None
    lines = [program.stdout.readline().strip() for _ in range(4)]
    program.wait(timeout=30)
    forks = {int(lines[1]), int(lines[3])}
    try:
        assert lines[0] == str(GREEDY.max_tokens)
        assert float(lines[2]) < 3.0, "close() must not sit out its grace"
        wait_for(lambda: set(marked_processes(new_mark)) == forks, "end of the processes", LEAVE)
    finally:
        for pid in forks:
            os.kill(pid, signal.SIGKILL)
        program.communicate()


USED_IN_A_FORK = """
uses = [lambda: token_ids(llm, [5] * 9), lambda: llm.add_request([5] * 9), llm.step, lambda: llm.load_weights(iter(()))]
expected = token_ids(llm, [5] * 9)
for use in uses:
    if (child := os.fork()) == 0:
        signal.alarm(20)
        try:
            use()
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print(token_ids(llm, [5] * 9) == expected)
"""


def test_a_fork_that_uses_the_engine_is_told_and_does_no_harm(tiny: str, new_mark: str) -> None:
    """As multiprocessing's pools do where they fork. Its threads are not there, and its ring is ours."""
    code = f"import sys; sys.argv[1:] = [{tiny!r}]{PROLOGUE}print(os.getpid(), flush=True){USED_IN_A_FORK}"
    program, *said = run_forked({**os.environ, "PYTHONPATH": str(ROOT), MARK: new_mark}, code).splitlines()
    assert said == [f"this engine is process {program}'s: a fork of it cannot use it"] * 4 + ["True"]


def test_ctrl_c_in_generate_leaves_the_engine_usable(tiny: str, mark: str) -> None:
    with tiny_llm(tiny) as llm:
        expected = token_ids(llm, [5] * 9, [6] * 9)
        foreign = llm.add_request([7] * 9, GREEDY)
        before = llm.engine.computed[1]

        def interrupt() -> None:
            wait_for(lambda: llm.engine.computed[1] > before + 20, "tokens")
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5] * 9, [6] * 9], LONG, use_tqdm=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert token_ids(llm, [5] * 9, [6] * 9) == expected
        gained = [output for output in llm.step() if output.request_id == foreign]
        assert sum(len(output.new_token_ids) for output in gained) == GREEDY.max_tokens
        assert gained[-1].finished
        assert llm.is_finished()
        llm.engine.scheduler.check_integrity()


def test_a_second_ctrl_c_while_generate_ends_its_requests_leaves_none(
    tiny: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_llm(tiny, tensor_parallel_size=1) as llm:
        for name in ("step", "abort"):
            interrupted = Mock(wraps=getattr(llm.engine, name))
            interrupted.side_effect = lambda *_: signal.raise_signal(signal.SIGINT) or DEFAULT
            monkeypatch.setattr(llm.engine, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5] * 9], LONG, use_tqdm=False)
        assert not (llm.engine.book.rows or llm._turns.generating), "a request stayed behind"


def interrupted_at(line: int, work: Callable[[], object]) -> bool:
    """Does `work` with a Ctrl-C at that line (counted from 0) of those it runs in the user's front and the lock of
    turns. Whether there are so many."""
    front, left = {llm_module.__file__, turns.__file__, terminal.__file__, fair_lock.__file__}, line

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in front:
            return None
        if event == "line":
            left -= 1
            if left == -1:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left < 0


def interruptions(llm: LLM, work: Callable[[], object]) -> Iterator[int]:
    """Does `work` with a Ctrl-C at each of its lines in turn, and without; yields their numbers, when nobody holds the
    lock: the next turn would otherwise wait for ever."""

    def take_and_leave() -> bool:
        lock = llm._turns.step_lock
        return all(one.acquire(blocking=False) and one.release() is None for one in (lock._next, lock._lock))

    for line in count():
        was_interrupted = interrupted_at(line, work)
        assert run_in_threads(take_and_leave) == [True], f"line {line}"
        yield line
        if not was_interrupted:
            break
    assert line > 50


TWO = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def test_ctrl_c_at_any_line_of_a_loop_neither_keeps_the_lock_nor_loses_a_token(tiny: str, mark: str) -> None:
    with tiny_llm(tiny, tensor_parallel_size=1) as llm:
        [expected], gained = token_ids(llm, [5] * 9, params=TWO), list[int]()

        def loop() -> None:
            while llm.has_unfinished_requests():
                for output in llm.step():
                    gained.extend(output.new_token_ids)

        llm.add_request([5] * 9, TWO)
        for line in interruptions(llm, loop):
            loop()
            assert gained == expected, f"line {line}"
            assert not llm.engine.book.rows
            gained.clear()
            llm.add_request([5] * 9, TWO)


def test_ctrl_c_at_any_line_of_generate_leaves_nothing_behind(tiny: str, mark: str) -> None:
    with tiny_llm(tiny, tensor_parallel_size=1) as llm:
        for line in interruptions(llm, lambda: token_ids(llm, *[[5] * 9] * 3, params=TWO)):
            assert not (llm.engine.book.rows or llm._turns.generating or llm._turns.ended), f"line {line}"
            assert llm.step() == []


@pytest.mark.parametrize("waits", ["pause", "load_weights"])
def test_ctrl_c_in_a_call_that_waits_for_requests_leaves_the_engine_usable(waits: str, tiny: str, mark: str) -> None:
    with tiny_llm(tiny, tensor_parallel_size=1) as llm:
        step, request_id, gained = llm.engine.step, llm.add_request([5] * 9, GREEDY), []

        def interrupted_step() -> Any:
            llm.engine.executor.launch = interrupted_launch  # type: ignore[method-assign]
            return step()

        def interrupted_launch(packed: Any) -> None:
            del llm.engine.executor.launch
            signal.raise_signal(signal.SIGINT)
            llm.engine.executor.launch(packed)

        gained += llm.step()
        llm.engine.step = interrupted_step  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.pause("wait") if waits == "pause" else llm.load_weights(iter(()), in_flight="wait")
        llm.engine.step = step  # type: ignore[method-assign]
        llm.add_request([6] * 9, GREEDY)
        while llm.has_unfinished_requests():
            gained += llm.step()
        assert sum(len(output.new_token_ids) for output in gained) == 2 * GREEDY.max_tokens
        assert [output.finished for output in gained if output.request_id == request_id][-1]


@pytest.mark.parametrize(("call", "cut"), [("step", "apply"), ("pause", "apply"), ("begin_update", "preempt_all")])
def test_an_engine_that_lost_a_steps_tokens_does_not_go_on(
    call: str, cut: str, tiny: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a signal's handler raises while they are taken in; nor one whose rows were preempted in part."""
    with tiny_llm(tiny, tensor_parallel_size=1) as llm:
        llm.add_request([5] * 9, GREEDY)
        llm.step()
        with monkeypatch.context() as patch, pytest.raises(TimeoutError):
            patch.setattr(llm.engine.scheduler, cut, Mock(side_effect=TimeoutError("alarm")))
            getattr(llm, call)()
        llm.resume()
        with pytest.raises(RuntimeError, match=r"cannot go on: .*alarm"):
            llm.step()


@pytest.mark.usefixtures("executed")
def test_signals_are_left_to_the_parent_from_the_first_moment_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine's process does (tests/host/test_handle.py), so a worker's."""
    monkeypatch.setattr(processes, "_EXIT_GRACE", 60.0)
    workers = WorkerProcesses(2, step_timeout=60.0)
    [worker] = workers._processes
    for number in LEFT_TO_PARENT:
        worker.send_signal(number)
    workers.close()
    workers.close_store()
    assert worker.returncode == 0, "it ended when it was asked to"


def test_a_worker_that_a_driver_holds_is_killed_and_left_behind() -> None:
    class Held:
        killed = False

        def wait(self, timeout: float) -> None:
            raise subprocess.TimeoutExpired("a worker", timeout)

        def kill(self) -> None:
            self.killed = True

    held, workers = Held(), WorkerProcesses(1, step_timeout=0.1)
    workers._processes.append(held)  # type: ignore[arg-type]
    workers.close()
    assert held.killed


UNGUARDED = f"""
import sys
with open(sys.argv[2], "a") as counter:
    counter.write("run ")
sys.path.insert(0, {str(ROOT)!r})
from nanovllm import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, device="cpu", tensor_parallel_size=2)
print(len(llm.generate([5] * 9, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].token_ids))
"""


@pytest.mark.parametrize(
    "how", ["script", pytest.param("stdin", marks=pytest.mark.slow), pytest.param("-c", marks=pytest.mark.slow)]
)
def test_main_module_needs_no_guard_and_runs_once(how: str, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if how == "script":  # there, the folder that the user is in is not on the path: its modules must not get in our way
        for name in ("torch", "queue", "nanovllm"):
            (elsewhere / f"{name}.py").write_text("raise ImportError('imported from the current folder')")
    arguments = {"script": [str(tmp_path / "script.py")], "stdin": ["-"], "-c": ["-c", UNGUARDED]}[how]
    command = [sys.executable, *arguments, tiny, str(tmp_path / "counter")]
    given = UNGUARDED if how == "stdin" else None
    done = subprocess.run(command, input=given, cwd=elsewhere, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("3\n", "")
    assert (tmp_path / "counter").read_text() == "run "
