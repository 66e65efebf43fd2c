"""Which algorithm of cuBLASLt is taken where: the rule, the file of choices, the search, and what happens where the
library does not know an algorithm; on a GPU every entry of the rule against float32."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from column_major_library import CONFIG, REFUSED_TILE, ROWS, K, N, inputs

from nanovllm.kernels import select_kernels
from nanovllm.kernels.gemm import cublas_lt as lt
from nanovllm.kernels.gemm import cublas_lt_rule as rule
from nanovllm.kernels.gemm import cublas_lt_tune
from nanovllm.kernels.gemm.cublas_lt import CublasLtError, Problem
from nanovllm.kernels.gemm.cublas_lt_rule import MANY_ROWS
from nanovllm.kernels.gemm.decode import MidConfig, SplitConfig
from nanovllm.kernels.gemm.lt_config import LtConfig
from nanovllm.layers import few_rows
from nanovllm.layers.linear import ParallelLinear
from nanovllm.runner import algorithm_search, tuning
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.wire.shapes import decode_buckets, mixed_shapes

CPU = torch.device("cpu")


@pytest.mark.usefixtures("no_library")
def test_without_the_library_products_stay_with_torch(caplog: pytest.LogCaptureFixture) -> None:
    problem = Problem(ROWS, N, K, torch.bfloat16, CPU)
    with pytest.raises(CublasLtError, match=r"no libcublasLt: libcublasLt.so.13: cannot open"):
        lt.heuristic(problem)
    assert not lt.supports(problem, CONFIG)
    weight = inputs(torch.bfloat16)[1]
    with caplog.at_level(logging.WARNING):
        found = algorithm_search.search({"o": [weight]}, lambda *_: None, select_kernels("cpu"), True, [ROWS], 9)
        model, _ = one_weight()
        choices = tuning.runnable({"o": {ROWS: CONFIG, 64: SplitConfig(2)}}, model)
    assert found == {"o": {}} and choices["o"] == {64: SplitConfig(2)}
    assert "no libcublasLt" in caplog.messages[0] and "stay with what cuBLAS takes" in caplog.messages[1]


def one_weight() -> tuple[Any, ParallelLinear]:
    """A model where one projection stands for all."""
    linear = ParallelLinear()
    linear.weight = inputs(torch.bfloat16)[1]
    attention, mlp = SimpleNamespace(qkv_proj=linear, o_proj=linear, backend=SimpleNamespace()), SimpleNamespace()
    mlp.gate_up_proj = linear
    mlp.down_proj = linear
    norms = {"input_layernorm": SimpleNamespace(), "post_attention_layernorm": SimpleNamespace()}
    layer = SimpleNamespace(self_attn=attention, mlp=mlp, **norms)
    return SimpleNamespace(layers=[layer], norm=SimpleNamespace(), lm_head=linear), linear


def test_rule_names_an_algorithm_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(CONFIG, tile=20)
    monkeypatch.setattr(rule, "_FEW_ROWS", {("o", N, K): {64: str(CONFIG), 128: str(other)}})
    assert rule.algorithms("o", N, K) == {64: CONFIG, 128: other}
    assert not rule.algorithms("down", N, K) and not rule.algorithms("o", K, N)


def entries() -> list[tuple[str, int, int, int, LtConfig]]:
    """Projection ("" for prompts), most rows, n, k, algorithm."""
    few = [(*key, most, text) for key, measured in rule._FEW_ROWS.items() for most, text in measured.items() if text]
    all_rows = [(name, most, n, k, LtConfig.parse(text)) for name, n, k, most, text in few]
    return all_rows + [("", 4096, n, k, LtConfig.parse(text)) for (n, k), text in rule._MANY_ROWS.items()]


def test_rule_is_well_formed() -> None:
    buckets = {*decode_buckets(256), *(sum(shape) for shape in mixed_shapes(256, 4096))}
    for measured in rule._FEW_ROWS.values():
        assert list(measured) == sorted(measured) and set(measured) <= buckets and all(measured.values())
    for name, rows, n, k, config in entries():
        assert config.tile_size and config.parts == config.split_k == 1 and not config.opaque
        found = rule.algorithms(name, n, k)[rows] if name else rule.many_rows_algorithm(n, k)
        assert found == config and (name or rule.fills(config, rows, n))


def test_tiles_that_come_out_even() -> None:
    config = LtConfig.parse("66:128x128 s64xA c1x1 k1 o1")
    n, rows = 12 * 128, 11 * 128
    assert rule.fills(config, rows, n), "one round over 132 processors"
    assert not rule.fills(config, rows, n + 128), "two, for a twelfth more"
    assert not rule.fills(config, rows + 1, n) and not rule.fills(config, rows - 128, n)
    assert rule.fills(config, 20 * rows + 1, n), "little, among twenty-one"


@pytest.mark.parametrize("tile", [15, REFUSED_TILE])
@pytest.mark.parametrize("fills", [True, False])
def test_many_rows_take_the_algorithm_where_it_suits(
    fake_cublas_lt: Any, monkeypatch: pytest.MonkeyPatch, tile: int, fills: bool
) -> None:
    monkeypatch.setattr(rule, "fills", lambda *_: fills)
    model, linear = one_weight()
    config = replace(CONFIG, tile=tile)
    tuning.apply(model, {"head": {32: SplitConfig(2), MANY_ROWS: config}}, fused=False)
    assert linear.many_rows == config and list(linear.few_rows) == [32]
    for rows in (MANY_ROWS - 1, MANY_ROWS, MANY_ROWS + 3):
        fake_cublas_lt.ran.clear()
        x, weight = torch.randn(rows, K).bfloat16(), linear.weight
        torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight))
        activated = few_rows.linear_silu_mul(x, linear, select_kernels("cpu"))
        assert activated.shape == (rows, N // 2)
        assert len(fake_cublas_lt.ran) == (2 if rows >= MANY_ROWS and fills and tile == 15 else 0)
    tuning.apply(model, {}, fused=False)
    fake_cublas_lt.ran.clear()
    assert linear.many_rows is None and not linear.few_rows
    assert len(linear(x)) == MANY_ROWS + 3 and not fake_cublas_lt.ran


def test_choices_take_the_rule(fake_cublas_lt: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    unknown = replace(CONFIG, tile=REFUSED_TILE)
    few = {("o", N, K): {40: str(CONFIG), 64: str(CONFIG)}, ("down", N, K): {40: str(unknown)}}
    monkeypatch.setattr(rule, "_FEW_ROWS", few)
    monkeypatch.setattr(rule, "_MANY_ROWS", {(N, K): str(CONFIG)})
    before: tuning.Choices = {name: {40: SplitConfig(2)} for name in ("qkv", "o", "gate_up", "down", "head")}
    choices = tuning._with_algorithms(before, one_weight()[0])
    many = {MANY_ROWS: CONFIG}
    assert choices["o"] == dict.fromkeys((40, 64), CONFIG) | many
    assert choices["down"] == {40: SplitConfig(2)} | many, "what the library refuses stays as it was"
    assert choices["head"] == {40: SplitConfig(2)}
    tuning.save(tmp_path / "choices.json", choices)
    assert tuning.load(tmp_path / "choices.json") == choices


def test_choices_of_another_library_are_left_out(fake_cublas_lt: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = one_weight()
    unknown, halves = replace(CONFIG, tile=REFUSED_TILE), SplitConfig(2)
    for _ in range(2):
        got = tuning.runnable({"o": {32: CONFIG, 64: unknown, 96: halves}, "head": {32: unknown}}, model)
        assert got["o"] == {32: CONFIG, 96: halves} and got["head"] == {}
    assert len(caplog.messages) == 1 and "2 products stay" in caplog.messages[0]
    assert f"64 rows of o by {unknown}" in caplog.messages[0]


@pytest.mark.parametrize("small_batch_kernels", [True, False])
def test_switch_off_names_nothing(monkeypatch: pytest.MonkeyPatch, small_batch_kernels: bool) -> None:
    options = {"fused_kernels": True, "kernel_choices": None, "max_num_seqs": 64}
    config = SimpleNamespace(small_batch_kernels=small_batch_kernels, **options)
    parts = {"group": SimpleNamespace(size=1), "io": SimpleNamespace(stream_context=nullcontext), "kernels": None}
    runner: Any = SimpleNamespace(config=config, device=torch.device("cuda"), model=None, **parts)
    monkeypatch.setattr(tuning, "measured", lambda *_: {"o": {MANY_ROWS: CONFIG}})
    assert bool(ModelRunner.choose_kernels(runner)) == small_batch_kernels


US = {None: 10.0, SplitConfig(2): 9.0}
"""What the present ways take in the search below."""


def searched(
    monkeypatch: pytest.MonkeyPatch, us: float, present: Any = None, seconds: float = 60, **changes: Any
) -> dict[str, dict[int, LtConfig]]:
    """A search where the only algorithm takes `us` of a product."""
    algorithm = replace(CONFIG, **changes)
    weights = {"o": [inputs(torch.bfloat16)[1]]}
    now: list[Any] = []

    def time_graph(calls: list[Any]) -> float:
        now.append(calls)
        return US[present("o", 256)] if len(now) % 2 else us

    monkeypatch.setattr(cublas_lt_tune, "rough_us", lambda runs, *_: [1.0] * len(runs))
    monkeypatch.setattr(algorithm_search, "graph_us", time_graph)
    monkeypatch.setattr(algorithm_search, "candidates", lambda problem, most: [algorithm] * (problem.parts == 1))
    monkeypatch.setattr(algorithm_search, "TIMED_ROWS", (256, 64))
    present = present or (lambda *_: None)
    return algorithm_search.search(
        weights, present, select_kernels("cpu"), True, [16, 32, 64, 80, 256, 512], seconds
    )  # fmt: skip


def test_search_takes_what_is_faster_for_the_rows_that_were_timed(
    fake_cublas_lt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert searched(monkeypatch, 9.0) == {"o": dict.fromkeys([64, 256], CONFIG)}
    assert searched(monkeypatch, 9.9) == {"o": {}}, "1 % is noise"
    assert searched(monkeypatch, 9.0, lambda *_: SplitConfig(2)) == {"o": {}}
    assert searched(monkeypatch, 9.0, seconds=0) == {"o": {}}


def test_search_of_prompts(fake_cublas_lt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm_search, "PROMPT_ROWS", 64)
    assert searched(monkeypatch, 9.0) == {"o": dict.fromkeys([256, MANY_ROWS], CONFIG)}
    own = MidConfig(64, 32, 256, 4)
    found = searched(monkeypatch, 9.0, lambda name, rows: own if rows < 256 else None)
    assert found == {"o": {256: CONFIG, MANY_ROWS: CONFIG}}, "what is there for MANY_ROWS is what counts"


def test_search_leaves_our_own_kernels_alone(fake_cublas_lt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = MidConfig(64, 32, 256, 4)
    found = searched(monkeypatch, 9.0, lambda name, rows: own if rows <= 64 else None)
    assert found == {"o": {256: CONFIG}}


def test_search_refuses_wrong_results(fake_cublas_lt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = lt.linear
    monkeypatch.setattr(algorithm_search, "linear", lambda x, weight, config: multiply(x, weight, config) * 1.1)
    assert searched(monkeypatch, 5.0) == {"o": {}}


@pytest.mark.gpu
def test_every_algorithm_of_the_rule_matches_float32_on_gpu() -> None:
    """In decode steps for as many rows as it is for and a few fewer, in prompts for any; eager and in a graph."""
    known, refused = 0, []
    for name, most, n, k, config in entries():
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        linear = ParallelLinear()
        linear.weight = weight
        for rows in (most, most - 3) if name else (1024, 3001, 4096):
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            if not lt.supports(Problem.of(x, weight), config):
                refused.append((name, rows, n, k, str(config)))
                continue
            known += 1
            linear.few_rows, linear.many_rows = ({rows: config}, None) if name else ({}, config)
            eager, forced = linear(x), lt.linear(x, weight, config)
            stream = torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    out = lt.linear(x, weight, config)
                graph.replay()
            torch.cuda.synchronize()
            want = x.float() @ weight.float().T
            for got in (eager, forced, out):
                assert got.dtype == torch.bfloat16
                assert (got.float() - want).norm() < 4e-3 * want.norm(), (name, rows, n, k, str(config))
            assert torch.equal(forced, out), "the same bits in a graph"
    if known == 0:
        pytest.skip("this device's library knows none of them")
    assert not refused, "all or nothing"
