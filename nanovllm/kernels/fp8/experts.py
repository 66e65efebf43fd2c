"""The experts' GEMMs in FP8; as moe/experts.py, by the products of reference.py."""

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.fp8.gemm_kernel import add_group, times_rows
from nanovllm.kernels.fp8.operands import FP8Weight
from nanovllm.kernels.fp8.quantize import quantize_rows
from nanovllm.kernels.fp8.reference import GROUP, linear_reference, quantize_rows_reference
from nanovllm.kernels.gemm.decode_kernel import silu_mul
from nanovllm.kernels.moe.choice import GroupedConfig
from nanovllm.kernels.moe.experts import PREFETCH_BYTES, enter_tile, experts_of, store_by_choice, tile_of_rows
from nanovllm.kernels.moe.routing import Routing
from nanovllm.kernels.pointwise.activation import silu_mul_reference


@triton.jit(do_not_specialize=["tokens", "scale_stride"])
def _grouped_fp8_kernel(
    X, X_SCALE, W, w_ptr, SCALE, TILES, ORDER, WEIGHTS, OUT, tokens, scale_stride, n_out, k, groups, scale_rows,
    TOP_K: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    ROWS_EACH: tl.constexpr, IN_BLOCKS: tl.constexpr, X_LEFT: tl.constexpr, EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid and operands as moe/experts.py's kernel, with X in e4m3 and its X_SCALE [groups of k, scale_stride],
    W a descriptor of e4m3 and its SCALE [experts, scale_rows, groups]."""
    expert, first_position, end = tile_of_rows(TILES, GATED, PDL)
    if expert < 0:
        return
    first_col = tl.program_id(0) * BLOCK_N
    base = expert * (n_out * 2 if GATED else n_out)
    first_row, end_row = base + first_col, base + n_out
    position, live, choice = enter_tile(
        w_ptr, first_row, end_row, k, ORDER, first_position, end, GATED, BLOCK_M, BLOCK_N, PREFETCH, PDL
    )
    row = choice // TOP_K if GATED else position
    x_ptrs, scale_ptrs = X + row.to(tl.int64)[:, None] * k, X_SCALE + row
    of_expert = SCALE + expert * scale_rows * groups

    acc = tl.zeros([BLOCK_M, BLOCK_N] if X_LEFT else [BLOCK_N, BLOCK_M], dtype=tl.float32)
    if GATED:
        up = tl.zeros(acc.shape, dtype=tl.float32)
    for step in tl.range(0, tl.cdiv(k, 128), num_stages=STAGES):
        cols = step * 128 + tl.arange(0, 128)
        mask = live[:, None] if EVEN_K else live[:, None] & (cols < k)[None, :]
        x = tl.load(x_ptrs + cols[None, :], mask=mask, other=0.0)
        x_scale = tl.load(scale_ptrs + step * scale_stride, mask=live, other=0.0)
        w = W.load([first_row, step * 128])
        acc = add_group(
            acc, x, w, x_scale, of_expert, first_col, n_out, step, groups, BLOCK_N, ROWS_EACH, IN_BLOCKS, X_LEFT
        )
        if GATED:
            w = W.load([n_out + first_row, step * 128])
            up = add_group(
                up, x, w, x_scale, of_expert, n_out + first_col, 2 * n_out, step, groups,
                BLOCK_N, ROWS_EACH, IN_BLOCKS, X_LEFT,
            )  # fmt: skip
    if not IN_BLOCKS:
        acc = times_rows(acc, of_expert, first_col, n_out, BLOCK_N, X_LEFT)
        if GATED:
            up = times_rows(up, of_expert, n_out + first_col, 2 * n_out, BLOCK_N, X_LEFT)
    if GATED:
        acc = silu_mul(acc, up, OUT.dtype.element_ty)
    col = first_col + tl.arange(0, BLOCK_N)
    store_by_choice(acc, OUT, WEIGHTS, position, live, choice, col, tokens, n_out, TOP_K, GATED, X_LEFT)


def expert_gate_up(x: Tensor, weight: FP8Weight, routing: Routing, config: GroupedConfig) -> Tensor:
    """x [T, H], weight of values [E, 2 I, H] (gates first) and scales [E, ...] -> silu(gate) * up of every choice, [T *
    k, I] in routing's order."""
    out = x.new_empty(routing.order.shape[0], weight.values.shape[1] // 2)
    return _launch(x, weight, routing, config, out, gated=True)


def expert_down(
    h: Tensor, weight: FP8Weight, routing: Routing, config: GroupedConfig, out_dtype: torch.dtype
) -> Tensor:
    """h [T * k, I] in routing's order, weight of values [E, H, I] -> out_dtype [k, T, H], every choice's result times
    its weight, by slot."""
    out = h.new_empty(routing.top_k, routing.num_tokens, weight.values.shape[1], dtype=out_dtype)
    return _launch(h, weight, routing, config, out, gated=False)


def _launch(
    x: Tensor, weight: FP8Weight, routing: Routing, config: GroupedConfig, out: Tensor, gated: bool
) -> Tensor:
    """Fills and returns `out`."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    values, scale, n_out = weight.values, weight.scale, out.shape[-1]
    k = values.shape[2]
    if x.shape[1] != k or k % 16 or not (x.is_contiguous() and values.is_contiguous()):
        raise ValueError(f"x {list(x.shape)}: must be contiguous and fit weights {list(values.shape)}, K of 16s")
    x, x_scale = quantize_rows(x)
    rows = values.view(-1, k)
    _grouped_fp8_kernel[(triton.cdiv(n_out, config.block_n), routing.tiles.shape[0])](
        x, x_scale, TensorDescriptor(rows, list(rows.shape), [k, 1], [config.block_n, GROUP]), rows, scale,
        routing.tiles, routing.order, routing.weights, out, routing.num_tokens, x_scale.stride(1),
        n_out, k, scale.shape[2], scale.shape[1],
        TOP_K=routing.top_k, GATED=gated, BLOCK_M=config.block_m, BLOCK_N=config.block_n, STAGES=config.stages,
        ROWS_EACH=weight.rows_each, IN_BLOCKS=weight.in_blocks, X_LEFT=config.x_left, EVEN_K=k % GROUP == 0,
        PREFETCH=max(GROUP, PREFETCH_BYTES // config.block_n), num_warps=config.num_warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


def _products(x: Tensor, weight: FP8Weight, expert: int) -> Tensor:
    values, scale = weight.values[expert], weight.scale[expert]
    return linear_reference(*quantize_rows_reference(x), values, scale, weight.rows_each)


def expert_gate_up_reference(x: Tensor, weight: FP8Weight, routing: Routing, config: GroupedConfig) -> Tensor:
    """Plain twin of `expert_gate_up`."""
    out = x.new_empty(routing.order.shape[0], weight.values.shape[1] // 2)
    tokens = routing.order.long() // routing.top_k
    for expert, first, end in experts_of(routing):
        out[first:end] = silu_mul_reference(_products(x[tokens[first:end]], weight, expert).to(x.dtype))
    return out


def expert_down_reference(
    h: Tensor, weight: FP8Weight, routing: Routing, config: GroupedConfig, out_dtype: torch.dtype
) -> Tensor:
    """Plain twin of `expert_down`."""
    out = h.new_empty(routing.num_tokens, routing.top_k, weight.values.shape[1], dtype=out_dtype).flatten(0, 1)
    weights = routing.weights.flatten()
    for expert, first, end in experts_of(routing):
        choices = routing.order[first:end].long()
        out[choices] = (_products(h[first:end], weight, expert) * weights[choices, None]).to(out_dtype)
    return out.unflatten(0, (routing.num_tokens, routing.top_k)).transpose(0, 1).contiguous()
