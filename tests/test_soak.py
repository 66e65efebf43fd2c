"""Random traffic for some seconds on one rank and on two; and that the soak run sees what it is there to see."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from exactness.family_cases import CASES, make_model, save
from programs import ROOT, run

from nanovllm import SamplingParams
from nanovllm.engine import prefix_keys
from nanovllm.engine.step import Step
from nanovllm.outputs import StepOutput

SECONDS = 10
sys.path.insert(0, str(ROOT / "scripts"))

import soak  # noqa: E402
from soak_ledger import COUNTED  # noqa: E402

DEMO = str(ROOT / "assets" / "demo-qwen3")


def expect_right_answers(drafts: int, *options: str) -> None:
    """Runs scripts/soak.py, with so many tokens drafted at a time."""
    if drafts:
        speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1}
        options += ("--speculative-config", json.dumps(speculative))
    printed = run(ROOT / "scripts" / "soak.py", "--device", "cpu", "--minutes", str(SECONDS / 60), *options)
    counts = {line[:20].strip(): int(line[20:].replace(",", "")) for line in printed.splitlines()[: len(COUNTED)]}
    for name in ("compared", "chunks", "preemptions", "cut off", "cached tokens", "weight loads"):
        assert counts[name] > 0, printed
    assert (counts["drafted tokens"] > 0) == (drafts > 0), printed


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "drafts"), [(1, 0), (2, 0), (1, 3), (2, 7)])
def test_random_traffic(ranks: int, drafts: int) -> None:
    expect_right_answers(drafts, "--tensor-parallel-size", str(ranks), "--seed", str(40 + ranks))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "gemma4"])
def test_random_traffic_of_other_layers(family: str, tmp_path: Path) -> None:
    """Those with states, and with windows."""
    save(make_model(CASES[family]), CASES[family], tmp_path)
    expect_right_answers(3, "--model", str(tmp_path))


@pytest.mark.slow
def test_requests_to_a_server_leave_nothing_behind() -> None:
    """Neither memory nor descriptors, answered, refused or left by their clients."""
    run(ROOT / "scripts" / "soak_server.py", "--requests", "7000", "--settled", "5000")


def violations() -> list[str]:
    with soak.start(DEMO, "cpu", 1, seed=0) as llm:
        run = soak.Soak(llm, seed=3)
        run.run(6.0)
    return run.ledger.violations


def key_of_another_text(content: bytes, kind: bytes = b"") -> bytes:
    return len(content).to_bytes(prefix_keys.KEY_SIZE, "little")


@pytest.mark.slow
def test_wrong_sharing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any full block is taken for any other."""
    monkeypatch.setattr(prefix_keys, "_digest", key_of_another_text)
    found = violations()
    assert any("alone it was" in text for text in found), found


def test_the_end_of_a_completion_is_not_lost_between_two_threads() -> None:
    """step() reports the end of completion 0; while it does, completion 1 ends, in the turn of
    another thread, which has yet to hand that on."""
    ended, reported = threading.Event(), threading.Event()
    with soak.start(DEMO, "cpu", 1, seed=0) as llm:
        engine: Any = llm.engine
        step, outputs_of = engine.step, engine.book.outputs
        other = threading.Thread(target=lambda: llm.generate([[3] * 5], use_tqdm=False))
        every_third = list(range(0, llm.model_config.vocab_size, 3))  # completion 1 ends in the step after 0's end
        params = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=8, stop_token_ids=every_third)
        request_id = llm.add_request([5] * 7, params)
        last = engine.book.rows[request_id][1]

        def slow_step() -> Step:
            outputs: Step = step()
            if threading.current_thread() is other and last.ending and not ended.is_set():
                ended.set()
                reported.wait(1.0)
            return outputs

        def slow_outputs(step: Step, left_out: set[int]) -> list[StepOutput]:
            found: list[StepOutput] = outputs_of(step, left_out)
            if step.finishes and not other.ident:
                other.start()
                ended.wait(0.5)
            return found

        engine.step, engine.book.outputs = slow_step, slow_outputs
        ends: list[int] = []
        while len(ends) < 2 and not (reported.is_set() and llm.is_finished()):
            ends += [output.index for output in llm.step() if output.finished]
            if other.ident:
                reported.set()
        other.join(30)
        ends += [output.index for output in llm.step() if output.finished]
    assert sorted(ends) == [0, 1]
