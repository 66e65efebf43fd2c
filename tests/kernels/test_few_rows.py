"""GEMM kernels for few rows, on CUDA cores and on tensor cores, against float64: interpreted on a CPU in float32 and
float16, on a GPU in bfloat16."""

from functools import partial
from typing import Any

import pytest
import torch
from gemm_checks import EPS, TOLERANCE, check_pdl, check_rows_apart, on_cpu, randn, relative_error
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from nanovllm.kernels.gemm import fma, stream
from nanovllm.kernels.plan.config import SKINNY_ROWS, STREAM_ROWS, GemmConfig, streaming
from nanovllm.kernels.plan.fits import why_not_norm
from nanovllm.kernels.pointwise.norm import Norm

OPS = ("norm_linear", "norm_linear_silu_mul", "linear", "linear_silu_mul", "linear_residual")


def fma_config(block_n: int, block_k: int, stages: int) -> GemmConfig:
    return GemmConfig("fma", block_n, block_k=block_k, stages=stages)


FMA, STREAM, WIDE = fma_config(8, 256, 2), streaming(2, 2, columns=64), streaming(1, 2, columns=128)
GPU_CONFIGS = [
    fma_config(8, 1024, 2), fma_config(8, 512, 1),
    streaming(4, 4, columns=64), streaming(8, 1, columns=64), streaming(4, 2, columns=128),
]  # fmt: skip


def inputs(rows: int, n: int, k: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    x, gain, weight, residual = (
        randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(((rows, k), (k,), (n, k), (rows, n)))
    )
    return {"x": x, "gain": gain.abs() + 0.5, "weight": weight / k**0.5, "residual": residual}


def around(op: str, t: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Norm, activation and residual that are fused to the product."""
    return {
        "norm": Norm(t["gain"], EPS) if op.startswith("norm") else None,
        "gated": op.endswith("silu_mul"),
        "residual": t["residual"].clone() if op == "linear_residual" else None,
    }


def run(op: str, t: dict[str, torch.Tensor], config: GemmConfig) -> torch.Tensor:
    kernel = stream if config.kernel == "stream" else fma
    return kernel.linear(t["x"], t["weight"], config, **around(op, t))


def exact(op: str, t: dict[str, torch.Tensor]) -> torch.Tensor:
    """The op in float64, apart from the two roundings that the norm makes by definition."""
    x, weight = t["x"].double(), t["weight"].double()
    if op.startswith("norm"):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        x = ((x * scale).to(t["x"].dtype) * t["gain"]).double()
    y = x @ weight.T
    if op.endswith("silu_mul"):
        gate, up = y.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    return y + t["residual"].double() if op == "linear_residual" else y


@pytest.mark.parametrize("op", OPS)
@given(
    st.sampled_from([torch.float32, torch.float16]), st.sampled_from((STREAM, WIDE)), st.integers(1, STREAM_ROWS),
    st.integers(1, 60), st.integers(1, 40),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
@example(torch.float32, WIDE, 2, 13, 65)
@example(torch.float16, STREAM, 1, 20, 9)
@on_cpu
def test_any_shape_matches_float64_and_so_does_the_twin(
    op: str, dtype: torch.dtype, stream_config: GemmConfig, rows: int, half_n: int, k_over_8: int
) -> None:
    """Any number of outputs, and any K that is a multiple of 8, if registers hold all of x that is to be normed."""
    assume("norm" not in op or not why_not_norm(rows, 8 * k_over_8, "silu" in op, 64, stream_config))
    t = inputs(rows, 2 * half_n, 8 * k_over_8, dtype)
    found = [run(op, t, config) for config in ((FMA, stream_config) if rows <= SKINNY_ROWS else (stream_config,))]
    found.append(fma.linear_reference(t["x"], t["weight"], **around(op, t)))
    for got in found:
        assert relative_error(got, exact(op, t)) < TOLERANCE[dtype]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 26, 264), (3, 6, 520)])
def test_a_bias_is_added_before_activation_and_residual(op: str, rows: int, n: int, k: int) -> None:
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    t = inputs(rows, n, k, dtype)
    bias, one = randn(n, dtype=dtype, seed=4), torch.ones(rows, 1, device=t["x"].device, dtype=dtype)
    wide = {**t, "x": torch.cat((t["x"], one), 1), "weight": torch.cat((t["weight"], bias[:, None]), 1)}
    if op.startswith("norm"):
        x = exact("norm_linear", {**t, "weight": torch.eye(k, device=bias.device, dtype=dtype)}).to(dtype)
        wide["x"] = torch.cat((x, one), 1)
    want = exact(op.removeprefix("norm_"), wide)
    for multiply in (partial(fma.linear, config=FMA), fma.linear_reference):
        assert relative_error(multiply(t["x"], t["weight"], bias=bias, **around(op, t)), want) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("config", GPU_CONFIGS, ids=str)
def test_matches_float64_in_bfloat16(op: str, config: GemmConfig) -> None:
    for n, k in ((512, 1024), (296, 1000)):
        t = inputs(STREAM_ROWS if config.kernel == "stream" else SKINNY_ROWS, n, k, torch.bfloat16)
        assert relative_error(run(op, t, config), exact(op, t)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("config", "counts"), [
    pytest.param(FMA, (1, 3), marks=on_cpu), pytest.param(STREAM, (3,), marks=on_cpu),
    *(pytest.param(config, (1, 2, 3), marks=pytest.mark.gpu) for config in GPU_CONFIGS[:2]),
])  # fmt: skip
def test_row_does_not_depend_on_its_neighbours(config: GemmConfig, counts: tuple[int, ...]) -> None:
    on_gpu = torch.cuda.is_available()
    t = inputs(SKINNY_ROWS, *((512, 1024, torch.bfloat16) if on_gpu else (26, 264, torch.float32)))
    check_rows_apart(lambda x: run("norm_linear", {**t, "x": x}, config), t["x"], counts)


@pytest.mark.gpu
@pytest.mark.parametrize("config", GPU_CONFIGS, ids=str)
def test_dependent_launch_in_a_graph_gives_the_same_bits(config: GemmConfig) -> None:
    t = inputs(2, 1024, 1024, torch.bfloat16)
    gates_and_ups = torch.cat([t["weight"], t["weight"]])
    kernel = stream if config.kernel == "stream" else fma

    def layer(hidden: torch.Tensor, _: torch.Tensor) -> None:
        for rows, weight, gated in ((hidden, t["weight"], False), (hidden[:1], gates_and_ups, True)):
            y = fma.linear(rows, weight, GPU_CONFIGS[0], norm=Norm(t["gain"], EPS), gated=gated)
            kernel.linear(y, t["weight"], config, residual=rows)

    check_pdl(layer, t["x"])


@pytest.mark.parametrize(
    ("shape_x", "shape_w", "message"),
    [((5, 64), (8, 64), "at most 4 rows"), ((1, 64), (8, 72), "does not fit"), ((1, 60), (8, 60), "multiple of 8")],
)
def test_bad_shapes_are_refused(shape_x: tuple[int, int], shape_w: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fma.linear(torch.zeros(shape_x), torch.zeros(shape_w), FMA)
    with pytest.raises(ValueError, match=message.replace("4 rows", "8 rows")):
        stream.linear(torch.zeros(shape_x[0] // 5 * 4 + shape_x[0], shape_x[1]), torch.zeros(shape_w), STREAM)


def test_other_operands_are_refused() -> None:
    with pytest.raises(ValueError, match="gate and up need two"):
        fma.linear(torch.zeros(1, 64), torch.zeros(16, 64), fma_config(4, 256, 1), gated=True)
    with pytest.raises(ValueError, match="contiguous"):
        fma.linear(torch.zeros(64, 2).T, torch.zeros(8, 64), FMA)
