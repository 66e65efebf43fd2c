"""The small-row GEMM kernels against float64: interpreted on a CPU in float32 and float16, on a GPU in bfloat16."""

import os
import pickle

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from nanovllm.kernels.gemm import decode_rule as mid_gemm_rule
from nanovllm.kernels.gemm import few_rows_rule
from nanovllm.kernels.gemm import skinny as sg
from nanovllm.kernels.gemm.skinny import GemmConfig
from nanovllm.kernels.gemm.skinny_tune import OPS, SmallGemmChoice, autotune_chain, autotune_small_gemm, rotation

EPS = 1e-6
FMA, TILE, STREAM = GemmConfig("fma", 8, 256, 2), GemmConfig("tile", 16, 256, 2), GemmConfig("stream", 32, 64, 3)
SPLIT_FMA, SPLIT_TILE, SPLIT_STREAM = (GemmConfig(c.kernel, c.block_n, c.block_k, 1, 2) for c in (FMA, TILE, STREAM))
GPU_CONFIGS = [
    GemmConfig("fma", 8, 1024, 2),
    GemmConfig("fma", 8, 512, 1, 2),
    GemmConfig("tile", 16, 512, 2),
    GemmConfig("tile", 16, 512, 1, 2),
    GemmConfig("stream", 64, 128, 4),
    GemmConfig("stream", 32, 128, 3, 2),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def inputs(rows: int, n: int, k: int, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    make = torch.Generator().manual_seed(seed)
    tensors = {
        "x": torch.randn(rows, k, generator=make),
        "gain": torch.rand(k, generator=make) + 0.5,
        "weight": torch.randn(n, k, generator=make) / k**0.5,
        "residual": torch.randn(rows, n, generator=make),
    }
    return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}


def run(
    op: str, t: dict[str, torch.Tensor], config: GemmConfig, rows: int | None = None, pdl: bool = True
) -> torch.Tensor:
    x, residual = t["x"][:rows].clone(), t["residual"][:rows].clone()
    if op == "norm_linear":
        return sg.norm_linear(x, t["gain"], EPS, t["weight"], config=config, pdl=pdl)
    if op == "norm_linear_silu_mul":
        return sg.norm_linear_silu_mul(x, t["gain"], EPS, t["weight"], config=config, pdl=pdl)
    if op == "linear":
        return sg.linear(x, t["weight"], config=config, pdl=pdl)
    return sg.linear_residual(x, t["weight"], residual, config=config, pdl=pdl)


def exact(op: str, t: dict[str, torch.Tensor]) -> torch.Tensor:
    """The op in float64, apart from the two roundings that the norm makes by definition."""
    x, weight = t["x"].double(), t["weight"].double()
    if op.startswith("norm"):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        x = ((x * scale).to(t["x"].dtype) * t["gain"]).double()
    y = x @ weight.T
    if op == "norm_linear_silu_mul":
        gate, up = y.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    return y + t["residual"].double() if op == "linear_residual" else y


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (FMA, (1, 40, 72)),
        (FMA, (2, 26, 520)),
        (SPLIT_FMA, (1, 26, 264)),
        (TILE, (3, 26, 264)),
        (TILE, (16, 40, 520)),
        (SPLIT_TILE, (5, 40, 264)),
        (STREAM, (3, 26, 200)),
        (SPLIT_STREAM, (16, 40, 136)),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the bfloat16 test covers these on a GPU")
def test_matches_float64_in_the_interpreter(
    op: str, dtype: torch.dtype, config: GemmConfig, shape: tuple[int, int, int]
) -> None:
    t = inputs(*shape, dtype)
    assert relative_error(run(op, t, config), exact(op, t)) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("config", GPU_CONFIGS, ids=lambda c: f"{c.kernel}-{c.split_k}")
def test_matches_float64_in_bfloat16(op: str, config: GemmConfig) -> None:
    for n, k in ((512, 1024), (296, 1288)):
        t = inputs(4, n, k, torch.bfloat16)
        assert relative_error(run(op, t, config), exact(op, t)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("op", OPS)
def test_plain_twin_agrees_with_float64(op: str) -> None:
    t = inputs(3, 26, 72, torch.float32)
    args = {
        "norm_linear": (t["x"], t["gain"], EPS, t["weight"]),
        "norm_linear_silu_mul": (t["x"], t["gain"], EPS, t["weight"]),
        "linear": (t["x"], t["weight"]),
        "linear_residual": (t["x"], t["weight"], t["residual"].clone()),
    }[op]
    got = getattr(sg, f"{op}_reference")(*args)
    assert relative_error(got, exact(op, t)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("config", [TILE, SPLIT_STREAM], ids=lambda c: c.kernel)
def test_row_does_not_depend_on_its_neighbours(config: GemmConfig) -> None:
    t = inputs(4, 26, 264, torch.float32)
    alone, together = run("norm_linear", t, config, rows=1), run("norm_linear", t, config)
    t["x"][1:] = 1e4
    other = run("norm_linear", t, config)
    assert torch.equal(alone[0], together[0]) and torch.equal(alone[0], other[0])


@pytest.mark.gpu
@pytest.mark.parametrize("config", GPU_CONFIGS, ids=lambda c: f"{c.kernel}-{c.split_k}")
def test_row_does_not_depend_on_its_neighbours_on_gpu(config: GemmConfig) -> None:
    counts = (1, 2, 3, 4) if config.kernel == "fma" else (1, 3, 8, 16)
    t = inputs(counts[-1], 512, 1024, torch.bfloat16)
    whole = run("norm_linear", t, config)
    for rows in counts:
        assert torch.equal(run("norm_linear", t, config, rows), whole[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("config", GPU_CONFIGS, ids=lambda c: f"{c.kernel}-{c.split_k}")
def test_dependent_launch_in_a_graph_gives_the_same_bits(config: GemmConfig) -> None:
    """30 dependent layers, each reading what the one before wrote: a missing wait would show as a difference."""
    t = inputs(2, 1024, 1024, torch.bfloat16)

    def chain(pdl: bool) -> torch.Tensor:
        hidden = t["x"].clone()

        def layers() -> None:
            for _ in range(30):
                y = sg.norm_linear(hidden, t["gain"], EPS, t["weight"], config=GPU_CONFIGS[0], pdl=pdl)
                sg.linear_residual(y, t["weight"], hidden, config=config, pdl=pdl)

        stream = torch.cuda.Stream()  # split-K's workspace belongs to a stream, and must be there before the capture
        with torch.cuda.stream(stream):
            layers()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                layers()
        torch.cuda.synchronize()
        hidden.copy_(t["x"])
        graph.replay()
        return hidden.clone()

    plain = chain(pdl=False)
    assert plain.isfinite().all()
    for _ in range(3):
        assert torch.equal(chain(pdl=True), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_autotune_returns_a_choice_that_survives_pickling(op: str) -> None:
    weights = [inputs(1, 512, 1024, torch.bfloat16)["weight"] for _ in range(2)]
    choice = autotune_small_gemm(op, weights, 2)
    assert (choice.op, choice.rows, choice.n, choice.k) == (op, 2, 512, 1024) and choice.us > 0
    assert pickle.loads(pickle.dumps(choice)) == choice


def test_choice_is_picklable_and_rotation_is_bounded() -> None:
    choice = SmallGemmChoice("linear", 1, 512, 1024, FMA, 2.5)
    assert pickle.loads(pickle.dumps(choice)) == choice
    weight = torch.empty(1, dtype=torch.bfloat16).expand(4096, 4096)
    assert len(rotation([weight] * 40)) == 5


def test_chain_is_improved_part_by_part() -> None:
    """Costs that depend on the neighbour: the best choice of each part alone is not the best chain."""
    costs = {
        (FMA, FMA): 5.0,
        (FMA, None): 4.0,
        (TILE, FMA): 6.0,
        (TILE, None): 3.0,
        (None, None): 9.0,
        (None, FMA): 9.0,
    }
    seen = []

    def run(choices: dict[str, GemmConfig | None]) -> None:
        seen.append((choices["qkv"], choices["o"]))

    def timer(calls: list) -> float:
        calls[0]()
        return costs[seen[-1]]

    options = {"o": [FMA, None], "qkv": [None, FMA, TILE]}
    assert autotune_chain(run, options, {"qkv": FMA, "o": FMA}, timer) == {"qkv": TILE, "o": None}
    assert len(seen) == 1 + 1 + 2


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize(
    "shape", [(4096, 1024), (1024, 3072), (24576, 4096), (4096, 12288), (2560, 5120), (151936, 4096)]
)
def test_candidates_are_few_and_fit(rows: int, shape: tuple[int, int]) -> None:
    n, k = shape
    candidates = sg.candidate_configs(rows, n, k)
    assert 1 <= len(set(candidates)) == len(candidates) <= 4
    for c in candidates:
        assert c.block_k * c.split_k <= k
        assert c.split_k == 1 or c.split_k * sg.MAX_ROWS * n <= sg.SCRATCH_FLOATS
        assert c.kernel != "fma" or c.block_n >= 2 * c.num_warps, "gate and up take them too"


def test_the_rule_for_few_rows_names_what_fits() -> None:
    for (name, n, k), measured in few_rows_rule._MEASURED.items():
        ends = [most for most, _ in measured]
        assert ends == sorted(ends) and ends[-1] == sg.MAX_ROWS, "some choice for every number of rows"
        for rows in range(2, sg.MAX_ROWS + 1):
            config, without_tma = (few_rows_rule.choice(name, rows, n, k, 2, tma, fused=True) for tma in (True, False))
            assert config == next(choice for most, choice in measured if rows <= most)
            if isinstance(config, GemmConfig):
                assert without_tma == config
                assert config.split_k * config.block_k <= k
                assert config.split_k == 1 or config.split_k * sg.MAX_ROWS * n <= sg.SCRATCH_FLOATS
                assert name != "gate_up" or config.kernel != "fma" or config.block_n >= 2 * config.num_warps
            elif config is not None:
                assert without_tma is None
                assert config.splits == 1 or name in ("o", "down"), "parts are for sums and norms"
                assert config.split(1) in mid_gemm_rule.VARIANTS + mid_gemm_rule.GATED_VARIANTS, "compiled anyway"


def test_the_rule_for_few_rows_and_other_shapes() -> None:
    """Our kernels where a weight has at most 16 MiB, but gate and up with norm and activation for 4 rows at most."""
    small, large = (1024, 8192), (1025, 8192)
    for name, shape, item_size, fused, most in (
        ("qkv", small, 2, True, 16), ("qkv", large, 2, True, 1), ("qkv", small, 4, True, 1), ("o", small, 2, False, 16),
        ("gate_up", small, 2, True, 4), ("gate_up", small, 2, False, 16), ("gate_up", large, 2, False, 1),
    ):  # fmt: skip
        by_rows = [few_rows_rule.choice(name, rows, *shape, item_size, True, fused) for rows in range(1, 17)]
        assert all(by_rows[:most]) and not any(by_rows[most:]), (name, shape, item_size, fused)
    assert few_rows_rule.choice("qkv", 8, 4096, 1024, 4, True, False) == sg.candidate_configs(8, 4096, 1024)[0], (
        "what was timed, was in bfloat16"
    )


@pytest.mark.parametrize(
    ("shape_x", "shape_w", "message"),
    [((17, 64), (8, 64), "1 to 16 rows"), ((1, 64), (8, 72), "does not fit"), ((1, 60), (8, 60), "multiple of 8")],
)
def test_bad_shapes_are_refused(shape_x: tuple[int, int], shape_w: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sg.linear(torch.zeros(shape_x), torch.zeros(shape_w))


def test_gate_and_up_need_two_weight_rows_for_each_warp() -> None:
    with pytest.raises(ValueError, match="gate and up need two"):
        sg.norm_linear_silu_mul(
            torch.zeros(1, 64), torch.ones(64), EPS, torch.zeros(16, 64), config=GemmConfig("fma", 4, 256, 1)
        )


def test_strided_input_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        sg.linear(torch.zeros(64, 2).T, torch.zeros(8, 64))
