"""Products in parts over several ranks: the sum over the ranks adds them up, and whole steps give one rank's tokens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_model, save
from workload import ROOMY, assert_outputs, make_requests, run, run_alone

from nanovllm import LLM
from nanovllm.kernels.gemm.decode import MidConfig, SplitConfig
from nanovllm.layers.norm import ReduceAddNorm
from nanovllm.runner import tuning
from nanovllm.runner.model_runner import ModelRunner


def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 chooses for all ranks, also for those of another process."""
    requests = make_requests()
    model = str(save(make_model(seed=1), tmp_path))
    with LLM(model, **ROOMY, async_scheduling=False, enable_prefix_caching=False) as llm:
        expected = run_alone(llm, requests)
    halves: tuning.Choices = {name: {rows: SplitConfig(2) for rows in range(1, 17)} for name in ("o", "down")}
    monkeypatch.setattr(ModelRunner, "choose_kernels", lambda self: halves)
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


@pytest.mark.parametrize("fused", [True, False])
def test_the_rule_goes_by_the_shapes_of_a_rank(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """8B over two ranks, where no kernel of our own can run: o and down in halves, whose sum is another's business."""
    shapes = {"qkv": (3072, 4096), "o": (4096, 2048), "gate_up": (12288, 4096), "down": (4096, 6144)}
    shapes["head"] = (75968, 4096)

    def projections(model: Any) -> dict[str, Any]:
        weights = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
        return {name: [SimpleNamespace(weight=weight)] for name, weight in weights.items()}

    monkeypatch.setattr(tuning, "projections", projections)
    choices = tuning.measured(None, fused, 512)  # type: ignore[arg-type]
    for name, by_rows in choices.items():
        in_halves = {rows for rows, config in by_rows.items() if config == SplitConfig(2)}
        wanted = {rows for rows in (40, 64, 128, 256) if name in ("o", "down")}
        assert wanted <= in_halves and all(16 < rows <= 256 for rows in in_halves)
        assert not any(isinstance(config, MidConfig) for config in by_rows.values())
        assert in_halves or name in ("qkv", "gate_up", "head")


def test_a_sum_is_launched_dependently_behind_our_own_kernels_alone(tmp_path: Path) -> None:
    own = MidConfig(64, 32, 256, 4)
    choices: tuning.Choices = {"o": {32: own, 64: SplitConfig(2)}, "down": {32: SplitConfig(2), 64: own}}
    with LLM(str(save(make_model(seed=1), tmp_path)), **ROOMY) as llm:
        model = llm.engine.executor.runner.model
        tuning.apply(model, choices, fused=False)
        for layer in model.layers:
            assert layer.post_attention_layernorm.dependent_rows == {32}
            assert layer.input_layernorm.dependent_rows == {64}
        assert model.norm.dependent_rows == {64}
        tuning.apply(model, {}, fused=False)
        assert not model.norm.dependent_rows
