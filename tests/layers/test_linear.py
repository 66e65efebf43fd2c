"""Linear layers: shares of any width, biases, and what a layer does with choices that it cannot take."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels import select_kernels
from nanovllm.kernels.gemm import decode, dispatch, skinny
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.pointwise.norm import Norm
from nanovllm.layers.context import LayerContext
from nanovllm.layers.heads import HeadSplit
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.vocab import VocabParallelEmbedding
from nanovllm.layers.weights import WeightedModule

CPU, FLOAT, WIDE = torch.device("cpu"), torch.float32, torch.float64
KERNELS = select_kernels("cpu")
HALVES = GemmConfig("split", split_k=2)
SKINNY = GemmConfig("fma", 8, block_k=256, stages=1)


def context(rank: int = 0, size: int = 1, dtype: torch.dtype = FLOAT, exact_bits: str | None = None) -> LayerContext:
    group: Any = SimpleNamespace(rank=rank, size=size, width_multiple=1, exact_bits=exact_bits)
    return LayerContext(group, KERNELS, dtype, CPU)


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
        total += second(first.forward_silu_mul(x, KERNELS))
    torch.testing.assert_close(total, want)


def test_a_kernel_for_few_rows_computes_the_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each of several ranks, where the norm before it is another kernel."""
    chosen: list[GemmConfig] = []

    def multiply(x: torch.Tensor, weight: torch.Tensor, config: GemmConfig, *, gated: bool) -> torch.Tensor:
        chosen.append(config)
        return skinny.linear_reference(x, weight, gated=gated)

    monkeypatch.setattr(skinny, "linear", multiply)
    layer = MergedColumnParallelLinear(context(1, 2), 16, {"gate_proj": 24, "up_proj": 24})
    layer.weight.normal_()
    layer.use({1: SKINNY})
    x = torch.randn(2, 16)
    alone = [layer.forward_silu_mul(row, KERNELS) for row in x.split(1)]
    assert chosen == [SKINNY] * 2
    torch.testing.assert_close(torch.cat(alone), layer.forward_silu_mul(x, KERNELS))
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
    torch.testing.assert_close(layer(x), F.linear(x, weight))


def test_bias_is_added_once_to_a_sum_in_parts() -> None:
    layer = RowParallelLinear(context(), 16, 24, bias=True)
    tensors = {"o.weight": torch.randn(24, 16), "o.bias": torch.randn(24)}
    load(layer, "o", tensors)
    layer.use({3: HALVES})
    x, residual = torch.randn(3, 16), torch.randn(3, 24)
    want = F.linear(x, tensors["o.weight"], tensors["o.bias"])
    parts = layer(x)
    assert parts.shape == (2, 3, 24) and parts.dtype == torch.float32
    torch.testing.assert_close(parts.sum(0), want)
    torch.testing.assert_close(layer.add_to(residual.clone(), x), residual + want)


@pytest.mark.parametrize("bias", [False, True])
def test_what_was_chosen_multiplies_what_is_added_to_the_residual(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    """Also where it cannot add for itself, and where the layer has a bias."""
    done: list[str] = []

    def by_halves(x: torch.Tensor, weight: torch.Tensor, config: GemmConfig) -> torch.Tensor:
        done.append(config.kernel)
        return decode.split_linear_reference(x, weight, config.split_k)

    def fused(x: torch.Tensor, weight: torch.Tensor, config: GemmConfig, *, residual: torch.Tensor) -> torch.Tensor:
        done.append(config.kernel)
        return skinny.linear_reference(x, weight, residual=residual)

    monkeypatch.setitem(dispatch._BY_KERNEL, "split", by_halves)
    monkeypatch.setattr(skinny, "linear", fused)
    layer = RowParallelLinear(context(), 16, 24, bias=bias)
    load(layer, "o", {"o.weight": torch.randn(24, 16)} | ({"o.bias": torch.randn(24)} if bias else {}))
    layer.use({1: SKINNY, 3: HALVES})
    for rows in (1, 2, 3):
        x, residual = torch.randn(rows, 16), torch.randn(rows, 24)
        want = residual + F.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(layer.add_to(residual, x), want)
        torch.testing.assert_close(residual, want)
    assert done == ["fma", "split"]


def test_a_layer_with_bias_refuses_to_fuse() -> None:
    outputs = {"gate_proj": 16, "up_proj": 16}
    plain, biased = (MergedColumnParallelLinear(context(), 24, outputs, bias=bias) for bias in (False, True))
    for layer in (plain, biased):
        layer.use({1: SKINNY, 32: HALVES})
        assert layer.pdl_rows == {1}
    assert plain.fuses(1) == SKINNY and plain.fuses(32) is None and plain.fuses(2) is None
    assert biased.fuses(1) is None
    load(biased, "m", {f"m.{n}.{kind}": torch.randn(16, *[24] * (kind == "weight"))
                       for n in outputs for kind in ("weight", "bias")})  # fmt: skip
    biased.use({})
    x, gain = torch.randn(2, 24), torch.rand(24)
    gate, up = F.linear(F.rms_norm(x, (24,), gain, 1e-6), biased.weight, biased.bias).chunk(2, -1)
    torch.testing.assert_close(biased.forward_normed_silu_mul(x, Norm(gain, 1e-6), KERNELS), F.silu(gate) * up)


def test_a_consumer_that_takes_no_parts_gets_none() -> None:
    layer = RowParallelLinear(context(), 16, 24)
    layer.takes_parts = False
    layer.use({2: HALVES, 1: SKINNY})
    assert layer(torch.randn(2, 16)).shape == (2, 24) and layer.fuses(1) == SKINNY


def test_choices_are_taken_back() -> None:
    layer = RowParallelLinear(context(), 16, 24)
    held = layer.pdl_rows
    layer.use({1: SKINNY})
    assert held == {1}, "the norm behind this layer holds it"
    layer.use({})
    assert held == set() and layer(torch.randn(1, 16)).shape == (1, 24)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_rows_of_logits_begin_alike_on_any_number_of_ranks(size: int) -> None:
    """Kernels are compiled by whether a stride is a multiple of 16, and then add up a row in one order or another."""
    head = VocabParallelEmbedding(context(size=size, exact_bits="tp"), 32008, 8)
    assert head.logits(torch.zeros(2, 8)).shape[1] * size % 16 == 0
