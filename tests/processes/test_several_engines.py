"""Engines side by side and in turn, and one engine under several threads."""

import gc
import os
import threading
import time
from typing import Any

import pytest
from process_checks import GREEDY, LONG, marked_processes, open_files, tiny_llm, token_ids
from programs import run
from system import cpu_seconds, wait_for
from threads import run_in_threads

from nanovllm import LLM, SamplingParams

PROMPTS = ([5] * 9, [6, 7] * 20, list(range(40)))


@pytest.mark.usefixtures("executed")
def test_two_at_once_and_one_ends_before_the_other(tiny: str, mark: str) -> None:
    first = tiny_llm(tiny)
    expected = token_ids(first, *PROMPTS)
    [first_worker] = marked_processes(mark)
    sockets_of_first = {os.readlink(f"/proc/self/fd/{c.fileno()}") for c in first.engine.executor.processes._controls}
    with tiny_llm(tiny) as second:
        [second_worker] = set(marked_processes(mark)) - {first_worker}
        assert not sockets_of_first & set(open_files(second_worker)), "they would keep the first one's worker alive"
        both = run_in_threads(lambda: token_ids(first, *PROMPTS), lambda: token_ids(second, *PROMPTS))
        assert both == [expected] * 2
        first.close()
        wait_for(lambda: marked_processes(mark) == [second_worker], "end of the processes")
        assert token_ids(second, *PROMPTS) == expected


TWO_TOKENIZERS = """
import sys, threading
from nanovllm.config import EngineConfig
from nanovllm.text.tokenizer import Tokenizer
two = [Tokenizer(EngineConfig("demo")) for _ in range(2)]
print([len(each.own.encode("a b")) for each in two], "transformers" in sys.modules)
lengths = []
threads = [threading.Thread(target=lambda each=each: lengths.append(len(each.of_user.encode("a b")))) for each in two]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(lengths)
"""


def test_both_load_their_tokenizers_at_once() -> None:
    """Each in a thread of its own; those of transformers too, the second while the first imports the library."""
    assert run("-c", TWO_TOKENIZERS, forks=True) == "[2, 2] False\n[2, 2]\n"


def test_a_call_from_within_a_call_is_refused(tiny: str, mark: str) -> None:
    """By a signal's handler, say, or the iterable that load_weights is given. It would wait for itself."""
    with tiny_llm(tiny, tensor_parallel_size=1) as llm:
        expected = token_ids(llm, [5] * 9)
        launch, refused = llm.engine.executor.launch, []

        def interrupted_launch(packed: Any) -> None:
            for call in (lambda: token_ids(llm, [6] * 9), llm.step, lambda: llm.load_weights([])):
                with pytest.raises(RuntimeError, match="this thread is already in a call"):
                    call()
                refused.append(call)
            launch(packed)

        llm.engine.executor.launch = interrupted_launch  # type: ignore[method-assign]
        [[found]] = run_in_threads(lambda: token_ids(llm, [5] * 9))
        assert [found] == expected and len(refused) == 3 * GREEDY.max_tokens
        llm.engine.executor.launch = launch  # type: ignore[method-assign]
        assert token_ids(llm, [5] * 9) == expected and not llm.engine.book.rows


def test_made_in_a_thread_that_ends_and_dropped_without_close(tiny: str, mark: str) -> None:
    [llm] = run_in_threads(lambda: tiny_llm(tiny))
    assert token_ids(llm, [5] * 9) == token_ids(llm, [5] * 9)
    assert len(marked_processes(mark)) == 1
    del llm
    gc.collect()
    wait_for(lambda: not marked_processes(mark), "end of the processes")


@pytest.fixture(scope="module")
def llm(tiny: str) -> Any:
    with tiny_llm(tiny, max_num_seqs=8) as llm:
        yield llm


def test_generate_from_several_threads(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = [token_ids(llm, prompt, params=params) for prompt in PROMPTS]
    results = run_in_threads(*(lambda prompt=prompt: token_ids(llm, prompt, params=params) for prompt in PROMPTS))
    assert results == expected
    assert llm.is_finished()
    assert llm.step() == [], "what belongs to a generate() is not handed out again"


def test_a_short_call_does_not_wait_for_a_long_one(llm: LLM) -> None:
    ends: dict[str, float] = {}

    def generate(name: str, params: SamplingParams) -> None:
        token_ids(llm, [5] * 9, params=params)
        ends[name] = time.monotonic()

    def generate_short() -> None:
        before = llm.engine.computed[1]
        wait_for(lambda: llm.engine.computed[1] > before + 5, "tokens")
        generate("short", GREEDY)

    run_in_threads(lambda: generate("long", LONG), generate_short)
    assert ends["short"] < ends["long"]


def test_requests_added_and_aborted_from_other_threads(llm: LLM) -> None:
    expected = token_ids(llm, *PROMPTS)
    added: list[int] = []
    generating = threading.Event()

    def keep_generating() -> list[list[list[int]]]:
        generating.set()
        try:
            return [token_ids(llm, *PROMPTS) for _ in range(10)]
        finally:
            generating.clear()

    def add_and_abort() -> None:
        generating.wait(10)
        while generating.is_set() and len(added) < 60:
            added.append(llm.add_request(PROMPTS[1], GREEDY))
            if len(added) % 3 == 0:
                llm.abort(added[-1])
            time.sleep(0.002)

    [turns, failure] = run_in_threads(keep_generating, add_and_abort)
    assert failure is None
    assert turns == [expected] * 10
    tokens: dict[int, list[int]] = {request_id: [] for request_id in added}
    reasons: dict[int, str | None] = {}
    while not llm.is_finished():
        for output in llm.step():
            tokens[output.request_id] += output.new_token_ids
            if output.finished:
                assert output.request_id not in reasons
                reasons[output.request_id] = output.finish_reason
    assert set(reasons) == set(added)
    assert "length" in reasons.values() and {*reasons.values()} <= {"length", "abort"}
    for request_id, reason in reasons.items():
        assert tokens[request_id] == expected[1][: None if reason == "length" else len(tokens[request_id])]
    llm.engine.scheduler.check_integrity()


def test_abort_of_a_request_that_generate_waits_for(llm: LLM) -> None:
    before = llm.engine.book.num_requests

    def abort() -> None:
        wait_for(lambda: llm.engine.book.num_requests > before, "request")
        time.sleep(0.05)
        llm.abort(before)

    [outputs, _] = run_in_threads(lambda: llm.generate([[5] * 9, [6] * 9], LONG, use_tqdm=False), abort)
    assert [output.finish_reason for output in outputs] == ["abort", "length"]
    assert len(outputs[0].token_ids) < LONG.max_tokens


def test_a_loop_of_ones_own_lasts_until_its_output_is_there(llm: LLM) -> None:
    """Also where another thread's generate() takes it in: between the engine's turn and the hand-over."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    request_id = llm.add_request([5] * 9, params)
    dispatch, answers = llm._turns.dispatch, []

    def asked_in_between(outputs: list[Any]) -> None:
        asking = threading.Thread(target=lambda: answers.append(llm.has_unfinished_requests()))
        if not llm.engine.has_unfinished_requests():
            asking.start()
            asking.join(0.2)
        dispatch(outputs)

    llm._turns.dispatch = asked_in_between  # type: ignore[method-assign]
    try:
        run_in_threads(lambda: token_ids(llm, [5] * 9, params=params))
    finally:
        llm._turns.dispatch = dispatch  # type: ignore[method-assign]
    wait_for(lambda: answers == [True], "answer")
    assert [output.finished for output in llm.step() if output.request_id == request_id][-1]
    assert llm.is_finished()


def test_an_idle_engine_rests(llm: LLM, tiny: str) -> None:
    token_ids(llm, [5] * 9)
    worker = {llm.engine.executor.processes._processes[0].pid}
    before, seconds = cpu_seconds(worker), 2.0
    time.sleep(seconds)
    assert cpu_seconds(worker) - before <= 0.02 * seconds


def test_close_while_another_thread_generates(tiny: str, mark: str) -> None:
    llm = tiny_llm(tiny)

    def close() -> None:
        wait_for(lambda: llm.engine.computed[1] > 5, "tokens")
        llm.close()

    [error, closed] = run_in_threads(lambda: token_ids(llm, [5] * 9, params=LONG), close)
    assert closed is None
    assert isinstance(error, RuntimeError) and "closed" in str(error)
