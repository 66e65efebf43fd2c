"""Bounds on a grammar's text: refused by them, and in time that grows no faster than the text."""

import json
import threading
import time
from typing import Any

import pytest

from nanovllm.engine.sampling import grammar_limits
from nanovllm.engine.sampling.grammar_limits import MAX_BYTES, MAX_DEPTH, LargeStackThread, check_text

MOST = MAX_BYTES["grammar"]


@pytest.mark.parametrize(
    "piece",
    ["\n", "\r\n", " ", "\t", "a", "a ", "a\n", "?\n", "a[", "a[]", "a [x] ", "_.-", "%json ", "%json {", '"', "/"],
)
def test_no_text_takes_more_than_its_length(piece: str) -> None:
    text = (piece * MOST)[:MOST]
    begin = time.thread_time()
    try:
        check_text("grammar", text)
    except ValueError:
        pass
    assert time.thread_time() - begin < 1.0  # 0.02 s; by its square, minutes


def test_schemas_that_are_no_json_are_counted_and_others_are_not() -> None:
    check_text("grammar", "start: " + "%json {} " * 1000 + "%json { " * 500)
    with pytest.raises(ValueError, match="it has 501 schemas that are no JSON, at most 500"):
        check_text("grammar", "start: " + "%json { " * 501)


def test_rules_are_counted_however_they_are_written() -> None:
    heads = ["start:", "  a :", "?b:", "!c[capture]:", 'd [capture, stop="x"] :', "\ne-1.f:"]
    rules = "\n".join(f'{head} "x"' for head in heads)
    with pytest.raises(ValueError, match="it has 504 rules, at most 500"):
        check_text("grammar", "\n\n".join([rules] * 84))
    check_text("grammar", "\n\n".join([rules] * 83))


@pytest.mark.parametrize("kind", ["json", "grammar"])
@pytest.mark.parametrize("depth", [MAX_DEPTH, 10_000])
def test_a_deep_schema_is_refused(kind: str, depth: int) -> None:
    text = '{"items":' * depth + "{}" + "}" * depth
    with pytest.raises(ValueError, match="nest deeper than 128 levels"):
        check_text(kind, text if kind == "json" else f"start: %json {text}")


def test_a_schema_as_deep_as_may_be() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_DEPTH - 1):
        schema = {"items": schema}
    check_text("json", json.dumps(schema))


def test_what_takes_too_long_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused and left behind; those after it are done meanwhile. Too many at once are refused at the start."""
    ends = threading.Event()
    threads = LargeStackThread()
    for number in range(grammar_limits._MOST_LEFT):
        with monkeypatch.context() as patch:
            patch.setattr(grammar_limits, "_PATIENCE", 0.05)
            with pytest.raises(ValueError, match="takes more than"):
                threads.run(ends.wait)
        if number < grammar_limits._MOST_LEFT - 1:
            assert threads.run(lambda: 5) == 5
    begun = threading.Event()
    with pytest.raises(ValueError, match="still being compiled"):
        threads.run(begun.set)
    assert not begun.is_set()
    left = [*threads._left]
    assert all(thread.daemon for thread in left), "the interpreter's exit would wait for them"
    ends.set()
    for thread in left:
        thread.join(20)
    assert threads.run(lambda: 7) == 7
