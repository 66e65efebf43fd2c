"""Algorithms of cuBLASLt: on a CPU against a library made here that multiplies column by column, as the real one does,
and without any; on a GPU every proposal against float64."""

import ctypes
import gc
import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.engine.step_shapes import decode_buckets
from nanovllm.kernels import cublas_lt as lt
from nanovllm.kernels import cublas_lt_rule as rule
from nanovllm.kernels import select_kernels
from nanovllm.kernels.cublas_lt import CublasLtError, Problem
from nanovllm.kernels.cublas_lt_rule import MANY_ROWS
from nanovllm.kernels.cublas_lt_tune import candidates
from nanovllm.kernels.lt_config import LtConfig, tile_sizes
from nanovllm.kernels.mid_gemm import MidConfig, SplitConfig, split_linear_reference
from nanovllm.layers import few_rows
from nanovllm.layers.linear import ParallelLinear
from nanovllm.worker import algorithm_search, tuning
from nanovllm.worker.model_runner import ModelRunner

CPU = torch.device("cpu")
CONFIG = LtConfig(66, 15, 35, 3)
ROWS, N, K = 24, 40, 64
REFUSED_TILE = 99
FIELDS = ("algorithm", "tile", "stages", "cluster", "custom", "inner", "swizzle", "split_k", "reduction")
TYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}


class ColumnMajorLibrary:
    """Multiplies what the descriptors say, columns first. An algorithm's attributes are its 32-bit words; the last word
    is one that no attribute shows."""

    def __init__(self) -> None:
        self.proposed: list[list[int]] = [[66, 15, 1, 0, 0, 0, 35, 0, 3], [66, 20, 1, 0, 0, 0, 35, 0, 2]]
        self.hidden, self.workspace = 0, 128
        self.ran: list[list[int]] = []
        self.destroyed: list[Any] = []

    def create(self, name: str, *arguments: Any) -> Any:
        return SimpleNamespace(arguments=arguments, attributes={})

    def set(self, name: str, target: Any, attribute: int, value: Any) -> None:
        if name == "MatmulAlgoConfig":
            words(target._obj)[attribute] = value.value
        else:
            target.attributes[attribute] = value.value

    def call(self, name: str, *arguments: Any) -> None:
        getattr(self, name)(*arguments)

    def MatmulPreferenceDestroy(self, preference: Any) -> None:
        assert preference.attributes[1] == lt.MAX_WORKSPACE

    def MatmulDescDestroy(self, made: Any) -> None:
        self.destroyed.append(made)

    MatrixLayoutDestroy = MatmulDescDestroy

    def MatmulAlgoInit(self, handle: Any, *arguments: Any) -> None:
        words(arguments[-1]._obj)[0] = arguments[-2]

    def MatmulAlgoConfigGetAttribute(self, algo: Any, attribute: int, value: Any, size: int, written: Any) -> None:
        assert size == ctypes.sizeof(value._obj)
        value._obj.value = words(algo._obj)[attribute]

    def MatmulAlgoCapGetAttribute(self, algo: Any, attribute: int, buffer: Any, size: int, written: Any) -> None:
        buffer[0], written._obj.value = 13, 4

    def MatmulAlgoCheck(self, *arguments: Any) -> None:
        if words(arguments[-2]._obj)[1] == REFUSED_TILE:
            raise CublasLtError("cublasLtMatmulAlgoCheck: CUBLAS_STATUS_NOT_SUPPORTED")
        arguments[-1]._obj.workspace = self.workspace

    def MatmulAlgoGetHeuristic(self, *arguments: Any) -> None:
        results, written = arguments[-2]._obj, arguments[-1]._obj
        for result, attributes in zip(results, self.proposed, strict=False):
            words(result.algo)[: len(attributes)] = attributes
            words(result.algo)[15] = self.hidden
        written.value = min(len(self.proposed), len(results))

    def Matmul(self, *arguments: Any) -> None:
        operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algo, scratch, size = arguments[
            1:-1
        ]
        assert (alpha._obj.value, beta._obj.value, c, c_layout, size) == (1, 0, d, d_layout, self.workspace)
        assert bool(scratch) == bool(size)
        assert operation.arguments == (68, 0) and operation.attributes == {3: 1}
        out = matrices(d, d_layout)
        out.copy_(matrices(a, a_layout).float().transpose(1, 2) @ matrices(b, b_layout).float())
        self.ran.append(list(words(algo._obj)))


def words(algo: lt.Algo) -> Any:
    return (ctypes.c_uint32 * 16).from_buffer(algo)


def matrices(pointer: int, layout: Any) -> torch.Tensor:
    """[batch, rows, columns] at an address, columns first."""
    kind, rows, columns, stride = layout.arguments
    batch, offset = layout.attributes.get(5, 1), layout.attributes.get(6, 0)
    dtype = TYPES[kind]
    size = offset * (batch - 1) + stride * (columns - 1) + rows
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype).as_strided((batch, rows, columns), (offset, 1, stride))


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    caches: Any = (lt.library, lt._handle, lt.description, lt.plan, lt._product, lt._initialised)
    caches += (few_rows._suits, tuning._warn)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> ColumnMajorLibrary:
    made = ColumnMajorLibrary()
    monkeypatch.setattr(lt, "library", lambda: made)
    monkeypatch.setattr(lt, "_handle", lambda device: None)
    monkeypatch.setattr(lt, "_stream", lambda device: 0)
    return made


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(ctypes, "CDLL", refuse)


def inputs(dtype: torch.dtype, device: str = "cpu", shape: tuple[int, int, int] = (ROWS, N, K)) -> Any:
    rows, n, k = shape
    x, weight = torch.randn(rows, k, dtype=torch.float64), torch.randn(n, k, dtype=torch.float64) / k**0.5
    return x.to(device, dtype), weight.to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_row_major_product_in_a_column_major_library(fake: Any, dtype: torch.dtype, parts: int) -> None:
    x, weight = inputs(dtype)
    got = lt.linear(x, weight, replace(CONFIG, parts=parts))
    if parts == 1:
        assert got.dtype == dtype
        torch.testing.assert_close(got, (x.float() @ weight.float().T).to(dtype))
    else:
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, split_linear_reference(x, weight, parts))
    assert fake.ran == [[66, 15, 1, 0, 0, 0, 35, 0, 3, *[0] * 7]]


def test_products_of_any_size_are_prepared_once_and_freed(fake: Any) -> None:
    fake.workspace = 0
    for rows in (3, 5, 3, 7, 5):
        x, weight = inputs(torch.bfloat16, shape=(rows, N, K))
        torch.testing.assert_close(lt.linear(x, weight, CONFIG), (x.float() @ weight.float().T).to(torch.bfloat16))
    assert lt._product.cache_info().misses == 3 and not fake.destroyed
    for cached in (lt.description, lt.plan, lt._product):
        assert cached.cache_info().maxsize == 1024, "prompts have ever new numbers of rows"
        cached.cache_clear()
    gc.collect()
    assert len(fake.destroyed) == 3 * 4, "an operation and three layouts of each"


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("66:176x128 s64xA c1x2 k1 o2", LtConfig(66, 201, 35, 5, custom=2)),
        ("66:96x64 s64xA c4x1 k1/2 o0", LtConfig(66, 27, 35, 4, parts=2)),
        ("21:64x128 s32x4 c1x1 k4 o0 i3 w1", LtConfig(21, 17, 10, 2, 0, 3, 1, 4, lt.REDUCTION_IN_WORKSPACE)),
        ("66:999 s77 c99 k2 o0 r1 raw00ff", LtConfig(66, 999, 77, 99, split_k=2, reduction=1, opaque="00ff")),
        ("1:0 s0x s c k1 o0", None),
    ],
)
def test_text_of_an_algorithm(text: str, config: LtConfig | None) -> None:
    if config is None:
        with pytest.raises(ValueError, match="an algorithm such as"):
            LtConfig.parse(text)
    else:
        assert str(config) == text and LtConfig.parse(text) == config


def test_text_of_every_attribute_comes_back() -> None:
    changed = [replace(CONFIG, **{field: value}) for field in FIELDS for value in (0, 1, 2, 3, 16, 29, 38, 300, 640)]
    assert all(LtConfig.parse(str(config)) == config for config in changed)
    assert len({str(config) for config in changed}) == len(set(changed))


def test_proposals_are_written_down_by_their_attributes(fake: Any) -> None:
    problem = Problem(ROWS, N, K, torch.bfloat16, CPU)
    assert lt.heuristic(problem) == [CONFIG, LtConfig(66, 20, 35, 2)]
    fake.hidden = 7
    hidden = lt.heuristic(problem)[0]
    assert replace(hidden, opaque="") == CONFIG
    lt.linear(*inputs(torch.bfloat16), hidden)
    assert fake.ran[0][15] == 7 and fake.ran[0][:9] == fake.proposed[0]


def test_sums_in_the_output_are_not_proposed(fake: Any) -> None:
    fake.proposed = [[66, 15, 4, scheme, 0, 0, 35, 0, 3] for scheme in (1, 2, 4)]
    found = lt.heuristic(Problem(ROWS, N, K, torch.bfloat16, CPU))
    assert found == [replace(CONFIG, split_k=4, reduction=lt.REDUCTION_IN_WORKSPACE)]


def test_candidates_vary_the_proposals(fake: Any) -> None:
    found = candidates(Problem(ROWS, N, K, torch.bfloat16, CPU), 240)
    assert found[0] == CONFIG and len(set(found)) == len(found)
    assert {config.split_k for config in found} > {1, 2, 4}
    assert all((config.split_k > 1) == (config.reduction == lt.REDUCTION_IN_WORKSPACE) for config in found)
    assert {config.cluster for config in found} > {2, 3, 4} and 13 in {config.tile for config in found}
    assert len(candidates(Problem(ROWS, N, K, torch.bfloat16, CPU), 5)) == 5


def test_unknown_algorithm_is_not_supported(fake: Any) -> None:
    problem = Problem(ROWS, N, K, torch.bfloat16, CPU)
    assert lt.supports(problem, CONFIG)
    assert not lt.supports(problem, replace(CONFIG, tile=REFUSED_TILE))
    assert not lt.supports(problem, replace(CONFIG, parts=2)), "it is for another problem"
    assert not lt.supports(replace(problem, parts=16), replace(CONFIG, parts=16)), "parts of 8 bytes"


def test_bad_tensors_are_refused(fake: Any) -> None:
    x, weight = inputs(torch.bfloat16)
    for bad in ((x.T.contiguous().T, weight), (x, weight[:, :32]), (x.float(), weight)):
        with pytest.raises(ValueError, match="contiguous, of one K and dtype"):
            lt.linear(*bad, CONFIG)
    with pytest.raises(ValueError, match="16 bytes"):
        lt.linear(x.view(-1)[1 : 1 + K].view(1, K), weight, CONFIG)


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
    attention, mlp = SimpleNamespace(qkv_proj=linear, o_proj=linear), SimpleNamespace(gate_up_proj=linear)
    mlp.down_proj = linear
    norms = {"input_layernorm": SimpleNamespace(), "post_attention_layernorm": SimpleNamespace()}
    layer = SimpleNamespace(self_attn=attention, mlp=mlp, **norms)
    return SimpleNamespace(layers=[layer], norm=SimpleNamespace(), lm_head=linear), linear


def test_rule_names_an_algorithm_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(CONFIG, tile=20)
    monkeypatch.setattr(rule, "_FEW_ROWS", {("o", N, K): {64: str(CONFIG), 128: str(other)}})
    by_rows = {rows: rule.algorithm("o", rows, N, K) for rows in (63, 64, 65, 127, 128)}
    assert by_rows == {63: None, 64: CONFIG, 65: None, 127: None, 128: other}
    assert rule.algorithm("down", 64, N, K) is None and rule.algorithm("o", 64, K, N) is None


def entries() -> list[tuple[str, int, int, int, LtConfig]]:
    """Projection ("" for prompts), most rows, n, k, algorithm."""
    few = [(*key, most, text) for key, measured in rule._FEW_ROWS.items() for most, text in measured.items() if text]
    all_rows = [(name, most, n, k, LtConfig.parse(text)) for name, n, k, most, text in few]
    return all_rows + [("", 4096, n, k, LtConfig.parse(text)) for (n, k), text in rule._MANY_ROWS.items()]


def test_rule_is_well_formed() -> None:
    buckets = set(decode_buckets(256))
    for measured in rule._FEW_ROWS.values():
        assert list(measured) == sorted(measured) and set(measured) <= buckets and all(measured.values())
    for name, rows, n, k, config in entries():
        assert config.tile_size and config.parts == config.split_k == 1 and not config.opaque
        found = rule.algorithm(name, rows, n, k) if name else rule.many_rows_algorithm(n, k)
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
    fake: Any, monkeypatch: pytest.MonkeyPatch, tile: int, fills: bool
) -> None:
    monkeypatch.setattr(rule, "fills", lambda *_: fills)
    model, linear = one_weight()
    config = replace(CONFIG, tile=tile)
    tuning.apply(model, {"head": {32: SplitConfig(2), MANY_ROWS: config}}, fused=False)
    assert linear.many_rows == config and list(linear.few_rows) == [32]
    for rows in (MANY_ROWS - 1, MANY_ROWS, MANY_ROWS + 3):
        fake.ran.clear()
        x, weight = torch.randn(rows, K).bfloat16(), linear.weight
        torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight))
        activated = few_rows.linear_silu_mul(x, linear, select_kernels("cpu"))
        assert activated.shape == (rows, N // 2)
        assert len(fake.ran) == (2 if rows >= MANY_ROWS and fills and tile == 15 else 0)
    tuning.apply(model, {}, fused=False)
    fake.ran.clear()
    assert linear.many_rows is None and not linear.few_rows and len(linear(x)) == MANY_ROWS + 3 and not fake.ran


def test_choices_take_the_rule(fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    unknown = replace(CONFIG, tile=REFUSED_TILE)
    few = {("o", N, K): {40: str(CONFIG), 64: str(CONFIG)}, ("down", N, K): {40: str(unknown)}}
    monkeypatch.setattr(rule, "_FEW_ROWS", few)
    monkeypatch.setattr(rule, "_MANY_ROWS", {(N, K): str(CONFIG)})
    before: tuning.Choices = {name: {40: SplitConfig(2)} for name in ("qkv", "o", "gate_up", "down", "head")}
    choices = tuning._with_algorithms(before, one_weight()[0], 64)
    many = {MANY_ROWS: CONFIG}
    assert choices["o"] == dict.fromkeys((40, 64), CONFIG) | many
    assert choices["down"] == {40: SplitConfig(2)} | many, "what the library refuses stays as it was"
    assert choices["head"] == {40: SplitConfig(2)}
    tuning.save(tmp_path / "choices.json", choices)
    assert tuning.load(tmp_path / "choices.json") == choices


def test_choices_of_another_library_are_left_out(fake: Any, caplog: pytest.LogCaptureFixture) -> None:
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
    runner: Any = SimpleNamespace(config=config, device=torch.device("cuda"), group=SimpleNamespace(size=1), model=None)
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

    monkeypatch.setattr(algorithm_search, "rough_us", lambda runs, *_: [1.0] * len(runs))
    monkeypatch.setattr(algorithm_search, "graph_us", time_graph)
    monkeypatch.setattr(algorithm_search, "candidates", lambda problem, most: [algorithm] * (problem.parts == 1))
    monkeypatch.setattr(algorithm_search, "TIMED_ROWS", (256, 64))
    present = present or (lambda *_: None)
    return algorithm_search.search(
        weights, present, select_kernels("cpu"), True, [16, 32, 64, 80, 256, 512], seconds
    )  # fmt: skip


def test_search_takes_what_is_faster_for_the_rows_that_were_timed(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched(monkeypatch, 9.0) == {"o": dict.fromkeys([64, 256], CONFIG)}
    assert searched(monkeypatch, 9.9) == {"o": {}}, "1 % is noise"
    assert searched(monkeypatch, 9.0, lambda *_: SplitConfig(2)) == {"o": {}}
    assert searched(monkeypatch, 9.0, seconds=0) == {"o": {}}


def test_search_of_prompts(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithm_search, "PROMPT_ROWS", 64)
    assert searched(monkeypatch, 9.0) == {"o": dict.fromkeys([256, MANY_ROWS], CONFIG)}
    own = MidConfig(64, 32, 256, 4)
    found = searched(monkeypatch, 9.0, lambda name, rows: own if rows < 256 else None)
    assert found == {"o": {256: CONFIG, MANY_ROWS: CONFIG}}, "what is there for MANY_ROWS is what counts"


def test_search_leaves_our_own_kernels_alone(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = MidConfig(64, 32, 256, 4)
    found = searched(monkeypatch, 9.0, lambda name, rows: own if rows <= 64 else None)
    assert found == {"o": {256: CONFIG}}


def test_search_refuses_wrong_results(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = lt.linear
    monkeypatch.setattr(algorithm_search, "linear", lambda x, weight, config: multiply(x, weight, config) * 1.1)
    assert searched(monkeypatch, 5.0) == {"o": {}}


def test_tiles_have_the_numbers_of_the_header() -> None:
    sizes = tile_sizes()
    known = {1: (8, 8), 18: (128, 64), 35: (256, 32), 36: (8, 128), 105: (56, 128), 232: (256, 192), 311: (768, 64)}
    known |= {312: (64, 16), 393: (128, 8), 448: (192, 8), 513: (256, 256), 630: (768, 80)}
    assert {number: sizes[number] for number in known} == known and len(sizes) == 630


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32, 4096, 1024), (200, 1024, 3072), (256, 2560, 5120)])
@pytest.mark.parametrize("parts", [1, 2])
def test_every_proposal_matches_float64_on_gpu(shape: tuple[int, int, int], parts: int) -> None:
    x, weight = inputs(torch.bfloat16, "cuda", shape)
    want = x.double() @ weight.double().T
    found = candidates(Problem.of(x, weight, parts), 40)
    assert len(found) >= 8
    for config in found:
        got = lt.linear(x, weight, config)
        assert got.shape == ((parts, *want.shape) if parts > 1 else want.shape)
        whole = got.double().sum(0) if parts > 1 else got.double()
        assert (whole - want).norm() < (5e-5 if parts > 1 else 4e-3) * want.norm(), config
        assert torch.equal(lt.linear(x, weight, config), got), "the same bits again"


@pytest.mark.gpu
def test_graph_replays_the_product_on_gpu() -> None:
    x, weight = inputs(torch.bfloat16, "cuda", (64, 4096, 4096))
    found = candidates(Problem.of(x, weight), 60)
    config = next((config for config in found if config.split_k > 1), found[0])
    want = lt.linear(x, weight, config).clone()
    graph, start = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        out = lt.linear(x, weight, config)
    for _ in range(3):
        x.copy_(start)
        graph.replay()
        assert torch.equal(out, want)
        x.zero_()
        graph.replay()
        assert not out.any()


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
