"""Constraints are checked in another process: within bounds of memory and time, and without holding up others."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
from programs import end_with_test_run
from sampling_engines import DEMO
from system import alive, wait_for

from nanovllm import StructuredOutput
from nanovllm.engine.sampling import grammar_checks, grammar_compiler, structured
from nanovllm.engine.sampling.grammar_server import MAX_MIB
from nanovllm.engine.sampling.structured import StructuredOutputs
from nanovllm.text.checkpoint import CheckpointTokenizer

pytest.importorskip("llguidance")

TOO_MUCH = rf"must compile, but: it takes more than 2 s of CPU time or {MAX_MIB} MiB of memory"
LONG = 60


@pytest.fixture
def made() -> Iterator[Callable[[], StructuredOutputs]]:
    with ExitStack() as stack:

        def make() -> StructuredOutputs:
            found = StructuredOutputs(CheckpointTokenizer(DEMO), 1024, [1023])
            stack.callback(found.close)
            return found

        yield make


@pytest.fixture
def constraints(made: Callable[[], StructuredOutputs]) -> StructuredOutputs:
    return made()


def doubling(count: int, title: str = "") -> StructuredOutput:
    """A schema of 1 KB whose states double with each of its patterns."""
    patterns = [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(1, count + 1)]
    return StructuredOutput(json={"title": title, "allOf": patterns})


def process(constraints: StructuredOutputs) -> int:
    server = constraints._checks._server
    assert server is not None
    return server._process.pid


def group(leader: int) -> dict[int, float]:
    """MiB in memory of the processes of a group, by process."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == leader and alive({int(entry.name)}):
                pages = int((entry / "statm").read_text().split()[1])
                found[int(entry.name)] = pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
        except OSError:
            continue
    return found


def test_an_interrupt_leaves_nobody_waiting(
    constraints: StructuredOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a constraint is compiled: the next request with it compiles it anew."""

    def interrupt(*_: str) -> None:
        raise KeyboardInterrupt

    wanted = StructuredOutput(regex="a+")
    with monkeypatch.context() as patch:
        patch.setattr(constraints._checks, "check", interrupt)
        with pytest.raises(KeyboardInterrupt):
            constraints.matcher(wanted)
    again = threading.Thread(target=constraints.matcher, args=(wanted,), daemon=True)
    again.start()
    again.join(LONG)
    assert not again.is_alive() and constraints.is_compiled(wanted.given)


def test_states_that_double_take_a_bounded_part_of_the_machine(constraints: StructuredOutputs) -> None:
    """Four at once: others are served first, and what they are told is not worked out again."""
    constraints.matcher(StructuredOutput(regex="a"))
    wanted = [doubling(count, str(i)) for i, count in enumerate((26, 40, 26, 40))]
    largest = 0.0
    with ThreadPoolExecutor(4) as pool:
        refused = [pool.submit(constraints.matcher, each) for each in wanted]
        for number in range(20):
            constraints.matcher(StructuredOutput(choice=["a", f"b{number}"]))
            if number == 3:
                assert not any(each.done() for each in refused)
        while not all(each.done() for each in refused):
            largest = max(largest, sum(group(process(constraints)).values()))
            threading.Event().wait(0.02)
        for each in refused:
            with pytest.raises(ValueError, match=TOO_MUCH):
                each.result(LONG)
    assert largest < 2 * MAX_MIB
    before = constraints._checks._server
    with pytest.raises(ValueError, match=TOO_MUCH):
        constraints.matcher(wanted[1])
    assert constraints.is_compiled(wanted[1].given) and constraints._checks._server is before


def test_more_of_them_than_may_wait_are_told_so(constraints: StructuredOutputs) -> None:
    wanted = [doubling(40, str(i)) for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(constraints.matcher, each) for each in wanted]
        wait_for(lambda: any(each.done() for each in asked), "refusal")
        os.killpg(process(constraints), signal.SIGSTOP)  # the rest need not be waited for
        errors = [str(each.exception()) for each in asked if each.done()]
        constraints.close()
    crowded = [error for error in errors if "8 others that take long are checked first" in error]
    assert crowded
    remembered = [each for each in wanted if constraints.is_compiled(each.given)]
    assert len(remembered) <= len(errors) - len(crowded), "they may be right at another time"


def test_what_many_ask_for_is_checked_once(constraints: StructuredOutputs, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    ask = grammar_checks._Server.ask
    monkeypatch.setattr(grammar_checks._Server, "ask", lambda *args: (asked.append(args), ask(*args))[1])
    with ThreadPoolExecutor(8) as pool:
        for wanted, is_right in ((StructuredOutput(regex="a{1,3}"), True), (StructuredOutput(regex="(a"), False)):
            found = [pool.submit(constraints.matcher, wanted) for _ in range(8)]
            assert {each.exception(LONG) is None for each in found} == {is_right}
    assert len(asked) == 2


def test_a_lost_process_is_replaced(constraints: StructuredOutputs) -> None:
    """Also for the requests that wait for it."""
    constraints.matcher(StructuredOutput(regex="a"))
    lost = process(constraints)
    os.kill(lost, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(constraints.matcher, StructuredOutput(regex="b"))
        server = constraints._checks._server
        assert server is not None
        wait_for(lambda: server._asked, "question")
        os.kill(lost, signal.SIGKILL)
        asked.result(LONG)
    assert process(constraints) != lost
    wait_for(lambda: not group(lost), "end of its forks")


def test_one_that_is_lost_again_and_again(constraints: StructuredOutputs, monkeypatch: pytest.MonkeyPatch) -> None:
    constraints.matcher(StructuredOutput(regex="a"))
    send = constraints._checks._server._link.send  # type: ignore[union-attr]

    def lose(*_: Any) -> None:
        raise OSError("gone")

    monkeypatch.setattr(type(send.__self__), "send", lose)  # type: ignore[attr-defined]
    server = constraints._checks._server
    monkeypatch.setattr(constraints._checks, "_running", lambda: server)
    wanted = StructuredOutput(regex="b")
    with pytest.raises(ValueError, match="must compile, but: the process that checks it was lost 2 times"):
        constraints.matcher(wanted)
    assert not constraints.is_compiled(wanted.given)


@pytest.mark.parametrize("module", [None, "nanovllm.no_such_module"], ids=["no process", "no start"])
def test_where_no_process_can_be_made(
    made: Callable[[], StructuredOutputs], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    module: str | None,
) -> None:  # fmt: skip
    def refuse(*_: Any) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(grammar_checks, *(("start_linked", refuse) if module is None else ("_MODULE", module)))
    assert made().matcher(StructuredOutput(choice=["a", "b"])).error is None
    assert "a grammar is compiled without bounds" in caplog.text


def test_close_ends_the_process_and_its_forks(constraints: StructuredOutputs) -> None:
    constraints.matcher(StructuredOutput(regex="a"))
    leader = process(constraints)
    assert len(group(leader)) == 2
    constraints.close()
    constraints.close()
    wait_for(lambda: not group(leader), "end of the forks")  # a fork that was killed may still be on its way out
    with pytest.raises(ValueError, match="this engine is closed"):
        constraints.matcher(StructuredOutput(regex="b"))


PROGRAM = """
import sys
from nanovllm import StructuredOutput
from nanovllm.engine.sampling.structured import StructuredOutputs
from nanovllm.text.checkpoint import CheckpointTokenizer

constraints = StructuredOutputs(CheckpointTokenizer(sys.argv[1]), 1024, [1023])
constraints.matcher(StructuredOutput(regex="a"))
print(constraints._checks._server._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, None], ids=["killed", "Ctrl-C", "ends"])
def test_nothing_outlives_the_program(number: signal.Signals | None) -> None:
    command = [sys.executable, "-c", PROGRAM, DEMO]
    with Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, preexec_fn=end_with_test_run) as program:
        assert program.stdin is not None and program.stdout is not None
        leader = int(program.stdout.readline())
        assert group(leader)
        if number is not None:
            program.send_signal(number)
        program.stdin.close()
        program.wait(LONG)
    wait_for(lambda: not group(leader), "end of the processes")


def walk(constraints: StructuredOutputs, wanted: StructuredOutput, count: int) -> structured.Matcher:
    """A matcher that has taken as many tokens, or fewer if it fails before."""
    matcher = constraints.matcher(wanted)
    for number in range(count):
        mask = constraints.fill_masks([matcher])[0]
        allowed = [i for i in range(1023) if mask[i // 32] >> (i % 32) & 1]
        if matcher.error is not None:
            break
        matcher.accept(allowed[number * 7919 % len(allowed)])
    return matcher


def test_states_that_ran_out_are_nobody_elses(
    made: Callable[[], StructuredOutputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar's outputs share the states of its lexer, which are bounded: who comes later gets new ones."""
    monkeypatch.setattr(grammar_compiler, "_MAX_STATES", 3_000)
    constraints, wanted = made(), StructuredOutput(regex=r"[\s\S]*a[\s\S]{14}b[\s\S]{14}")
    failed = walk(constraints, wanted, 2000)
    assert failed.error is not None and "too many states" in failed.error
    assert walk(constraints, wanted, 20).error is None


def test_states_that_were_made_count_as_memory(constraints: StructuredOutputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest constraints are forgotten when all take more than their bound."""
    monkeypatch.setattr(structured, "_MAX_CACHED_BYTES", 4 << 20)
    large, small = StructuredOutput(regex="[a-z]*"), StructuredOutput(regex="b")
    walk(constraints, large, 200)
    constraints.matcher(small)
    assert constraints.is_compiled(small.given) and not constraints.is_compiled(large.given)
