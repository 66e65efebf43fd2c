"""Products of one row by 4-bit weights, fused with what surrounds them in a decoder layer; as skinny.py, and by its
rule: no kernel in flight may write weights."""

from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.gemm.choice import GemmConfig, row_misfit
from nanovllm.kernels.gemm.int4 import SPAN, Int4Weight, check_fits
from nanovllm.kernels.gemm.int4_row_kernel import int4_row_kernel
from nanovllm.kernels.pointwise.norm import Norm


def linear(
    x: Tensor, weight: Int4Weight, config: GemmConfig, *, norm: Norm | None = None, gated: bool = False,
    residual: Tensor | None = None, pdl: bool = True,
) -> Tensor:  # fmt: skip
    """x [1, k] @ weight^T -> [1, n]; norm, gated and residual as in skinny.linear, but that the product is rounded
    before the activation."""
    (rows, k), n_out = x.shape, weight.n // 2 if gated else weight.n
    check_fits(x, weight)
    if rows != 1:
        raise ValueError(f"4-bit products fused with a norm or residual take one row, got {rows}")
    if residual is not None and residual.shape != (1, n_out):
        raise ValueError(f"residual is {list(residual.shape)}, expected {[1, n_out]}")
    if reason := row_misfit(k, gated, config):
        raise ValueError(f"4-bit weight [{weight.n}, {k}]: {reason}")
    out = x.new_empty(1, n_out) if residual is None else residual
    outputs = config.block_n // 2 if gated else config.block_n
    steps = triton.cdiv(k, SPAN * config.num_warps)
    gain, eps = (x, 0.0) if norm is None else (norm.weight, norm.eps)
    int4_row_kernel[(triton.cdiv(n_out, outputs),)](
        x, weight.words, weight.groups, gain, out, out, weight.n, n_out, eps,
        K=k, X_STEPS=triton.next_power_of_2(steps), TILES=config.block_n // 16, WARPS=config.num_warps,
        AHEAD=config.stages, GROUP=weight.group, HAS_ZEROS=weight.has_zeros, EVEN_N=n_out % outputs == 0,
        NORM=norm is not None, PAIRED=gated, RESIDUAL=residual is not None, num_warps=config.num_warps,
        **pdl_options(x.device, pdl),
    )  # fmt: skip
    return out
