"""x @ W^T in FP8, as kernels/fp8/reference.py defines it: what quantises x, and what multiplies."""

from torch import Tensor

from nanovllm.kernels.fp8.reference import linear_reference, quantize_rows_reference
from nanovllm.kernels.gemm.choice import GemmConfig
from nanovllm.kernels.pointwise.activation import silu_mul_reference


def linear(
    x: Tensor, weight: Tensor, scale: Tensor, rows_each: int, input_scale: Tensor | None, config: GemmConfig
) -> Tensor:
    """x [T, K], weight e4m3 [N, K] with scale float32 [N / rows_each, groups of K or 1], input_scale float32 or None:
    made here -> [T, N]; with config.parts > 1 float32 [parts, T, N], sums over parts of K."""
    return linear_reference(*quantize_rows_reference(x, input_scale), weight, scale, rows_each).to(x.dtype)


def linear_silu_mul(
    x: Tensor, weight: Tensor, scale: Tensor, rows_each: int, input_scale: Tensor | None, config: GemmConfig
) -> Tensor:
    """silu(gate) * up of `linear`, whose first N / 2 columns are gates: [T, N / 2]."""
    return silu_mul_reference(linear(x, weight, scale, rows_each, input_scale, config))
