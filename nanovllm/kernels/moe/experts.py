"""The experts' GEMMs: rows that chose one expert, side by side, times that expert's weights; in FP8 by the products of
fp8/reference.py.

Up to a few hundred rows the time is that of reading the weights of every expert that a row chose, once. So a tile holds
all rows of an expert if it can, and small tiles of rows put the weights on the left of the product, where a Hopper
matrix instruction has 64 rows at least.

A row's sum over K goes in an order that the tiles' sizes alone decide, and a token's k results are stored side by side
and added in the order of their scores: nothing depends on the token's neighbours, and there are no atomics.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options, prefetch_tile, prefetched_columns, supports_tma
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.gemm import add_group, times_rows
from nanovllm.kernels.fp8.operands import FP8Weight
from nanovllm.kernels.fp8.quantize import quantize_rows
from nanovllm.kernels.fp8.reference import GROUP, linear_reference, quantize_rows_reference
from nanovllm.kernels.gemm.decode import multiply, silu_mul
from nanovllm.kernels.moe.routing import Routing
from nanovllm.kernels.plan.config import GroupedConfig

PREFETCH_BYTES = 32 << 10
"""Of a program's weights, brought into L2 while the kernel before still runs."""


@dataclass(frozen=True)
class ExpertActivation:
    """silu(gate) * up; with a limit gate and up are clamped, gate from above alone, and the result is
    gate * sigmoid(alpha * gate) * (up + 1) (gpt-oss, arXiv 2508.10925)."""

    limit: float | None = None
    alpha: float = 1.0


@triton.jit
def _weight_tile(
    W, first_row, end_row, col, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """[ROWS, COLUMNS] of the weights [all rows, k] by a descriptor or a pointer. Zero past column k, and anything past
    end_row, the expert's last row."""
    if TMA:
        return W.load([first_row, col])
    else:
        row = tl.minimum(first_row + tl.arange(0, ROWS), end_row - 1).to(tl.int64)
        cols = col + tl.arange(0, COLUMNS)
        at = W + row[:, None] * k + cols[None, :]
        if EVEN:
            return tl.load(at)
        else:
            return tl.load(at, mask=(cols < k)[None, :], other=0.0)


@triton.jit
def _activated(gate, up, dtype: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """float32 sums -> float32; sums and activation are rounded as by themselves."""
    if LIMIT is None:
        return silu_mul(gate, up, dtype)
    else:
        gate = tl.minimum(gate.to(dtype).to(tl.float32), LIMIT)
        up = tl.minimum(tl.maximum(up.to(dtype).to(tl.float32), -LIMIT), LIMIT)
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)


@triton.jit
def _add_bias(acc, BIAS, first, col, end, X_LEFT: tl.constexpr):
    """acc plus BIAS[first + col] along its columns (its rows where not X_LEFT)."""
    bias = tl.load(BIAS + first + col, mask=col < end, other=0.0).to(tl.float32)
    return acc + (bias[None, :] if X_LEFT else bias[:, None])


@triton.jit
def _tile_of_rows(TILES, GATED: tl.constexpr, PDL: tl.constexpr):
    """(expert, first position, end) of the program's rows; expert < 0: it has none. GATED: routing has ended."""
    if PDL and GATED:
        # Not before: what routing wrote may then be read by the next kernel as soon as that starts.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = TILES + 3 * tl.program_id(1)  # past L1, which may still hold what was there before routing wrote it
    expert, first = tl.load(tile, cache_modifier=".cg"), tl.load(tile + 1, cache_modifier=".cg")
    return expert, first, tl.load(tile + 2, cache_modifier=".cg")


@triton.jit
def _enter_tile(
    w_ptr, first_row, end_row, k, ORDER, first_position, end,
    GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Positions [BLOCK_M] of the tile, whether they are live, and their choices. After it X may be read."""
    if PDL and not GATED:
        # Routing ended before the kernel before this one let it start, and weights are always there.
        prefetch_tile(w_ptr, first_row, end_row, 0, k, BLOCK_N, PREFETCH)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    position = first_position + tl.arange(0, BLOCK_M)
    live = position < end
    return position, live, tl.load(ORDER + position, mask=live, other=0)


@triton.jit
def _store_by_choice(
    acc, OUT, WEIGHTS, position, live, choice, col, tokens, n_out,
    TOP_K: tl.constexpr, GATED: tl.constexpr, X_LEFT: tl.constexpr,
):  # fmt: skip
    """acc, transposed where not X_LEFT, into columns `col` of OUT: GATED by position, else by slot, times WEIGHTS."""
    if not X_LEFT:
        acc = tl.trans(acc)
    row = position
    if not GATED:
        acc *= tl.load(WEIGHTS + choice, mask=live, other=0.0)[:, None]
        row = choice % TOP_K * tokens + choice // TOP_K
    at = OUT + row.to(tl.int64)[:, None] * n_out + col[None, :]
    tl.store(at, acc.to(OUT.dtype.element_ty), mask=live[:, None] & (col < n_out)[None, :])


@triton.jit(do_not_specialize=["tokens", "scale_stride"])
def _grouped_gemm_kernel(
    X, X_SCALE, W, w_ptr, SCALE, BIAS, TILES, ORDER, WEIGHTS, OUT, tokens, scale_stride, n_out, k, groups, scale_rows,
    TOP_K: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ROWS_EACH: tl.constexpr,
    IN_BLOCKS: tl.constexpr, X_LEFT: tl.constexpr, EVEN_K: tl.constexpr, PREFETCH: tl.constexpr, TMA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of columns, tiles of rows). GATED: rows of X are tokens; OUT [choices by expert, n_out] gets the
    activation of columns c and n_out + c. Else rows of X are choices by expert, and OUT [TOP_K, tokens, n_out] their
    results times WEIGHTS, by slot. W: a descriptor or w_ptr, [experts * (2 n_out or n_out), k]. Where there are scales
    X and W are e4m3, and steps of 128: X_SCALE [groups of k, scale_stride], SCALE [experts, scale_rows, groups]."""
    expert, first_position, end = _tile_of_rows(TILES, GATED, PDL)
    if expert < 0:
        return
    first_col = tl.program_id(0) * BLOCK_N
    base = expert * (n_out * 2 if GATED else n_out)
    first_row, end_row = base + first_col, base + n_out
    position, live, choice = _enter_tile(
        w_ptr, first_row, end_row, k, ORDER, first_position, end, GATED, BLOCK_M, BLOCK_N, PREFETCH, PDL
    )
    row = choice // TOP_K if GATED else position
    x_ptrs = X + row.to(tl.int64)[:, None] * k
    scale_ptrs, of_expert = X_SCALE, SCALE
    if X_SCALE is not None:
        scale_ptrs, of_expert = X_SCALE + row, SCALE + expert * scale_rows * groups

    acc = tl.zeros([BLOCK_M, BLOCK_N] if X_LEFT else [BLOCK_N, BLOCK_M], dtype=tl.float32)
    if GATED:
        up = tl.zeros(acc.shape, dtype=tl.float32)
    for step in tl.range(0, tl.cdiv(k, BLOCK_K), num_stages=STAGES):
        begin = step * BLOCK_K
        cols = begin + tl.arange(0, BLOCK_K)
        mask = live[:, None] if EVEN_K else live[:, None] & (cols < k)[None, :]
        x = tl.load(x_ptrs + cols[None, :], mask=mask, other=0.0)
        x_scale = None
        if X_SCALE is not None:
            x_scale = tl.load(scale_ptrs + step * scale_stride, mask=live, other=0.0)
        w = _weight_tile(W, first_row, end_row, begin, k, BLOCK_N, BLOCK_K, EVEN_K, TMA)
        acc = _add_step(acc, x, w, x_scale, of_expert, first_col, n_out, step, groups, BLOCK_N, ROWS_EACH, IN_BLOCKS,
                        X_LEFT)  # fmt: skip
        if GATED:
            w = _weight_tile(W, n_out + first_row, n_out + end_row, begin, k, BLOCK_N, BLOCK_K, EVEN_K, TMA)
            up = _add_step(up, x, w, x_scale, of_expert, n_out + first_col, 2 * n_out, step, groups, BLOCK_N, ROWS_EACH,
                           IN_BLOCKS, X_LEFT)  # fmt: skip

    if X_SCALE is None:  # before or after the sums are finished: whichever is scheduled better
        col = first_col + tl.arange(0, BLOCK_N)
    acc = _finish(acc, of_expert, BIAS, base, first_col, n_out, first_col, n_out, BLOCK_N, IN_BLOCKS, X_LEFT)
    if GATED:
        up = _finish(up, of_expert, BIAS, base + n_out, n_out + first_col, 2 * n_out, first_col, n_out, BLOCK_N,
                     IN_BLOCKS, X_LEFT)  # fmt: skip
        acc = _activated(acc, up, OUT.dtype.element_ty, ALPHA, LIMIT)
    if X_SCALE is not None:
        col = first_col + tl.arange(0, BLOCK_N)
    _store_by_choice(acc, OUT, WEIGHTS, position, live, choice, col, tokens, n_out, TOP_K, GATED, X_LEFT)


@triton.jit
def _add_step(
    acc, x, w, x_scale, SCALE, first, end, step, groups,
    BLOCK_N: tl.constexpr, ROWS_EACH: tl.constexpr, IN_BLOCKS: tl.constexpr, X_LEFT: tl.constexpr,
):  # fmt: skip
    """acc plus the products of a step, times both scales where there are any; see add_group."""
    if x_scale is None:
        return multiply(x, w, acc, X_LEFT)
    else:
        return add_group(acc, x, w, x_scale, SCALE, first, end, step, groups, BLOCK_N, ROWS_EACH, IN_BLOCKS, X_LEFT)


@triton.jit
def _finish(
    acc, SCALE, BIAS, base, first, end, first_col, n_out, BLOCK_N: tl.constexpr, IN_BLOCKS: tl.constexpr,
    X_LEFT: tl.constexpr,
):  # fmt: skip
    """acc times the scales of the weights' rows, where there are such, plus BIAS at base + its columns."""
    if SCALE is not None and not IN_BLOCKS:
        acc = times_rows(acc, SCALE, first, end, BLOCK_N, X_LEFT)
    if BIAS is not None:
        acc = _add_bias(acc, BIAS, base, first_col + tl.arange(0, BLOCK_N), n_out, X_LEFT)
    return acc


def expert_gate_up(
    x: Tensor, weight: Tensor | FP8Weight, routing: Routing, config: GroupedConfig, activation: ExpertActivation,
    bias: Tensor | None = None, *, tma: bool | None = None,
) -> Tensor:  # fmt: skip
    """x [T, H], weight [E, 2 I, H] (gates first), bias [E, 2 I] -> the activation of every choice's gate and up, [T *
    k, I] in routing's order. Tma: weights come by descriptors; None: where the device can."""
    out = x.new_empty(routing.order.shape[0], values_of(weight).shape[1] // 2)
    switches = {"GATED": True, "ALPHA": activation.alpha, "LIMIT": activation.limit}
    return _launch(x, weight, routing, config, bias, out, tma, switches)


def expert_down(
    h: Tensor, weight: Tensor | FP8Weight, routing: Routing, config: GroupedConfig, out_dtype: torch.dtype,
    bias: Tensor | None = None, *, tma: bool | None = None,
) -> Tensor:  # fmt: skip
    """h [T * k, I] in routing's order, weight [E, H, I], bias [E, H] -> out_dtype [k, T, H], every choice's result
    times its weight, by slot: a token's result is the sum over k. Tma: as in expert_gate_up."""
    out = h.new_empty(routing.top_k, routing.num_tokens, values_of(weight).shape[1], dtype=out_dtype)
    return _launch(h, weight, routing, config, bias, out, tma, {"GATED": False, "ALPHA": 1.0, "LIMIT": None})


def values_of(weight: Tensor | FP8Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.values


def _launch(
    x: Tensor, weight: Tensor | FP8Weight, routing: Routing, config: GroupedConfig, bias: Tensor | None, out: Tensor,
    tma: bool | None, switches: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Fills and returns `out`. Weights in FP8 come by descriptors wherever K allows."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    values, n_out = values_of(weight), out.shape[-1]
    k, block_k = values.shape[2], config.block_k
    x_scale = scale = stride = scale_rows = groups = None
    if isinstance(weight, FP8Weight):
        x, x_scale = quantize_rows(x)
        scale, stride, (_, scale_rows, groups) = weight.scale, x_scale.stride(1), weight.scale.shape
        switches |= {"ROWS_EACH": weight.rows_each, "IN_BLOCKS": weight.in_blocks}
        tma, block_k = True, GROUP
    else:
        switches |= {"ROWS_EACH": 1, "IN_BLOCKS": False}
        tma = supports_tma(x.device) if tma is None else tma
    if x.shape[1] != k or x.dtype != values.dtype or not (x.is_contiguous() and values.is_contiguous()):
        found = f"{x.dtype} {list(x.shape)}, {values.dtype} {list(values.shape)}"
        raise ValueError(f"contiguous rows and weights of one dtype and width expected, got {found}")
    tma = tma and k * x.element_size() % 16 == 0
    rows = values.view(-1, k)
    _grouped_gemm_kernel[(triton.cdiv(n_out, config.block_n), routing.tiles.shape[0])](
        x, x_scale, TensorDescriptor(rows, list(rows.shape), [k, 1], [config.block_n, block_k]) if tma else rows, rows,
        scale, bias, routing.tiles, routing.order, routing.weights, out, routing.num_tokens, stride, n_out, k, groups,
        scale_rows, TOP_K=routing.top_k, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=block_k,
        STAGES=config.stages, X_LEFT=config.x_left, EVEN_K=k % block_k == 0, TMA=tma,
        PREFETCH=prefetched_columns(PREFETCH_BYTES, config.block_n, x.element_size(), k), num_warps=config.num_warps,
        **switches, **pdl_options(x.device),
    )  # fmt: skip
    return out


def experts_of(routing: Routing) -> list[tuple[int, int, int]]:
    """(expert, first position, end) of each expert that has rows."""
    found: dict[int, tuple[int, int]] = {}
    for expert, first, end in routing.tiles.tolist():
        if expert >= 0:
            found.setdefault(expert, (first, end))
    return [(expert, first, end) for expert, (first, end) in found.items()]


def _products(x: Tensor, weight: Tensor | FP8Weight, expert: int) -> Tensor:
    """x times the weights of one expert, in float32."""
    if isinstance(weight, Tensor):
        return x.float() @ weight[expert].float().T
    rounded, values, scale = quantize_rows_reference(x), weight.values[expert], weight.scale[expert]
    return linear_reference(*rounded, values, scale, weight.rows_each)


def expert_gate_up_reference(
    x: Tensor, weight: Tensor | FP8Weight, routing: Routing, config: GroupedConfig, activation: ExpertActivation,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Plain twin of `expert_gate_up`."""
    out = x.new_empty(routing.order.shape[0], values_of(weight).shape[1] // 2)
    tokens = routing.order.long() // routing.top_k
    for expert, first, end in experts_of(routing):
        y = _products(x[tokens[first:end]], weight, expert)
        y = (y if bias is None else y + bias[expert].float()).to(x.dtype)
        gate, up = y.chunk(2, dim=-1)
        if activation.limit is None:
            out[first:end] = torch.nn.functional.silu(gate) * up
        else:
            gate = gate.float().clamp(max=activation.limit)
            up = up.float().clamp(-activation.limit, activation.limit)
            out[first:end] = (gate * torch.sigmoid(activation.alpha * gate) * (up + 1)).to(x.dtype)
    return out


def expert_down_reference(
    h: Tensor, weight: Tensor | FP8Weight, routing: Routing, config: GroupedConfig, out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Plain twin of `expert_down`."""
    shape = (routing.num_tokens, routing.top_k, values_of(weight).shape[1])
    out = h.new_empty(shape, dtype=out_dtype).flatten(0, 1)
    weights = routing.weights.flatten()
    for expert, first, end in experts_of(routing):
        y = _products(h[first:end], weight, expert)
        y = y if bias is None else y + bias[expert].float()
        choices = routing.order[first:end].long()
        out[choices] = (y * weights[choices, None]).to(out_dtype)
    return out.unflatten(0, (routing.num_tokens, routing.top_k)).transpose(0, 1).contiguous()
