"""A worker that dies, fails or hangs becomes an exception that says so, soon, and nothing is left behind."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from process_checks import GREEDY, LONG, MARK, children, marked_processes, open_files, tiny_llm, token_ids
from system import wait_for

from nanovllm import LLM
from nanovllm.errors import OutOfMemory, WorkerError
from nanovllm.executor import processes
from nanovllm.executor.channel import Word, WorkerState, create_shared_memory
from nanovllm.processes.child import socket_pair, start_python

SOON = 20.0  # seconds within which a death must be an exception, on a busy machine: one that hangs waits for 60


def signal_in_mid_generate(llm: LLM, pid: int, number: int) -> list[float]:
    """Sends a signal to a worker once tokens flow; the moment of sending comes to be the list's only element."""
    sent: list[float] = []

    def send() -> None:
        wait_for(lambda: llm.engine.computed[1] > 5, "tokens")
        sent.append(time.monotonic())
        os.kill(pid, number)

    threading.Thread(target=send).start()
    return sent


def assert_refuses_use(llm: LLM) -> None:
    with pytest.raises(RuntimeError, match=r"has failed|rank 1"):
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    llm.add_request([1, 2, 3], GREEDY)
    with pytest.raises(RuntimeError, match=r"has failed|rank 1"):
        llm.step()


def test_worker_killed_in_mid_step(tiny: str, mark: str) -> None:
    llm = tiny_llm(tiny)
    [pid] = marked_processes(mark)
    sent = signal_in_mid_generate(llm, pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="rank 1 died by signal 9"):
        token_ids(llm, [5] * 9, [6] * 7, params=LONG)
    assert time.monotonic() - sent[0] < SOON
    assert_refuses_use(llm)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)


def test_worker_killed_in_mid_update(tiny: str, mark: str) -> None:
    llm = tiny_llm(tiny)
    [pid] = marked_processes(mark)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        os.kill(pid, signal.SIGKILL)
        yield "model.norm.weight", torch.ones(llm.model_config.hidden_size)

    with pytest.raises(WorkerError, match="rank 1 died by signal 9"):
        llm.load_weights(weights())
    assert_refuses_use(llm)
    llm.close()
    assert marked_processes(mark) == [] and pid not in children()


def test_worker_stopped_in_mid_step(tiny: str, mark: str) -> None:
    with tiny_llm(tiny, step_timeout=1.0) as llm:
        sent = signal_in_mid_generate(llm, marked_processes(mark)[0], signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"rank 1 made no progress for step_timeout=1.0 s"):
            token_ids(llm, [5] * 9, params=LONG)
        assert time.monotonic() - sent[0] < 1.0 + SOON
        assert_refuses_use(llm)


@pytest.mark.parametrize("how", [pytest.param("sleep", marks=pytest.mark.slow), "work"])
def test_a_long_step_is_one_that_computes(
    how: str, tiny: str, mark: str, warmed_up: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU a step may take longer than step_timeout, as long as it computes."""
    monkeypatch.setattr(processes, "_WORKER_MODULE", "faulty_worker")
    monkeypatch.setenv("FAULT", f"step:{how}")
    with tiny_llm(tiny, step_timeout=3.0) as llm:  # in which a worker gets a core, however many want one
        begin = time.monotonic()
        if how == "work":
            assert token_ids(llm, [5] * 9) == warmed_up
            assert time.monotonic() - begin > 3.0
            return
        with pytest.raises(WorkerError, match=r"rank 1 made no progress for step_timeout=3.0 s"):
            token_ids(llm, [5] * 9)
        assert time.monotonic() - begin < 3.0 + SOON


def test_a_stopped_engine_does_not_blame_its_workers(tiny: str, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z in mid-step, and `fg` after longer than step_timeout. In the end a worker is killed between two steps."""
    monkeypatch.setattr("sys.path", [*sys.path, Path("elsewhere"), 5])  # common in notebooks, and no string
    resume = ["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"]
    with tiny_llm(tiny, step_timeout=2.0) as llm:
        ring = llm.engine.executor.processes.ring
        expected = token_ids(llm, [5] * 9)
        launch = llm.engine.executor.runner.launch

        def stop_in_mid_step(packed: object) -> None:
            llm.engine.executor.runner.launch = launch  # type: ignore[method-assign]
            wait_for(lambda: ring.get(Word.STATE, 0) == WorkerState.STEPPING, "step")
            time.sleep(0.5)  # the watcher has seen the step begin
            with subprocess.Popen(resume):
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.5)  # and looks before it goes on
            launch(packed)  # type: ignore[arg-type]

        llm.engine.executor.runner.launch = stop_in_mid_step  # type: ignore[method-assign]
        assert token_ids(llm, [5] * 9) == expected
        os.kill(marked_processes(mark)[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match="rank 1 died by signal 9"):
            token_ids(llm, [5] * 9)


def test_worker_that_never_takes_an_oversize_payload(tiny: str, mark: str) -> None:
    with tiny_llm(tiny, step_timeout=1.0) as llm:
        os.kill(marked_processes(mark)[0], signal.SIGSTOP)
        with pytest.raises(WorkerError, match="rank 1 made no progress"):
            llm.engine.executor.processes.send_call("weights.take", bytes(3 << 20))


FAULTS = {
    "import:raise": (WorkerError, r"(?s)rank 1 died with exit code 1"),
    "group:exit": (WorkerError, "rank 1 died with exit code 3"),
    "load:value": (ValueError, "hidden_size=-1: must be positive"),
    "load:raise": (WorkerError, r"(?s)rank 1 failed:.*Traceback.*KeyError: 'a bug of ours'"),
    "load:stop": (WorkerError, "rank 1 made no progress for 2 s at its start"),
    "load:sleep": (WorkerError, "rank 1 made no progress for 2 s at its start"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[pytest.mark.slow] * (f in ("group:exit", "load:sleep"))) for f in FAULTS]
)
def test_one_rank_fails_at_its_start(fault: str, tiny: str, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_WORKER_MODULE", "faulty_worker")
    if fault in ("load:stop", "load:sleep"):
        monkeypatch.setattr(processes, "_START_PATIENCE", 2.0)
    monkeypatch.setenv("FAULT", fault)
    kind, pattern = FAULTS[fault]
    begin = time.monotonic()
    with pytest.raises(kind, match=pattern) as raised:
        tiny_llm(tiny, step_timeout=1.0)
    assert time.monotonic() - begin < 2 * SOON  # importing counted
    if kind is ValueError:
        assert "Found by rank 1" in raised.value.__notes__[0]
        assert "in fail" in raised.value.__notes__[0]


@pytest.mark.parametrize("how", ["sleep", "half", pytest.param("work", marks=pytest.mark.slow)])
def test_a_long_call_is_one_that_computes(
    how: str, tiny: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that hangs in a rare call, or stops in the midst of its reply, is noticed like one that hangs in a step,
    though its process lives."""
    monkeypatch.setattr(processes, "_WORKER_MODULE", "faulty_worker")
    monkeypatch.setenv("FAULT", f"call:{how}")
    with tiny_llm(tiny, step_timeout=1.2) as llm:
        weights = [(each.name, torch.randn(each.shape)) for each in llm.engine.executor.runner.weights.all]
        begin = time.monotonic()
        if how == "work":
            llm.load_weights(weights)
            assert time.monotonic() - begin > 1.2
            return
        with pytest.raises(WorkerError, match=r"rank 1 made no progress for step_timeout=1.2 s"):
            llm.load_weights(weights)
        assert time.monotonic() - begin < 1.2 + SOON
        assert_refuses_use(llm)


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_lives_on_where_memory_is_taken(
    size: int, tiny: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer still holds what sleep or wake_up needs, on one rank: nothing changes, and the call may be repeated."""
    monkeypatch.setattr(processes, "_WORKER_MODULE", "faulty_worker")
    monkeypatch.setenv("FAULT", "memory:lack")
    with tiny_llm(tiny, tensor_parallel_size=size, enable_sleep=True) as llm:
        if size == 1:
            for name in ("prepare_sleep", "prepare_wake_up"):
                given = [None, "taken by others"]
                monkeypatch.setattr(llm.engine.executor.runner.sleepable, name, lambda *_, given=given: given.pop())
        before = token_ids(llm, [5] * 9)
        with pytest.raises(OutOfMemory, match=rf"sleep: rank {size - 1}: taken by others; nothing has changed"):
            llm.sleep()
        assert token_ids(llm, [5] * 9) == before
        llm.sleep()
        with pytest.raises(OutOfMemory, match=rf"wake_up: rank {size - 1}: taken by others; nothing has changed"):
            llm.wake_up()
        with pytest.raises(RuntimeError, match="asleep"):
            token_ids(llm, [5] * 9)
        llm.wake_up()
        assert token_ids(llm, [5] * 9) == before


def test_ranks_wait_for_one_that_starts_slowly(tiny: str, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits to meet the others does nothing meanwhile, for longer than a rank may stand still."""
    monkeypatch.setattr(processes, "_WORKER_MODULE", "faulty_worker")
    monkeypatch.setattr(processes, "_START_PATIENCE", 3.0)
    monkeypatch.setenv("FAULT", "group:work")
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    with tiny_llm(tiny, tensor_parallel_size=3, hf_overrides=heads, step_timeout=3.0) as llm:
        assert len(token_ids(llm, [5] * 9)[0]) == GREEDY.max_tokens


def test_ranks_fail_in_mid_step_while_others_wait_for_them(
    tiny: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_WORKER_MODULE", "faulty_worker")
    monkeypatch.setenv("FAULT", "step:value")
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    with tiny_llm(tiny, tensor_parallel_size=3, hf_overrides=heads) as llm:
        with pytest.raises(WorkerError, match=r"(?s)rank 1 failed:.*Traceback.*ValueError: hidden_size=-1"):
            token_ids(llm, [5] * 9)
        assert_refuses_use(llm)


@pytest.mark.usefixtures("executed")
def test_a_start_that_may_not_open_as_many_files_says_so_and_leaves_none(mark: str) -> None:
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = sorted(open_files())
    for most in count(3):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, usual[1]))
        try:
            started = processes.WorkerProcesses(2, step_timeout=60.0)
        except OSError as error:
            assert error.errno == errno.EMFILE
        else:
            started.close()
            started.close_store()
            return
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        assert sorted(open_files()) == before


@pytest.mark.usefixtures("executed")
def test_a_worker_whose_rank_0_was_gone_before_it_looked_leaves(new_mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a process that rank 0 forked holds the other end of its socket, as this test does."""
    monkeypatch.setenv(MARK, new_mark)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ours, theirs = socket_pair()
    memory, (bell, ring), store = create_shared_memory(), os.pipe(), os.memfd_create("store")
    fds = (theirs.fileno(), memory, bell, store)
    try:
        worker = start_python("nanovllm.executor.worker", *map(str, (1, *fds, gone.pid)), pass_fds=fds)
        assert worker.wait(SOON) == 0
    finally:
        for fd in (memory, bell, ring, store):
            os.close(fd)
        ours.close()
        theirs.close()
