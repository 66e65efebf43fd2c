"""The experts' GEMMs: rows that chose one expert, side by side, times that expert's weights; in FP8 by the products of
fp8/reference.py.

Up to a few hundred rows the time is that of reading the weights of every expert that a row chose, once. So a tile holds
all rows of an expert if it can, and small tiles of rows put the weights on the left of the product, where a Hopper
matrix instruction has 64 rows at least.

A row's sum over K goes in an order that the tiles' sizes alone decide, and a token's k results are stored side by side
and added in the order of their scores: nothing depends on the token's neighbours, and there are no atomics.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options, prefetched_columns
from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight, values_of
from nanovllm.kernels.fp8.quantize import empty_rows_for, quantize_rows
from nanovllm.kernels.fp8.reference import GROUP, linear_reference, quantize_rows_reference
from nanovllm.kernels.gemm import tile
from nanovllm.kernels.gemm.packed import PackedWeight
from nanovllm.kernels.moe import packed
from nanovllm.kernels.moe.routing import Routing
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.plan.device import Device

PREFETCH_BYTES = 32 << 10
"""Bytes of a program's weights to bring into L2 while the kernel before still runs."""


ExpertWeight = Tensor | FP8Weight | PackedWeight


@dataclass(frozen=True)
class ExpertActivation:
    """silu(gate) * up; with a limit gate and up are clamped, gate from above alone, and the result is
    gate * sigmoid(alpha * gate) * (up + 1) (gpt-oss, arXiv 2508.10925). Without alpha gelu_tanh(gate) * up. Not gated:
    relu(up) ** 2."""

    limit: float | None = None
    alpha: float | None = 1.0
    gated: bool = True


def expert_gate_up(
    x: Tensor, weight: ExpertWeight, routing: Routing, config: GemmConfig, activation: ExpertActivation,
    bias: Tensor | None = None, delta: Tensor | None = None, rounds: bool = False,
) -> Tensor | FP8Rows:  # fmt: skip
    """x [T, H], weight [E, 2 I, H] (gates first), bias [E, 2 I] -> the activation of every choice's gate and up, [T *
    k, I] in routing's order. Not gated: weight [E, I, H], bias [E, I]. delta float32 [T * k, rows of a weight], in
    routing's order: added to the products in float32. rounds: the result is rounded to e4m3, by an FP8Weight and tiles
    of 128 columns."""
    shape = routing.order.shape[0], weight.shape[1] // (1 + activation.gated)
    if rounds:
        assert isinstance(weight, FP8Weight) and config.block_n == GROUP, config
        rows = empty_rows_for(*shape, x.dtype, x.device)
        _launch(x, weight, routing, config, bias, delta, rows.values, True, activation, rows)
        return rows
    return _launch(x, weight, routing, config, bias, delta, x.new_empty(shape), True, activation)


def expert_down(
    h: Tensor | FP8Rows, weight: ExpertWeight, routing: Routing, config: GemmConfig, out_dtype: torch.dtype,
    bias: Tensor | None = None, delta: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """h [T * k, I] in routing's order, weight [E, H, I], bias [E, H] -> out_dtype [k, T, H], every choice's result
    times its weight, by slot: a token's result is the sum over k. delta: see expert_gate_up."""
    shape = routing.top_k, routing.num_tokens, weight.shape[1]
    out = torch.empty(shape, dtype=out_dtype, device=routing.order.device)
    return _launch(h, weight, routing, config, bias, delta, out, False, ExpertActivation())


def _launch(
    x: Tensor | FP8Rows, weight: ExpertWeight, routing: Routing, config: GemmConfig, bias: Tensor | None,
    delta: Tensor | None, out: Tensor, gated: bool, activation: ExpertActivation, rounded_to: FP8Rows | None = None,
) -> Tensor:  # fmt: skip
    """Fills and returns `out`, with rounded_to its values. Weights come by descriptors where the device can and K
    allows, in FP8 everywhere."""
    if isinstance(weight, PackedWeight):
        assert isinstance(x, Tensor)
        limits = (activation.alpha, activation.limit)
        return packed.multiply(x, weight, routing, config, bias, delta, out, gated, limits)
    values, x_scale, device = values_of(weight), None, out.device
    k, span, tma = values.shape[2], config.block_k, Device.of(device).has_tma
    if isinstance(weight, FP8Weight):
        x, x_scale, _ = x if isinstance(x, FP8Rows) else quantize_rows(x)
        tma, span = True, GROUP
    assert isinstance(x, Tensor)
    if x.shape[1] != k or x.dtype != values.dtype or not (x.is_contiguous() and values.is_contiguous()):
        found = f"{x.dtype} {list(x.shape)}, {values.dtype} {list(values.shape)}"
        raise ValueError(f"contiguous rows and weights of one dtype and width expected, got {found}")
    tma = tma and k * x.element_size() % 16 == 0
    x_left = config.block_m > 32 or config.block_n < 64  # a weight tile on the left has 64 rows at least
    tile.launch(
        (triton.cdiv(out.shape[-1], config.block_n), routing.tiles.shape[0]), x, x_scale, weight, config, out,
        routing.num_tokens, span=span, bias=bias, delta=delta, routing=(routing.tiles, routing.order, routing.weights),
        top_k=routing.top_k, activation=(activation.alpha, activation.limit), tma=tma, GATED=gated,
        X_LEFT=x_left, PARTS=False,
        PREFETCH=prefetched_columns(PREFETCH_BYTES, config.block_n, x.element_size(), k), rounded_to=rounded_to,
        **pdl_options(device),
    )  # fmt: skip
    return out


def experts_of(routing: Routing) -> list[tuple[int, int, int]]:
    """(expert, first position, end) of each expert that has rows."""
    found: dict[int, tuple[int, int]] = {}
    for expert, first, end in routing.tiles.tolist():
        if expert >= 0:
            found.setdefault(expert, (first, end))
    return [(expert, first, end) for expert, (first, end) in found.items()]


def _products(x: Tensor, weight: ExpertWeight, expert: int, delta: Tensor | None) -> Tensor:
    """x times the weights of one expert, in float32, plus delta."""
    if isinstance(weight, PackedWeight):
        y = x.float() @ weight.widened(expert).T
    elif isinstance(weight, Tensor):
        y = x.float() @ weight[expert].float().T
    else:
        own = weight._replace(values=weight.values[expert], scale=weight.scale[expert])
        y = linear_reference(quantize_rows_reference(x), own)
    return y if delta is None else y + delta


def expert_gate_up_reference(
    x: Tensor, weight: ExpertWeight, routing: Routing, config: GemmConfig, activation: ExpertActivation,
    bias: Tensor | None = None, delta: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Plain twin of `expert_gate_up`."""
    out = x.new_empty(routing.order.shape[0], weight.shape[1] // (1 + activation.gated))
    tokens = routing.order.long() // routing.top_k
    for expert, first, end in experts_of(routing):
        y = _products(x[tokens[first:end]], weight, expert, None if delta is None else delta[first:end])
        y = (y if bias is None else y + bias[expert].float()).to(x.dtype)
        if not activation.gated:
            out[first:end] = y.relu().square()
            continue
        gate, up = y.chunk(2, dim=-1)
        if activation.alpha is None:
            out[first:end] = torch.nn.functional.gelu(gate, approximate="tanh") * up
        elif activation.limit is None:
            out[first:end] = torch.nn.functional.silu(gate) * up
        else:
            gate = gate.float().clamp(max=activation.limit)
            up = up.float().clamp(-activation.limit, activation.limit)
            out[first:end] = (gate * torch.sigmoid(activation.alpha * gate) * (up + 1)).to(x.dtype)
    return out


def expert_down_reference(
    h: Tensor, weight: ExpertWeight, routing: Routing, config: GemmConfig, out_dtype: torch.dtype,
    bias: Tensor | None = None, delta: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Plain twin of `expert_down`."""
    shape = (routing.num_tokens, routing.top_k, weight.shape[1])
    out = h.new_empty(shape, dtype=out_dtype).flatten(0, 1)
    weights = routing.weights.flatten()
    for expert, first, end in experts_of(routing):
        y = _products(h[first:end], weight, expert, None if delta is None else delta[first:end])
        y = y if bias is None else y + bias[expert].float()
        choices = routing.order[first:end].long()
        out[choices] = (y * weights[choices, None]).to(out_dtype)
    return out.unflatten(0, (routing.num_tokens, routing.top_k)).transpose(0, 1).contiguous()
