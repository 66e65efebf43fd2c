"""Linear layers: shares of any width, biases, and what a layer does with choices that it cannot take."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels import select_kernels
from nanovllm.kernels.gemm import dense, fma
from nanovllm.kernels.moe.linear import Routed
from nanovllm.kernels.moe.routing import TopK
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.plan.plan import Launch, Planner, Rules
from nanovllm.kernels.plan.product import Around, Choice, Product
from nanovllm.layers.context import LayerContext
from nanovllm.layers.heads import HeadSplit
from nanovllm.layers.linear import (
    MergedColumnParallelLinear,
    Operation,
    ParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanovllm.layers.step import OUTSIDE, Call
from nanovllm.layers.vocab import VocabParallelEmbedding
from nanovllm.layers.weights import WeightedModule

CPU, FLOAT, WIDE = torch.device("cpu"), torch.float32, torch.float64
KERNELS = select_kernels("cpu")
GATED, ADDED = Around("rms", "gate"), Around(after="residual", adds_parts=True)
HALVES = GemmConfig("split", split_k=2)
SKINNY = GemmConfig("fma", 8, block_k=256, stages=1)


def context(rank: int = 0, size: int = 1, dtype: torch.dtype = FLOAT, exact_bits: str | None = None) -> LayerContext:
    group: Any = SimpleNamespace(rank=rank, size=size, width_multiple=1, exact_bits=exact_bits)
    return LayerContext(group, KERNELS, dtype, CPU, planner=Planner(Rules(world=size)))


def take(context: LayerContext, layer: ParallelLinear, choices: dict[int, GemmConfig]) -> None:
    """Has the layer multiply so by numbers of rows."""
    world = context.group.size
    context.planner.adopt(Rules(world=world, tried={layer.product.gemm(world): choices}))


def launched(layer: ParallelLinear, rows: int) -> Launch:
    """Kernel that runs in a layer whose stream is complete."""
    return layer.launch(rows, Call(None, residual=torch.empty(0)))


def silu_mul(layer: ParallelLinear, x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, by what the layer computes of it and by a kernel of its own."""
    y = layer(x, OUTSIDE)
    return y if layer.launch(len(x), OUTSIDE).gate else KERNELS.activation(y, "silu", True)  # type: ignore[return-value]


def load(layer: WeightedModule, prefix: str, tensors: dict[str, torch.Tensor]) -> None:
    names = set()
    for weight in layer.checkpoint_weights(prefix):
        weight.load(tensors[weight.name])
        names.add(weight.name)
    assert names == set(tensors)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [8, 11, 16, 44, 1100])
@pytest.mark.parametrize("bias", [False, True])
def test_the_ranks_of_an_mlp_make_the_whole(width: int, size: int, bias: bool) -> None:
    hidden, x = 24, torch.randn(5, 24, dtype=WIDE)
    tensors = {f"m.{name}.weight": torch.randn(width, hidden, dtype=WIDE) for name in ("gate_proj", "up_proj")}
    down = {"m.down_proj.weight": torch.randn(hidden, width, dtype=WIDE)}
    if bias:
        tensors |= {f"m.{name}.bias": torch.randn(width, dtype=WIDE) for name in ("gate_proj", "up_proj")}
        down |= {"m.down_proj.bias": torch.randn(hidden, dtype=WIDE)}
    gate, up = (F.linear(x, tensors[f"m.{n}.weight"], tensors.get(f"m.{n}.bias")) for n in ("gate_proj", "up_proj"))
    want = F.linear(F.silu(gate) * up, down["m.down_proj.weight"], down.get("m.down_proj.bias"))
    total = torch.zeros(5, hidden, dtype=WIDE)
    for rank in range(size):
        outputs = {"gate_proj": width, "up_proj": width}
        first = MergedColumnParallelLinear(context(rank, size, WIDE), hidden, outputs, bias=bias)
        second = RowParallelLinear(context(rank, size, WIDE), width, hidden, bias=bias)
        assert second.weight.shape[1] % 8 == 0, "what our kernels ask for"
        load(first, "m", tensors)
        load(second, "m.down_proj", down)
        total += second(silu_mul(first, x), OUTSIDE)
    torch.testing.assert_close(total, want)


def test_a_kernel_for_few_rows_computes_the_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each of several ranks, where the norm before it is another kernel."""
    chosen: list[GemmConfig] = []

    def multiply(x: torch.Tensor, weight: torch.Tensor, config: GemmConfig, *, gated: bool, **_: None) -> torch.Tensor:
        chosen.append(config)
        return fma.linear_reference(x, weight, gated=gated)

    monkeypatch.setattr(fma, "linear", multiply)
    ranks = context(1, 2)
    layer = MergedColumnParallelLinear(ranks, 16, {"gate_proj": 24, "up_proj": 24}, around=GATED)
    layer.weight.normal_()
    take(ranks, layer, {1: SKINNY})
    assert not launched(layer, 1).norm, "a sum over the ranks comes between"
    x = torch.randn(2, 16)
    alone = [silu_mul(layer, row) for row in x.split(1)]
    assert chosen == [SKINNY] * 2
    torch.testing.assert_close(torch.cat(alone), silu_mul(layer, x))
    assert len(chosen) == 2, "two rows have no choice"


def test_qkv_bias_is_left_to_the_consumer() -> None:
    heads, dim, x = HeadSplit(4, 2, 1, 2), 8, torch.randn(3, 16)
    layer = QKVParallelLinear(context(), 16, heads, dim, bias=True, precision=None)
    rows = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    tensors = {f"a.{name}.weight": torch.randn(count, 16) for name, count in rows.items()}
    tensors |= {f"a.{name}.bias": torch.randn(count) for name, count in rows.items()}
    load(layer, "a", tensors)
    mine = {"q_proj": slice(16, 32), "k_proj": slice(8, 16), "v_proj": slice(8, 16)}
    bias = torch.cat([tensors[f"a.{name}.bias"][part] for name, part in mine.items()])
    weight = torch.cat([tensors[f"a.{name}.weight"][part] for name, part in mine.items()])
    assert layer.bias is not None and torch.equal(layer.bias, bias)
    torch.testing.assert_close(layer(x, OUTSIDE), F.linear(x, weight))


def test_bias_is_added_once_to_a_sum_in_parts() -> None:
    ranks = context()
    layer = RowParallelLinear(ranks, 16, 24, bias=True, around=ADDED)
    tensors = {"o.weight": torch.randn(24, 16), "o.bias": torch.randn(24)}
    load(layer, "o", tensors)
    take(ranks, layer, {3: HALVES})
    x, residual = torch.randn(3, 16), torch.randn(3, 24)
    want = F.linear(x, tensors["o.weight"], tensors["o.bias"])
    parts = layer(x, OUTSIDE)
    assert parts.shape == (2, 3, 24) and parts.dtype == torch.float32
    torch.testing.assert_close(parts.sum(0), want)
    torch.testing.assert_close(layer(x, Call(None, residual=residual.clone())), residual + want)


@pytest.mark.parametrize("bias", [False, True])
def test_what_was_chosen_multiplies_what_is_added_to_the_residual(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    """Also where it cannot add for itself, and where the layer has a bias."""
    done: list[str] = []

    def by_halves(x: torch.Tensor, weight: torch.Tensor, config: GemmConfig, delta: None) -> torch.Tensor:
        done.append(config.kernel)
        return dense.split_linear_reference(x, weight, config.split_k)

    def fused(
        x: torch.Tensor, weight: torch.Tensor, config: GemmConfig, *, gated: bool, norm: None, residual: torch.Tensor,
        delta: None, bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        done.append(config.kernel)
        return fma.linear_reference(x, weight, residual=residual, bias=bias)

    monkeypatch.setattr(dense, "split_linear", by_halves)
    monkeypatch.setattr(fma, "linear", fused)
    ranks = context()
    layer = RowParallelLinear(ranks, 16, 24, bias=bias, around=ADDED)
    load(layer, "o", {"o.weight": torch.randn(24, 16)} | ({"o.bias": torch.randn(24)} if bias else {}))
    take(ranks, layer, {1: SKINNY, 3: HALVES})
    for rows in (1, 2, 3):
        x, residual = torch.randn(rows, 16), torch.randn(rows, 24)
        want = residual + F.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(layer(x, Call(None, residual=residual)), want)
        torch.testing.assert_close(residual, want)
    assert done == ["fma", "split"]


def test_a_layer_with_bias_takes_nothing_in() -> None:
    outputs = {"gate_proj": 16, "up_proj": 16}
    for bias in (False, True):
        ranks = context()
        layer = MergedColumnParallelLinear(ranks, 24, outputs, bias=bias, around=GATED)
        take(ranks, layer, {1: SKINNY, 32: GemmConfig("tile", 64, 32, 64, 3)})
        inside = [(launched(layer, rows).norm, launched(layer, rows).gate) for rows in (1, 2, 32)]
        assert inside == ([(False, False)] * 3 if bias else [(True, True), (False, False), (False, False)])
        # the tile needs tensor copy engines, which a CPU has not


def test_a_consumer_that_takes_no_parts_gets_none() -> None:
    ranks = context()
    layer = RowParallelLinear(ranks, 16, 24, around=Around())
    take(ranks, layer, {2: HALVES, 1: SKINNY})
    assert layer(torch.randn(2, 16), OUTSIDE).shape == (2, 24) and launched(layer, 1).config == SKINNY
    assert "adds up no parts" in launched(layer, 2).why


def test_choices_are_taken_back() -> None:
    ranks = context()
    layer = RowParallelLinear(ranks, 16, 24)
    take(ranks, layer, {1: SKINNY})
    assert launched(layer, 1).is_early
    ranks.planner.adopt(Rules())
    assert not launched(layer, 1).is_early and layer(torch.randn(1, 16), OUTSIDE).shape == (1, 24)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_rows_of_logits_begin_alike_on_any_number_of_ranks(size: int) -> None:
    """Kernels are compiled by whether a stride is a multiple of 16, and then add up a row in one order or another."""
    head = VocabParallelEmbedding(context(size=size, exact_bits="tp"), 32008, 8)
    assert head.logits(torch.zeros(2, 8)).shape[1] * size % 16 == 0


def test_experts_are_launched_for_tokens_however_many_rows_these_have() -> None:
    """The second product of tiles has a row for each choice."""
    taken: list[Launch] = []
    matrix: Any = SimpleNamespace(multiply=lambda x, launch, call: taken.append(launch) or x)
    product = Product("experts.down", 16, 8, "float32", "float32", Around(), choice=Choice(8, 4, "float32", False))
    down = Operation(context(), product, matrix)
    call = Call(None, routing=Routed(KERNELS, torch.zeros(1, 100, 8), TopK(8, 4)))
    down(torch.zeros(400, 8), call)
    assert taken == [down.launch(100, call)] and down.launch(400, call) != taken[0]
