"""GEMMs in parts over several ranks: the sum over the ranks adds them up, and whole steps give one rank's tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_model, save
from workload import ROOMY, assert_outputs, make_requests, run, run_alone

from nanovllm import LLM
from nanovllm.kernels.plan.config import SUMMED, Choices, GemmConfig
from nanovllm.kernels.plan.table import GemmTable
from nanovllm.layers.norm import ReduceAddNorm
from nanovllm.runner import tuning
from nanovllm.runner.model_runner import ModelRunner

HALVES = GemmConfig("split", split_k=2)


def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 chooses for all ranks, also for those of another process."""
    requests = make_requests()
    model = str(save(make_model(seed=1), tmp_path))
    with LLM(model, **ROOMY, disable=("async_scheduling",), enable_prefix_caching=False) as llm:
        expected = run_alone(llm, requests)

    def halves(self: ModelRunner) -> Choices:
        found = tuning.gemms(self.model, fused=False)
        return {gemm: dict.fromkeys(range(1, 17), HALVES) for gemm in found if gemm.kind in SUMMED}

    monkeypatch.setattr(ModelRunner, "choose_kernels", halves)
    seen: list[tuple[int, ...]] = []
    forward = ReduceAddNorm.forward

    def watched(self: ReduceAddNorm, partial: torch.Tensor, *others: Any) -> Any:
        seen.append(tuple(partial.shape))
        return forward(self, partial, *others)

    monkeypatch.setattr(ReduceAddNorm, "forward", watched)
    with LLM(model, **ROOMY, tensor_parallel_size=2) as llm:
        assert_outputs(run(llm, requests), requests, expected)
    in_parts = [shape for shape in seen if len(shape) == 3]
    assert len(in_parts) > 100 and {shape[0] for shape in in_parts} == {2}
    assert any(len(shape) == 2 and shape[0] > 16 for shape in seen)  # prompts stay whole


def test_an_all_reduce_is_launched_dependently_behind_our_own_kernels_alone(tmp_path: Path) -> None:
    own = GemmConfig("decode", 64, 32, 256, 4)
    by_kind = {"o": {32: own, 64: HALVES}, "down": {32: HALVES, 64: own}}
    with LLM(str(save(make_model(seed=1), tmp_path)), **ROOMY) as llm:
        model = llm.engine.executor.runner.model
        choices = {gemm: by_kind.get(gemm.kind, {}) for gemm in tuning.gemms(model, fused=False)}
        assert {gemm.kind for gemm in choices} == {"qkv", "o", "gate_up", "down", "head"}
        tuning.apply(model, choices, fused=False)
        for layer in model.layers:
            assert layer.post_attention_layernorm.dependent_rows == {32}
        assert [layer.input_layernorm.dependent_rows for layer in model.layers[1:]] == [{64}] * (len(model.layers) - 1)
        assert model.norm.dependent_rows == {64}
        tuning.apply(model, {}, fused=False)
        assert not model.norm.dependent_rows


def test_a_report_says_how_many_gemms_were_tuned(tmp_path: Path) -> None:
    with LLM(str(save(make_model(seed=1), tmp_path)), **ROOMY) as llm:
        model = llm.engine.executor.runner.model
        found = list(tuning.gemms(model, fused=True))
        table = GemmTable(("cpu",), dict.fromkeys(found[:2], ((16, HALVES),)))
        assert tuning.report(model, table, fused=True) == f"2 of {len(found)} tuned"
        assert tuning.report(model, table, fused=False) == f"0 of {len(found)} tuned"
        assert llm.engine_info()["gemms"] == "library", "on a CPU"


def test_a_spoilt_file_of_choices_is_refused_by_its_path(tmp_path: Path) -> None:
    model = str(save(make_model(seed=1), tmp_path))
    (tmp_path / "choices.json").write_text("{")
    for name in ("choices.json", "missing.json"):
        with pytest.raises(ValueError, match=rf"kernel_choices='.*{name}'"):
            LLM(model, **ROOMY, kernel_choices=tmp_path / name)
