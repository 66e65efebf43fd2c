"""The timeline of a run: what it says is what happened, and nothing runs twice at once on a track."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from programs import run

from nanovllm import SamplingParams
from nanovllm.llm import LLM

ROOM = {"device": "cpu", "num_kvcache_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 32}
TIGHT = {**ROOM, "disable": "lookahead"}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], Any]:
    """(the file, outputs, stats) of a run with prompts in chunks and preemptions."""
    folder = tmp_path_factory.mktemp("trace")
    with LLM("demo", trace=str(folder), **TIGHT) as llm:
        prompts = [list(range(5 + n, 55 + 7 * n)) for n in range(5)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=False)
        cut = llm.add_request([1, 2, 3])
        llm.abort(cut)
        llm.step()
        stats = llm.stats()
    [path] = folder.glob("*.json")
    return path, outputs, stats


def named(path: Path, **fields: Any) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())
    return [event for event in events if all(event.get(key) == value for key, value in fields.items())]


def test_steps(traced: tuple[Path, list[Any], Any]) -> None:
    path, _, stats = traced
    steps = named(path, ph="X", pid=1)
    assert [step["args"]["step"] for step in steps] == list(range(1, len(steps) + 1))
    for before, after in pairwise(steps):
        assert after["ts"] >= before["ts"] + before["dur"] - 0.2  # in microseconds, rounded to 0.1
    computed = sum(step["args"]["decode_rows"] + step["args"]["prompt_tokens"] for step in steps)
    assert computed == stats.iteration_tokens_sum
    assert all(step["args"]["decode_rows"] <= 4 and step["args"]["prompt_tokens"] <= 32 for step in steps)


def test_steps_say_what_they_verified(tmp_path: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM("demo", trace=str(tmp_path), device="cpu", max_num_seqs=4, speculative_config=drafts) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        llm.generate(["one two one two one two", "1 2 3 4 1 2 3 4 1 2"], params, use_tqdm=False)
        stats = llm.stats()
    [path] = tmp_path.glob("*.json")
    verified = [step["args"] for step in named(path, ph="X", pid=1) if "places" in step["args"]]
    assert {args["places"] for args in verified} == {4} and stats.spec_decode_num_accepted_tokens > 0
    assert sum(args["drafted"] for args in verified) == stats.spec_decode_num_draft_tokens
    assert sum(args["right"] for args in verified) == stats.spec_decode_num_accepted_tokens


def test_requests(traced: tuple[Path, list[Any], Any]) -> None:
    path, outputs, _ = traced
    for output in outputs:
        [waiting] = named(path, name="waiting", tid=output.request_id)
        [prefill] = named(path, name="prefill", tid=output.request_id)
        [decode] = named(path, name="decode", tid=output.request_id)
        assert waiting["ts"] + waiting["dur"] == pytest.approx(prefill["ts"], abs=0.2)
        assert prefill["ts"] + prefill["dur"] == pytest.approx(decode["ts"], abs=0.2)
        assert decode["args"]["output_tokens"] == 40 and decode["args"]["finish_reason"] == "length"
        assert waiting["dur"] == pytest.approx(1e6 * output.metrics.queued, abs=0.2)
        chunks = [e for e in named(path, ph="X", pid=2, tid=output.request_id) if e["name"].endswith("prompt tokens")]
        assert chunks and len({chunk["args"]["first"] for chunk in chunks}) > 1  # 32 tokens a step


def test_preemptions_and_gauges(traced: tuple[Path, list[Any], Any]) -> None:
    path, _, stats = traced
    assert stats.num_preemptions > 0
    counts = [int(event["name"].split()[0]) for event in named(path, ph="i", pid=1) if "preempted" in event["name"]]
    assert sum(counts) == stats.num_preemptions
    assert named(path, name="again, after a preemption", ph="i")
    assert {event["args"]["running"] for event in named(path, name="requests")} >= {1, 2}
    assert all(0 <= event["args"]["used"] <= 100 for event in named(path, name="KV cache %"))


def test_page_has_the_events(traced: tuple[Path, list[Any], Any]) -> None:
    path, _, _ = traced
    page = path.with_suffix(".html").read_text()
    listed = page.partition("const events = [")[2].partition("\n];")[0]
    assert json.loads(f"[{listed}]") == json.loads(path.read_text())
    assert "http" not in page.replace("http-equiv", "")


def test_a_run_that_is_killed_leaves_what_perfetto_reads(tmp_path: Path) -> None:
    code = f"""
import os
from nanovllm import SamplingParams
from nanovllm.llm import LLM
import nanovllm.engine.trace as trace
trace._BUFFER = 1
llm = LLM("demo", trace={str(tmp_path)!r}, device="cpu", num_kvcache_blocks=32)
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
os._exit(0)
"""
    run("-c", code, forks=True)
    [path] = tmp_path.glob("*.json")
    text = path.read_text()
    events = json.loads(text[: text.rindex(",\n")] + "]")  # Perfetto takes an array without its end
    assert sum(event["ph"] == "X" and event["pid"] == 1 for event in events) >= 3


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="trace="):
        LLM("demo", device="cpu", num_kvcache_blocks=32, trace=str(tmp_path / "file"))
