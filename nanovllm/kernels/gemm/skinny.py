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

_COUNTERS = 1 << 14


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, config: GemmConfig, *, pdl: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """rms_norm(x) @ weight^T for x [M <= 16, K], norm_weight [K], weight [N, K], of one dtype -> [M, N] of that or of
    `out_dtype`."""
    return _launch(x, weight, weight.shape[0], norm_weight, eps, None, False, config, pdl, out_dtype)


def norm_linear_silu_mul(
    x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor, config: GemmConfig, *, pdl: bool = True
) -> Tensor:
    """silu(gate) * up of rms_norm(x) [M <= 16, K] for gate_up_weight [2 I, K], gate rows first -> [M, I]."""
    return _launch(x, gate_up_weight, gate_up_weight.shape[0] // 2, norm_weight, eps, None, True, config, pdl)


def linear(
    x: Tensor, weight: Tensor, config: GemmConfig, *, pdl: bool = True, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [M <= 16, K] @ weight [N, K]^T -> [M, N] of x's dtype or of `out_dtype`."""
    return _launch(x, weight, weight.shape[0], None, 0.0, None, False, config, pdl, out_dtype)


def linear_silu_mul(x: Tensor, gate_up_weight: Tensor, config: GemmConfig, *, pdl: bool = True) -> Tensor:
    """silu(gate) * up of x [M <= 16, K] for gate_up_weight [2 I, K], gate rows first -> [M, I]."""
    return _launch(x, gate_up_weight, gate_up_weight.shape[0] // 2, None, 0.0, None, True, config, pdl)


def linear_residual(x: Tensor, weight: Tensor, residual: Tensor, config: GemmConfig, *, pdl: bool = True) -> Tensor:
    """residual [M, N] += x [M <= 16, K] @ weight [N, K]^T in place, rounded once; returns residual."""
    return _launch(x, weight, weight.shape[0], None, 0.0, residual, False, config, pdl)


def norm_linear_reference(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Plain twin of `norm_linear`."""
    return linear_reference(_rms_norm_reference(x, norm_weight, eps), weight)


def norm_linear_silu_mul_reference(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> Tensor:
    """Plain twin of `norm_linear_silu_mul`."""
    return linear_silu_mul_reference(_rms_norm_reference(x, norm_weight, eps), gate_up_weight)


def linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Plain twin of `linear`."""
    wide = _wide(x.dtype)
    return (x.to(wide) @ weight.to(wide).T).to(x.dtype)


def linear_silu_mul_reference(x: Tensor, gate_up_weight: Tensor) -> Tensor:
    """Plain twin of `linear_silu_mul`; like the kernel it rounds only the result."""
    wide = _wide(x.dtype)
    gate, up = (x.to(wide) @ gate_up_weight.to(wide).T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def linear_residual_reference(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """Plain twin of `linear_residual`, in place too."""
    wide = _wide(x.dtype)
    return residual.copy_(residual.to(wide) + x.to(wide) @ weight.to(wide).T)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(_wide(x.dtype))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


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


def _launch(
    x: Tensor, weight: Tensor, n_out: int, norm_weight: Tensor | None, eps: float, residual: Tensor | None,
    paired: bool, config: GemmConfig, pdl: bool, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Returns [M, n_out]: `residual`, or a new tensor."""
    rows, k = x.shape
    n = weight.shape[0]
    _check(x, weight, residual, n_out, paired, config)
    out = x.new_empty(rows, n_out, dtype=out_dtype) if residual is None else residual
    tiles = triton.cdiv(n, config.block_n)
    steps = triton.cdiv(k, config.block_k * config.split_k)
    scratch = counters = out
    if config.split_k > 1:
        scratch, counters = workspace(x.device, torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0)
        if config.split_k * SKINNY_ROWS * tiles * config.block_n > SCRATCH_FLOATS or tiles > _COUNTERS:
            raise ValueError(f"{config} needs more scratch than there is for a weight {list(weight.shape)}")
    fixed: dict[str, Any] = {
        "K": k, "BLOCK_N": config.block_n, "STEPS": steps, "SPLIT_K": config.split_k, "NORM": norm_weight is not None,
        "EVEN_K": k == steps * config.block_k * config.split_k, "EVEN_N": n % config.block_n == 0,
        "PAIRED": paired, "RESIDUAL": residual is not None, "num_warps": config.num_warps, **pdl_options(x.device, pdl),
    }  # fmt: skip
    if config.kernel == "stream":
        kernel = skinny_stream_kernel
        fixed |= {"BLOCK_K": config.block_k, "STAGES": config.stages, "PREFETCH": _prefetch_columns(config, steps)}
    else:
        kernel = skinny_fma_kernel
        fixed |= {"CHUNKS": config.block_k // LANE_SPAN.value, "PRELOAD": min(config.stages, steps)}
        fixed |= {"ROWS": triton.next_power_of_2(rows), "WARPS": config.num_warps}
    gain = x if norm_weight is None else norm_weight
    base = x if residual is None else residual
    kernel[(tiles, config.split_k)](
        x, weight, gain, out, base, scratch, counters, rows=rows, n_out=n_out, eps=eps, **fixed
    )
    return out


def _prefetch_columns(config: GemmConfig, steps: int) -> int:
    """Columns of each weight row to bring into L2 early: what the loop keeps in flight, a power of two within its K."""
    within = 1 << ((steps * config.block_k).bit_length() - 1)
    return max(64, min(within, triton.next_power_of_2(config.block_k * config.stages)))
