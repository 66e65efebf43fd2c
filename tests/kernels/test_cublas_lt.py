"""Algorithms of cuBLASLt: on a CPU against a library made here that multiplies column by column, as the real one does,
and without any; on a GPU every proposal against float64."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from column_major_library import CONFIG, REFUSED_TILE, ROWS, K, N, inputs

from nanovllm.kernels.gemm import cublas_lt as lt
from nanovllm.kernels.gemm.cublas_lt import Problem
from nanovllm.kernels.gemm.cublas_lt_tune import candidates
from nanovllm.kernels.gemm.decode import split_linear_reference
from nanovllm.kernels.gemm.lt_config import LtConfig, tile_sizes

CPU = torch.device("cpu")
FIELDS = ("algorithm", "tile", "stages", "cluster", "custom", "inner", "swizzle", "split_k", "reduction")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_row_major_product_in_a_column_major_library(fake_cublas_lt: Any, dtype: torch.dtype, parts: int) -> None:
    x, weight = inputs(dtype)
    got = lt.linear(x, weight, replace(CONFIG, parts=parts))
    if parts == 1:
        assert got.dtype == dtype
        torch.testing.assert_close(got, (x.float() @ weight.float().T).to(dtype))
    else:
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, split_linear_reference(x, weight, parts))
    assert fake_cublas_lt.ran == [[66, 15, 1, 0, 0, 0, 35, 0, 3, *[0] * 7]]


def test_products_of_any_size_are_prepared_once_and_freed(fake_cublas_lt: Any) -> None:
    fake_cublas_lt.workspace = 0
    for rows in (3, 5, 3, 7, 5):
        x, weight = inputs(torch.bfloat16, shape=(rows, N, K))
        torch.testing.assert_close(lt.linear(x, weight, CONFIG), (x.float() @ weight.float().T).to(torch.bfloat16))
    assert lt._product.cache_info().misses == 3 and not fake_cublas_lt.destroyed
    for cached in (lt.description, lt.plan, lt._product):
        assert cached.cache_info().maxsize == 1024, "prompts have ever new numbers of rows"
        cached.cache_clear()
    gc.collect()
    assert len(fake_cublas_lt.destroyed) == 3 * 4, "an operation and three layouts of each"


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


def test_proposals_are_written_down_by_their_attributes(fake_cublas_lt: Any) -> None:
    problem = Problem(ROWS, N, K, torch.bfloat16, CPU)
    assert lt.heuristic(problem) == [CONFIG, LtConfig(66, 20, 35, 2)]
    fake_cublas_lt.hidden = 7
    hidden = lt.heuristic(problem)[0]
    assert replace(hidden, opaque="") == CONFIG
    lt.linear(*inputs(torch.bfloat16), hidden)
    assert fake_cublas_lt.ran[0][15] == 7 and fake_cublas_lt.ran[0][:9] == fake_cublas_lt.proposed[0]


def test_sums_in_the_output_are_not_proposed(fake_cublas_lt: Any) -> None:
    fake_cublas_lt.proposed = [[66, 15, 4, scheme, 0, 0, 35, 0, 3] for scheme in (1, 2, 4)]
    found = lt.heuristic(Problem(ROWS, N, K, torch.bfloat16, CPU))
    assert found == [replace(CONFIG, split_k=4, reduction=lt.REDUCTION_IN_WORKSPACE)]


def test_candidates_vary_the_proposals(fake_cublas_lt: Any) -> None:
    found = candidates(Problem(ROWS, N, K, torch.bfloat16, CPU), 240)
    assert found[0] == CONFIG and len(set(found)) == len(found)
    assert {config.split_k for config in found} > {1, 2, 4}
    assert all((config.split_k > 1) == (config.reduction == lt.REDUCTION_IN_WORKSPACE) for config in found)
    assert {config.cluster for config in found} > {2, 3, 4} and 13 in {config.tile for config in found}
    assert len(candidates(Problem(ROWS, N, K, torch.bfloat16, CPU), 5)) == 5


def test_unknown_algorithm_is_not_supported(fake_cublas_lt: Any) -> None:
    problem = Problem(ROWS, N, K, torch.bfloat16, CPU)
    assert lt.supports(problem, CONFIG)
    assert not lt.supports(problem, replace(CONFIG, tile=REFUSED_TILE))
    assert not lt.supports(problem, replace(CONFIG, parts=2)), "it is for another problem"
    assert not lt.supports(replace(problem, parts=16), replace(CONFIG, parts=16)), "parts of 8 bytes"


def test_bad_tensors_are_refused(fake_cublas_lt: Any) -> None:
    x, weight = inputs(torch.bfloat16)
    for bad in ((x.T.contiguous().T, weight), (x, weight[:, :32]), (x.float(), weight)):
        with pytest.raises(ValueError, match="contiguous, of one K and dtype"):
            lt.linear(*bad, CONFIG)
    with pytest.raises(ValueError, match="16 bytes"):
        lt.linear(x.view(-1)[1 : 1 + K].view(1, K), weight, CONFIG)


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
