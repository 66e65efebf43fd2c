"""Products of one row by 4-bit weights, fused with what surrounds them in a decoder layer; as skinny.py, and by its
rule: no kernel in flight may write weights."""

from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.gemm.choice import GemmConfig, row_misfit
from nanovllm.kernels.gemm.int4 import SPAN, Int4Weight, check_fits
from nanovllm.kernels.gemm.int4_row_kernel import int4_row_kernel


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Int4Weight, config: GemmConfig, *, pdl: bool = True
) -> Tensor:
    """rms_norm(x) @ weight^T for x [1, k], norm_weight [k] -> [1, n]."""
    return _launch(x, weight, weight.n, norm_weight, eps, None, False, config, pdl)


def norm_linear_silu_mul(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Int4Weight, config: GemmConfig, *, pdl: bool = True
) -> Tensor:
    """silu(gate) * up of rms_norm(x) [1, k] for a weight [2 I, k], gate rows first -> [1, I]. Rounds as the
    product and the activation by themselves do."""
    return _launch(x, weight, weight.n // 2, norm_weight, eps, None, True, config, pdl)


def linear(x: Tensor, weight: Int4Weight, config: GemmConfig, *, pdl: bool = True) -> Tensor:
    """x [1, k] @ weight^T -> [1, n]."""
    return _launch(x, weight, weight.n, None, 0.0, None, False, config, pdl)


def linear_silu_mul(x: Tensor, weight: Int4Weight, config: GemmConfig, *, pdl: bool = True) -> Tensor:
    """silu(gate) * up of x [1, k] for a weight [2 I, k], gate rows first -> [1, I]."""
    return _launch(x, weight, weight.n // 2, None, 0.0, None, True, config, pdl)


def linear_residual(x: Tensor, weight: Int4Weight, residual: Tensor, config: GemmConfig, *, pdl: bool = True) -> Tensor:
    """residual [1, n] += x [1, k] @ weight^T in place, rounded once; returns residual."""
    return _launch(x, weight, weight.n, None, 0.0, residual, False, config, pdl)


def _launch(
    x: Tensor, weight: Int4Weight, n_out: int, norm_weight: Tensor | None, eps: float, residual: Tensor | None,
    paired: bool, config: GemmConfig, pdl: bool,
) -> Tensor:  # fmt: skip
    """Returns [1, n_out]: `residual`, or a new tensor."""
    rows, k = x.shape
    check_fits(x, weight)
    if rows != 1:
        raise ValueError(f"4-bit products fused with a norm or residual take one row, got {rows}")
    if residual is not None and residual.shape != (1, n_out):
        raise ValueError(f"residual is {list(residual.shape)}, expected {[1, n_out]}")
    if reason := row_misfit(k, paired, config):
        raise ValueError(f"4-bit weight [{weight.n}, {k}]: {reason}")
    out = x.new_empty(1, n_out) if residual is None else residual
    outputs = config.block_n // 2 if paired else config.block_n
    steps = triton.cdiv(k, SPAN * config.num_warps)
    int4_row_kernel[(triton.cdiv(n_out, outputs),)](
        x, weight.words, weight.groups, x if norm_weight is None else norm_weight, out, out, weight.n, n_out, eps,
        K=k, X_STEPS=triton.next_power_of_2(steps), TILES=config.block_n // 16, WARPS=config.num_warps,
        AHEAD=config.stages, GROUP=weight.group, HAS_ZEROS=weight.has_zeros, EVEN_N=n_out % outputs == 0,
        NORM=norm_weight is not None, PAIRED=paired, RESIDUAL=residual is not None, num_warps=config.num_warps,
        **pdl_options(x.device, pdl),
    )  # fmt: skip
    return out
