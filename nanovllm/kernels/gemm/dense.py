"""x @ W^T in 16 or 32 bits by what a GemmConfig names.

cuBLAS leaves most of the chip idle where a weight has few rows: of N = 4096 it makes 32 tiles for 132
multiprocessors. Then "split" cuts K into parts, computed side by side, and hands their float32 sums on as [parts, M, N]
to add + RMSNorm (pointwise/norm.py), which adds them up, in pairs, on its way at next to no cost. No kernel waits for
another's part, so no fence is needed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.gemm import fixed_order, fma, stream, tile
from nanovllm.kernels.gemm.adapters import expand
from nanovllm.kernels.gemm.expand import Shrunk
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.pointwise.norm import Norm

_MINUS_ZERO = -(1 << 31)
"""The bits of -0.0, as int32."""


def linear(
    x: Tensor, weight: Tensor, config: GemmConfig, *, gated: bool = False, norm: Norm | None = None,
    residual: Tensor | None = None, delta: Any = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K] @ weight [N, K]^T in one dtype -> [M, N]; where config.parts > 1 [parts, M, N], sums over parts of K, in
    float32 but for config.round_sums. gated: gates are the first N / 2 rows of the weight, and the result is silu(gate)
    * up, [M, N / 2]; not by the library. norm, residual: as in fma.linear, by kernels for few rows alone. bias [N]: as
    there, by "fma" and "tile" alone, added to the first part. delta: of adapters, added to the product, or its first
    part, before anything else: for kernels of our own a Shrunk, else float32 [M, N], or for the library on a GPU in x's
    dtype; for "split" either, one part more."""
    if config.is_skinny:
        around: dict[str, Any] = {"gated": gated, "norm": norm, "residual": residual, "delta": delta}
        if config.kernel == "fma":
            return fma.linear(x, weight, config, bias=bias, **around)
        assert bias is None, config
        return stream.linear(x, weight, config, **around)
    assert norm is residual is None, config
    if config.kernel == "tile":
        return tile.linear(x, weight, config, gated=gated, delta=delta, bias=bias)
    assert bias is None, config
    if config.kernel == "blocks":
        return fixed_order.linear_in_blocks(x, weight, config, delta)
    if config.kernel == "split":
        return split_linear(x, weight, config, delta)
    assert config.kernel == "library" and not gated, config
    return library_linear(x, weight, delta)


def library_linear(x: Tensor, weight: Tensor, delta: Tensor | None) -> Tensor:
    """x [M, K] @ weight [N, K]^T, plus delta [M, N] in float32 or, on a GPU, in x's dtype, if there is one, rounded
    once, by the library. Rows whose delta is -0.0 have the bits of F.linear. The result may be where delta was."""
    if delta is None:
        return F.linear(x, weight)
    if x.is_cuda:  # as the product alone, but that its float32 sums begin with delta, rounded
        return delta.to(x.dtype).addmm_(x, weight.t())
    y = F.linear(x, weight)
    if x.dtype == torch.float32:
        return y.add_(delta)
    wide = F.linear(x.float(), weight.float()).add_(delta).to(x.dtype)
    return torch.where(delta.view(torch.int32).amax(1, keepdim=True) == _MINUS_ZERO, y, wide)


def split_linear(x: Tensor, weight: Tensor, config: GemmConfig, delta: Shrunk | Tensor | None = None) -> Tensor:
    """x [M, K] @ weight [N, K]^T as float32 [split_k, M, N], with config.round_sums in x's dtype, a sum over each of
    config.split_k equal parts of K, by cuBLAS; then `delta`, where there is one, as one part more."""
    (rows, k), n, splits = x.shape, weight.shape[0], config.split_k
    dtype = x.dtype if config.round_sums else torch.float32
    sums = torch.empty(splits + (delta is not None), rows, n, dtype=dtype, device=x.device)
    x_parts = x.view(rows, splits, k // splits).transpose(0, 1)
    weight_parts = weight.view(n, splits, k // splits).permute(1, 2, 0)
    if x.dtype == dtype:
        torch.bmm(x_parts, weight_parts, out=sums[:splits])
    elif x.is_cuda:
        torch.bmm(x_parts, weight_parts, out_dtype=dtype, out=sums[:splits])
    else:
        torch.bmm(x_parts.float(), weight_parts.float(), out=sums[:splits])
    if delta is not None:
        expand(delta, sums[-1]) if isinstance(delta, Shrunk) else sums[-1].copy_(delta)
    return sums


def split_linear_reference(x: Tensor, weight: Tensor, splits: int) -> Tensor:
    """Plain twin of `split_linear`."""
    return tile.sums_over_parts(x, weight, [x.shape[1] // splits * part for part in range(splits + 1)])
