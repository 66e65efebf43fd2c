"""FP8 products of one row, fused with what surrounds them in a decoder layer; as gemm/skinny.py, and by its rule: no
kernel in flight may write weights."""

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.quantize import quantize_rows
from nanovllm.kernels.fp8.reference import GROUP
from nanovllm.kernels.fp8.row import fp8_row_kernel
from nanovllm.kernels.gemm.choice import GemmConfig
from nanovllm.kernels.pointwise.norm import Norm, add_norms


def linear(
    x: Tensor | FP8Rows, weight: FP8Weight, config: GemmConfig, *, norm: Norm | None = None, gated: bool = False,
    residual: Tensor | None = None, pdl: bool = True,
) -> Tensor:  # fmt: skip
    """x [1, K] @ weight^T -> [1, N]; norm, of x that is no FP8Rows, gated and residual as in skinny.linear, but that
    the product is rounded before the activation and before it is added."""
    (rows, k), values, dtype = tuple(x.shape), weight.values, x.dtype
    n_out = values.shape[0] // 2 if gated else values.shape[0]
    if rows != 1 or values.shape[1] != k or k % 16:
        raise ValueError(f"x {list(x.shape)}: must have 1 row and fit weight {list(values.shape)}")
    if not values.is_contiguous() or config.block_n != 16 or config.block_k != GROUP * config.num_warps:
        raise ValueError(f"{config}: must take 16 contiguous weight rows, and {GROUP} columns a warp and step")
    if weight.in_blocks and (weight.rows_each % 16 or n_out % 16):
        raise ValueError(f"weight {list(values.shape)}: 16s of rows must share scales, not {weight.rows_each}")
    if isinstance(x, Tensor) and (residual is not None or weight.input_scale is not None):
        # Before a residual a kernel of its own takes less time.
        x = x if norm is None else add_norms(x, None, norm)[0]
        x, norm = FP8Rows(*quantize_rows(x, weight.input_scale), dtype), None
    out = torch.empty(1, n_out, dtype=dtype, device=values.device) if residual is None else residual
    steps = triton.cdiv(k, config.block_k)
    x, x_scale, stride = (x, None, 0) if isinstance(x, Tensor) else (x.values, x.scales, x.scales.stride(1))
    gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    # Registers with which two programs fit a multiprocessor; one that holds more of x, or of weights, needs more.
    two_programs = 128 if config.num_warps == 8 and steps <= 16 and not gated else None
    fp8_row_kernel[(triton.cdiv(n_out, config.block_n),)](
        x, x_scale, gain, values, weight.scale, out, residual, scale_stride=stride, n_out=n_out,
        groups=weight.scale.shape[1], eps=eps, K=k, STEPS=steps, PRELOAD=min(config.stages, steps),
        ROWS_EACH=weight.rows_each, IN_BLOCKS=weight.in_blocks, EVEN_K=k == steps * config.block_k, GATED=gated,
        WARPS=config.num_warps, num_warps=config.num_warps, maxnreg=two_programs, **pdl_options(values.device, pdl),
    )  # fmt: skip
    return out
