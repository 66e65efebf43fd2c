"""x @ W^T in FP8, as reference.py defines it, by what a GemmConfig names."""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.base.padded_rows import empty_product
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.quantize import in_groups, quantize_rows
from nanovllm.kernels.fp8.reference import BLOCK, linear_reference, quantize_rows_reference, widened_products
from nanovllm.kernels.gemm import roles, stream, tile
from nanovllm.kernels.gemm.expand import Shrunk
from nanovllm.kernels.plan.config import TILE_ROWS, GemmConfig


def linear(
    x: Tensor | FP8Rows, weight: FP8Weight, config: GemmConfig, *, gated: bool = False, delta: Any = None,
    **around: Any,
) -> Tensor | FP8Rows:  # fmt: skip
    """x [T, K] @ weight^T -> [T, N] in x's dtype; with config.parts > 1 float32 [parts, T, N], sums over parts of K.
    gated: gates are the first N / 2 columns, and the result is silu(gate) * up, [T, N / 2], which "roles" rounds;
    not by the library. around: norm and residual, which "stream" takes. delta: as in dense.linear; not by
    "roles" and "scaled"."""
    if config.kernel == "stream":
        return stream.linear(x, weight, config, gated=gated, delta=delta, **around)
    if config.kernel == "roles":
        assert delta is None
        return roles.linear(_rounded(x, weight), weight, config, gated=gated)
    if config.kernel == "tile":
        return _by_tiles(x, weight, config, gated=gated, delta=delta)
    assert not gated, config
    if config.kernel == "scaled":
        assert delta is None
        return library_linear(_rounded(x, weight), weight)
    rows = quantize_rows_reference(x, weight.input_scale) if isinstance(x, Tensor) else x
    if config.kernel == "widened":  # slow
        return widened_products(rows, weight, delta)
    assert config.kernel == "twin", config
    y = linear_reference(rows, weight)
    return (y if delta is None else y + delta).to(x.dtype)


def _by_tiles(
    x: Tensor | FP8Rows, weight: FP8Weight, config: GemmConfig, *, gated: bool, delta: Shrunk | None
) -> Tensor:
    rows, values = x.shape[0], weight.values
    n_out = values.shape[0] // 2 if gated else values.shape[0]
    assert values.shape[1] == x.shape[1] and values.is_contiguous(), (values.shape, x.shape)
    out = empty_product(rows, n_out, config.split_k, gated, x.dtype, values.device)
    operand, scales, _ = _rounded(x, weight)
    x_left = config.block_n < 64 or config.block_m >= 128
    pdl = rows <= TILE_ROWS
    return tile.multiply_rows(operand, scales, weight, config, out, gated=gated, x_left=x_left, pdl=pdl, delta=delta)


def _rounded(x: Tensor | FP8Rows, weight: FP8Weight) -> FP8Rows:
    return quantize_rows(x, weight.input_scale) if isinstance(x, Tensor) else in_groups(x)


def library_linear(x: FP8Rows, weight: FP8Weight) -> Tensor:
    """x @ weight^T by cuBLAS: x [T, K], in memory for a multiple of 4 rows -> [T, N]."""
    (rows, k), groups, padded = x.shape, x.scales.shape[1], x.scales.stride(1)
    values, scales = x.values.as_strided((padded, k), (k, 1)), x.scales.as_strided((padded, groups), (1, padded))
    of_weight = weight.scale.t()
    if weight.rows_each != BLOCK:
        of_weight = _scales_of_rows(weight, groups)
    out = torch._scaled_mm(values, weight.values.t(), scale_a=scales, scale_b=of_weight, out_dtype=x.dtype)
    return out[:rows]


def _scales_of_rows(weight: FP8Weight, groups: int) -> Tensor:
    """A scale for each row and group, float32 [groups, N], by one kernel."""
    of_rows = weight.scale.t()  # [groups or 1, N / rows_each]
    if weight.rows_each > 1:
        of_rows = of_rows.repeat_interleave(weight.rows_each, 1)[:, : weight.values.shape[0]]
    return of_rows.expand(groups, -1).contiguous()
