"""Skinny GEMMs, of 1 to 16 rows, fused with what surrounds them in a decoder layer: the decode path of small batches.

At these sizes a GEMM is a read of W, and in a CUDA graph of hundreds of such reads the gaps between kernels
weigh as much as the reads. So the norm before and the activation or residual after are folded in, and each kernel
starts its weight reads while the previous one is still running (programmatic dependent launch, PDL).

A chain under PDL is correct only if each kernel in it either is launched the ordinary way, which waits for its
predecessor's end, or calls `gdc_wait` in every program before touching anything that an earlier kernel writes. The
kernels here do the latter, so the two sorts mix freely. In return no kernel in flight may write weights.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.gemm.choice import SCRATCH_FLOATS, SKINNY_ROWS, GemmConfig
from nanovllm.kernels.gemm.epilogue import LANE_SPAN
from nanovllm.kernels.gemm.fma import skinny_fma_kernel
from nanovllm.kernels.gemm.stream import skinny_stream_kernel
from nanovllm.kernels.pointwise.norm import Norm, norm_reference

_COUNTERS = 1 << 14


def linear(
    x: Tensor, weight: Tensor, config: GemmConfig, *, norm: Norm | None = None, gated: bool = False,
    residual: Tensor | None = None, out_dtype: torch.dtype | None = None, pdl: bool = True,
) -> Tensor:  # fmt: skip
    """x [M <= 16, K] @ weight [N, K]^T -> [M, N] of x's dtype or of `out_dtype`.

    norm: of kind "rms", before it. gated: the weight is [2 I, K], gates first, and the result silu(gate) * up, [M, I].
    residual [M, N]: the product is added to it in place, rounded once, and it is returned.
    """
    (rows, k), n = x.shape, weight.shape[0]
    n_out = n // 2 if gated else n
    _check(x, weight, residual, n_out, gated, config)
    out = x.new_empty(rows, n_out, dtype=out_dtype) if residual is None else residual
    tiles = triton.cdiv(n, config.block_n)
    steps = triton.cdiv(k, config.block_k * config.split_k)
    scratch = counters = out
    if config.split_k > 1:
        scratch, counters = workspace(x.device, torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0)
        if config.split_k * SKINNY_ROWS * tiles * config.block_n > SCRATCH_FLOATS or tiles > _COUNTERS:
            raise ValueError(f"{config} needs more scratch than there is for a weight {list(weight.shape)}")
    fixed: dict[str, Any] = {
        "K": k, "BLOCK_N": config.block_n, "STEPS": steps, "SPLIT_K": config.split_k, "NORM": norm is not None,
        "EVEN_K": k == steps * config.block_k * config.split_k, "EVEN_N": n % config.block_n == 0,
        "PAIRED": gated, "RESIDUAL": residual is not None, "num_warps": config.num_warps, **pdl_options(x.device, pdl),
    }  # fmt: skip
    if config.kernel == "stream":
        kernel = skinny_stream_kernel
        fixed |= {"BLOCK_K": config.block_k, "STAGES": config.stages, "PREFETCH": _prefetch_columns(config, steps)}
    else:
        kernel = skinny_fma_kernel
        fixed |= {"CHUNKS": config.block_k // LANE_SPAN.value, "PRELOAD": min(config.stages, steps)}
        fixed |= {"ROWS": triton.next_power_of_2(rows), "WARPS": config.num_warps}
    gain, eps = (x, 0.0) if norm is None else (norm.weight, norm.eps)
    kernel[(tiles, config.split_k)](
        x, weight, gain, out, x if residual is None else residual, scratch, counters, rows=rows, n_out=n_out, eps=eps,
        **fixed,
    )  # fmt: skip
    return out


def linear_reference(
    x: Tensor, weight: Tensor, *, norm: Norm | None = None, gated: bool = False, residual: Tensor | None = None
) -> Tensor:
    """Plain twin of `linear`; like the kernels it rounds after the norm, and the result."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (x if norm is None else norm_reference(x, norm)).to(wide) @ weight.to(wide).T
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y.to(x.dtype) if residual is None else residual.copy_(residual.to(wide) + y)


def _check(x: Tensor, weight: Tensor, residual: Tensor | None, n_out: int, paired: bool, config: GemmConfig) -> None:
    rows, k = x.shape
    if not 1 <= rows <= SKINNY_ROWS:
        raise ValueError(f"skinny GEMM takes 1 to {SKINNY_ROWS} rows, got {rows}")
    if weight.shape[1] != k or k % 8:
        raise ValueError(f"weight {list(weight.shape)} does not fit x {list(x.shape)}, or K is no multiple of 8")
    if residual is not None and residual.shape != (rows, n_out):
        raise ValueError(f"residual is {list(residual.shape)}, expected {[rows, n_out]}")
    tensors = [x, weight] if residual is None else [x, weight, residual]
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("skinny GEMM takes contiguous tensors only")
    if config.block_n < 2 * config.num_warps and paired and config.kernel == "fma":
        raise ValueError(f"{config} gives a warp one weight row; gate and up need two")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"one dtype expected, got {[tensor.dtype for tensor in tensors]}")


@cache
def workspace(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """Split-K partial sums and arrival counters, shared by the launches of one stream: they are ordered by it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run each split-K shape once before capturing it: the workspace must outlive the graph")
    return torch.empty(SCRATCH_FLOATS, device=device), torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


def _prefetch_columns(config: GemmConfig, steps: int) -> int:
    """Columns of each weight row to bring into L2 early: what the loop keeps in flight, a power of two within its K."""
    within = 1 << ((steps * config.block_k).bit_length() - 1)
    return max(64, min(within, triton.next_power_of_2(config.block_k * config.stages)))
