"""GEMMs in parts over several ranks: the sum over the ranks adds them up, and whole steps give one rank's tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_model, save
from workload import ROOMY, assert_outputs, make_requests, run, tokens_alone

from nanovllm import LLM
from nanovllm.executor.local import LocalExecutor
from nanovllm.kernels.plan.config import KINDS, SUMMED, Choices, GemmConfig
from nanovllm.kernels.plan.device import Device
from nanovllm.kernels.plan.plan import Rules, plan
from nanovllm.kernels.plan.product import Around, Product
from nanovllm.kernels.plan.table import GemmTable
from nanovllm.layers.context import Stream
from nanovllm.layers.norm import ReduceAddNorm

HALVES = GemmConfig("split", split_k=2)


def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 chooses for all ranks, also for those of another process."""
    requests = make_requests()
    model = str(save(make_model(seed=1), tmp_path))
    expected = tokens_alone(model, requests)

    call = LocalExecutor.call

    def with_halves(self: LocalExecutor, method: str, *args: Any) -> list[Any]:
        if method == "capture_graphs":
            found = (product.gemm(world=2) for product in self.runner.model.layers[0].operations)
            tried: Choices = {gemm: dict.fromkeys(range(1, 17), HALVES) for gemm in found if gemm.kind in SUMMED}
            args = (replace(self.runner.planner.rules, tried=tried),)
        return call(self, method, *args)

    monkeypatch.setattr(LocalExecutor, "call", with_halves)
    seen: list[tuple[int, ...]] = []
    forward = ReduceAddNorm.forward

    def watched(self: ReduceAddNorm, stream: Stream, rounds: bool = False) -> Any:
        assert stream.partial is not None
        seen.append(tuple(stream.partial.shape))
        return forward(self, stream, rounds)

    monkeypatch.setattr(ReduceAddNorm, "forward", watched)
    with LLM(model, **ROOMY, tensor_parallel_size=2) as llm:
        assert_outputs(run(llm, requests), requests, expected)
    in_parts = [shape for shape in seen if len(shape) == 3]
    assert len(in_parts) > 100 and {shape[0] for shape in in_parts} == {2}
    assert any(len(shape) == 2 and shape[0] > 16 for shape in seen)  # prompts stay whole


def test_an_all_reduce_is_launched_dependently_behind_our_own_kernels_alone() -> None:
    own, device = GemmConfig("tile", 64, 32, 256, 4), Device.named("H200")
    products = [Product(kind, 512, 512, "bfloat16", around=Around(adds_parts=kind in SUMMED)) for kind in KINDS[:4]]
    by_kind: dict[str, dict[int, GemmConfig]] = {"o": {32: own, 64: HALVES}, "down": {32: HALVES, 64: own}}
    rules = Rules(device, 2, tried={each.gemm(2): by_kind.get(each.name, {}) for each in products})
    for rows, early in ((32, "o"), (64, "down"), (8, "")):
        made = plan(products, rows, rules)
        found = zip(products, made.launches, strict=True)
        assert [one.name for one, launch in found if launch.is_early] == [early] * bool(early)


def test_a_report_says_how_many_gemms_were_tuned(tmp_path: Path) -> None:
    with LLM(str(save(make_model(seed=1), tmp_path)), **ROOMY) as llm:
        runner = llm.engine.executor.runner
        found = [product.gemm(1) for product in runner.model.layers[0].operations]
        table = GemmTable(("cpu",), dict.fromkeys(found[:2], ((16, HALVES),)))
        runner.planner.adopt(replace(runner.planner.rules, table=table, own_kernels=True))
        assert runner.info()["gemms"] == f"2 of {len(found) + 1} tuned", "the head is one more"
        runner.planner.adopt(Rules())
        assert llm.engine_info()["gemms"] == "library", "on a CPU"


def test_a_spoilt_file_of_choices_is_refused_by_its_path(tmp_path: Path) -> None:
    model = str(save(make_model(seed=1), tmp_path))
    (tmp_path / "choices.json").write_text("{")
    for name in ("choices.json", "missing.json"):
        with pytest.raises(ValueError, match=rf"kernel_choices='.*{name}'"):
            LLM(model, **ROOMY, kernel_choices=tmp_path / name)
