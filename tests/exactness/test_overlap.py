"""Large steps cut in halves, whose sums run beside what the other half computes: the tokens of whole steps.

On a CPU the calls are the same, in the same order, without streams. The thresholds are lowered in every rank.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import make_model, save
from comparing import Expected
from family_cases import CASES
from observing import StepWitness
from test_families import expect_tokens_of_transformers
from workload import BLOCK, ROOMY, assert_outputs, make_requests, run, tokens_alone

from nanovllm import LLM
from nanovllm.executor import processes
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.parallel import two_batch
from nanovllm.parallel.two_batch import Overlap

REQUESTS = make_requests()
OPTIONS: dict[str, Any] = ROOMY


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(make_model(seed=1), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> list[Expected]:
    return tokens_alone(checkpoint, REQUESTS)


def lower_thresholds(monkeypatch: pytest.MonkeyPatch, min_rows: int, cut_multiple: int) -> None:
    """Lowers the thresholds in this process, which is rank 0, and in the workers that it starts."""
    monkeypatch.setattr(two_batch, "MIN_ROWS", min_rows)
    monkeypatch.setattr(two_batch, "CUT_MULTIPLE", cut_multiple)
    monkeypatch.setenv("CUT", f"{min_rows}:{cut_multiple}")
    monkeypatch.setattr(processes, "_WORKER_MODULE", "overlapping_worker")


class Cut(NamedTuple):
    """One step that was cut."""

    tokens: int
    cut: int
    decodes: int
    goes_through_a_row: bool
    has_cached_prefix: bool


def watch_cuts(monkeypatch: pytest.MonkeyPatch) -> list[Cut]:
    """This rank's steps that are cut."""
    cuts: list[Cut] = []
    whole = DecoderForCausalLM.forward_two_batch

    def watched(self: DecoderForCausalLM, input_ids: torch.Tensor, steps: Any, *wanted: Any) -> torch.Tensor:
        first, second = steps
        before, after = first.attention, second.attention
        through = (before.cu_seqlens_q.diff() > 0).sum() + (after.cu_seqlens_q.diff() > 0).sum()
        rows = len(set(before.row_slot.tolist()) | set(after.row_slot.tolist()))
        first_chunk = second.positions[after.cu_seqlens_q[1:-1].long()]
        sizes = input_ids.shape[0], first.positions.shape[0], before.num_decode_rows
        cuts.append(Cut(*sizes, int(through) > rows, bool((first_chunk > 0).any())))
        return whole(self, input_ids, steps, *wanted)

    monkeypatch.setattr(DecoderForCausalLM, "forward_two_batch", watched)
    return cuts


@pytest.mark.parametrize(
    ("ranks", "budget", "min_rows", "multiple"),
    [
        pytest.param(2, 1024, 2, 1, id="everything", marks=pytest.mark.slow),
        pytest.param(2, 50, 12, 5, id="chunks"),
        pytest.param(3, 60, 3, 2, id="three ranks"),
        pytest.param(4, 37, 7, 3, id="four ranks, chunks", marks=pytest.mark.slow),
    ],
)
def test_the_cut_changes_no_token(
    ranks: int, budget: int, min_rows: int, multiple: int, checkpoint: str, expected: list[Expected],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """Chunks end anywhere, so cuts go through them, through decodes, and through neither."""
    model, wanted = checkpoint, expected
    if ranks == 3:
        shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 132}
        model = str(save(make_model(seed=1, **shape), tmp_path))
        wanted = tokens_alone(model, REQUESTS)
    lower_thresholds(monkeypatch, min_rows, multiple)
    cuts = watch_cuts(monkeypatch)
    with LLM(model, **OPTIONS, tensor_parallel_size=ranks, max_num_batched_tokens=budget) as llm:
        witness = StepWitness().watch(llm)
        assert_outputs(run(llm, REQUESTS), REQUESTS, wanted)
    assert cuts and {cut.cut % multiple for cut in cuts} == {0}
    assert all(0 < cut.cut < cut.tokens and cut.decodes <= cut.cut and min_rows <= cut.tokens for cut in cuts)
    assert any(cut.cut % BLOCK for cut in cuts)
    assert any(cut.goes_through_a_row for cut in cuts)
    if budget < 1024:  # else all prompts are in the first step
        assert len(cuts) >= 5 and any(cut.decodes for cut in cuts) and any(cut.has_cached_prefix for cut in cuts)
    assert (witness.num_partial_chunks > 0) == (budget < 1024)


def test_switched_off(checkpoint: str, expected: list[Expected], monkeypatch: pytest.MonkeyPatch) -> None:
    lower_thresholds(monkeypatch, 2, 1)
    cuts = watch_cuts(monkeypatch)
    with LLM(checkpoint, **{**OPTIONS, "disable": ("two_batch_overlap",)}, tensor_parallel_size=2) as llm:
        assert_outputs(run(llm, REQUESTS), REQUESTS, expected)
    with LLM(checkpoint, **OPTIONS) as llm:  # one rank has nothing to sum
        assert_outputs(run(llm, REQUESTS), REQUESTS, expected)
    assert not cuts


def test_where_a_step_is_cut() -> None:
    """At a multiple of a tile, nearest to the middle from above; small steps stay whole, and so do those whose decodes
    are more than half, or whose halves the block of peer memory does not hold."""
    overlap = Overlap(None)
    assert overlap.cut(two_batch.MIN_ROWS - 1, 0) is None
    assert [overlap.cut(rows, 8) for rows in (2048, 2049, 2304, 4352, 8191)] == [1024, 1152, 1152, 2176, 4096]
    for rows in range(2048, 5000):
        cut = overlap.cut(rows, 0)
        assert cut is not None and cut % 128 == 0 and -1 < cut - rows / 2 < 128
    assert (overlap.cut(2048, 1024), overlap.cut(2048, 1025)) == (1024, None)
    sums: Any = SimpleNamespace(max_rows=1151)
    overlap = Overlap(sums)
    assert (overlap.cut(2048, 0), overlap.cut(2049, 0)) == (1024, None)


OTHERS = ("gemma4, experts", "qwen3_5", "nemotron_h", "lfm2", "olmo_hybrid", "gemma4", "deepseek_v3")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in OTHERS[:2])) for n in OTHERS])
def test_cuts_of_other_layers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial sums with norms of their own, of an MLP and of the experts beside it; states, of which the second half
    reads what the first one wrote."""
    lower_thresholds(monkeypatch, 6, 2)
    cuts = watch_cuts(monkeypatch)
    expect_tokens_of_transformers(CASES[name], tmp_path, tensor_parallel_size=2)
    assert any(cut.goes_through_a_row for cut in cuts)
