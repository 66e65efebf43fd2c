"""Linear layers for 1 to 16 rows, fused with what surrounds them in a decoder layer: the decode path of small batches.

At these sizes a matrix product is a read of W, and in a CUDA graph of hundreds of such reads the gaps between kernels
weigh as much as the reads. So the norm before and the activation or residual after are folded in, and each kernel
starts its weight reads while the previous one is still running (programmatic dependent launch, PDL).

A chain under PDL is correct only if each kernel in it either is launched the ordinary way, which waits for its
predecessor's end, or calls `gdc_wait` in every program before touching anything that an earlier kernel writes. The
kernels here do the latter, so the two sorts mix freely. In return no kernel in flight may write weights.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.base.pdl import pdl_options
from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.gemm.fma import small_gemm_fma_kernel
from nanovllm.kernels.gemm.push import Places, push_arguments
from nanovllm.kernels.gemm.stream import small_gemm_stream_kernel, small_gemm_tile_kernel
from nanovllm.kernels.gemm.tile import LANE_SPAN, MAX_ROWS

SM_COUNT = 132  # of an H100 or H200; only the choice of candidates depends on it
SCRATCH_FLOATS = 1 << 21
COUNTERS = 1 << 14


@dataclass(frozen=True)
class GemmConfig:
    """How one matrix product is cut. Picklable, so that one rank's measured choice can be used by all.

    kernel: "fma" (CUDA cores, rows rounded up to a power of two), "tile" (tensor cores, weights waiting in registers)
    or "stream" (tensor cores, pipelined loop).
    block_n: weight rows of a program. block_k: columns of a step; for "fma" and "tile" 256 times a power of two.
    depth: steps of weights in flight for each program. split_k: programs that share a tile's K.
    """

    kernel: str
    block_n: int
    block_k: int
    depth: int
    split_k: int = 1
    num_warps: int = 4


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, *,
    out: Tensor | None = None, config: GemmConfig | None = None, pdl: bool = True,
) -> Tensor:  # fmt: skip
    """rms_norm(x) @ weight^T for x [M <= 16, K], norm_weight [K], weight [N, K] -> [M, N], all in one dtype."""
    return _launch(x, weight, weight.shape[0], norm_weight, eps, None, out, False, config, pdl)


def norm_linear_silu_mul(
    x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor, *,
    out: Tensor | None = None, config: GemmConfig | None = None, pdl: bool = True,
) -> Tensor:  # fmt: skip
    """silu(gate) * up of rms_norm(x) [M <= 16, K] for gate_up_weight [2 I, K], gate rows first -> [M, I]."""
    return _launch(x, gate_up_weight, gate_up_weight.shape[0] // 2, norm_weight, eps, None, out, True, config, pdl)


def linear(
    x: Tensor, weight: Tensor, *, out: Tensor | None = None, config: GemmConfig | None = None, pdl: bool = True
) -> Tensor:
    """x [M <= 16, K] @ weight [N, K]^T -> [M, N]."""
    return _launch(x, weight, weight.shape[0], None, 0.0, None, out, False, config, pdl)


def push_linear(x: Tensor, weight: Tensor, places: Places, config: GemmConfig, *, pdl: bool = True) -> None:
    """`linear` into the ranks' places (push.py)."""
    places.check(x.shape[0], weight.shape[0], x.dtype)
    _launch(x, weight, weight.shape[0], None, 0.0, None, None, False, config, pdl, places)


def linear_residual(
    x: Tensor, weight: Tensor, residual: Tensor, *, config: GemmConfig | None = None, pdl: bool = True
) -> Tensor:
    """residual [M, N] += x [M <= 16, K] @ weight [N, K]^T in place, rounded once; returns residual."""
    return _launch(x, weight, weight.shape[0], None, 0.0, residual, residual, False, config, pdl)


def norm_linear_reference(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Plain twin of `norm_linear`."""
    return linear_reference(_rms_norm_reference(x, norm_weight, eps), weight)


def norm_linear_silu_mul_reference(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> Tensor:
    """Plain twin of `norm_linear_silu_mul`; like the kernel it rounds only the result."""
    wide = _wide(x.dtype)
    gate, up = (_rms_norm_reference(x, norm_weight, eps).to(wide) @ gate_up_weight.to(wide).T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Plain twin of `linear`."""
    wide = _wide(x.dtype)
    return (x.to(wide) @ weight.to(wide).T).to(x.dtype)


def linear_residual_reference(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """Plain twin of `linear_residual`, in place too."""
    wide = _wide(x.dtype)
    return residual.copy_(residual.to(wide) + x.to(wide) @ weight.to(wide).T)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(_wide(x.dtype))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def candidate_configs(rows: int, n: int, k: int) -> list[GemmConfig]:
    """At most four configurations worth timing for `rows` rows and a weight [n, k].

    From a sweep over the shapes of Qwen3 0.6B, 8B and 32B (four ways) on an H200 (scripts/bench_small_gemm.py --sweep).
    """
    # Three pipeline stages of 64 x 128 leave room for three programs on a multiprocessor, four stages for two.
    narrow = GemmConfig("stream", 64, 128, 3, _split(n, k, 64, SM_COUNT * 3, 256))
    deep = GemmConfig("stream", 64, 128, 4, _split(n, k, 64, SM_COUNT * 2, 768))
    if rows == 1:
        cuts = [(8, 1024, 3), (8, 512, 4), (16, 1024, 1), (8, 1024, 2)]
        steps = [(block_n, block_k, min(depth, triton.cdiv(k, block_k))) for block_n, block_k, depth in cuts]
        return [GemmConfig("fma", *cut) for cut in dict.fromkeys(steps)]
    wide_fma = GemmConfig("fma", 16, 512, 1)
    if rows == 2:
        return [wide_fma, GemmConfig("fma", 8, 1024, 3), GemmConfig("fma", 16, 1024, 1), narrow]
    tile = [GemmConfig("tile", 16, 1024, 2)] if k <= 3072 else []  # beyond, the pipelined loops win
    if rows <= 4:
        return [*tile, narrow, deep, wide_fma]
    return [*tile, narrow, deep, GemmConfig("stream", 128, 64, 4, _split(n, k, 128, SM_COUNT * 3, 256))]


def _split(n: int, k: int, block_n: int, slots: int, columns: int) -> int:
    """Largest power of two, at most 8, that leaves all programs resident at once and `columns` of K to each."""
    most = min(8, slots // triton.cdiv(n, block_n), k // columns)
    return 1 << (max(1, most).bit_length() - 1)


def _check(x: Tensor, weight: Tensor, out: Tensor | None, n_out: int, paired: bool, config: GemmConfig) -> None:
    rows, k = x.shape
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"small GEMM takes 1 to {MAX_ROWS} rows, got {rows}")
    if weight.shape[1] != k or k % 8:
        raise ValueError(f"weight {list(weight.shape)} does not fit x {list(x.shape)}, or K is no multiple of 8")
    if out is not None and out.shape != (rows, n_out):
        raise ValueError(f"output is {list(out.shape)}, expected {[rows, n_out]}")
    tensors = [x, weight] if out is None else [x, weight, out]
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("small GEMM takes contiguous tensors only")
    if config.block_n < 2 * config.num_warps and paired and config.kernel == "fma":
        raise ValueError(f"{config} gives a warp one weight row; gate and up need two")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"one dtype expected, got {[tensor.dtype for tensor in tensors]}")


@cache
def _workspace(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """Split-K partial sums and arrival counters, shared by the launches of one stream: they are ordered by it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run each split-K shape once before capturing it: the workspace must outlive the graph")
    return torch.empty(SCRATCH_FLOATS, device=device), torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def _launch(
    x: Tensor, weight: Tensor, n_out: int, norm_weight: Tensor | None, eps: float, residual: Tensor | None,
    out: Tensor | None, paired: bool, config: GemmConfig | None, pdl: bool, places: Places | None = None,
) -> Tensor:  # fmt: skip
    """Returns what was stored to; with `places`, which then were, nothing that counts."""
    rows, k = x.shape
    n = weight.shape[0]
    config = config or candidate_configs(rows, n, k)[0]
    _check(x, weight, out, n_out, paired, config)
    if out is None:
        out = x if places is not None else x.new_empty(rows, n_out)
    tiles = triton.cdiv(n, config.block_n)
    steps = triton.cdiv(k, config.block_k * config.split_k)
    scratch = counters = out
    if config.split_k > 1:
        scratch, counters = _workspace(x.device, torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0)
        if config.split_k * MAX_ROWS * tiles * config.block_n > SCRATCH_FLOATS or tiles > COUNTERS:
            raise ValueError(f"{config} needs more scratch than there is for a weight {list(weight.shape)}")
    fixed: dict[str, Any] = {
        "K": k, "BLOCK_N": config.block_n, "STEPS": steps, "SPLIT_K": config.split_k, "NORM": norm_weight is not None,
        "EVEN_K": k == steps * config.block_k * config.split_k, "EVEN_N": n % config.block_n == 0,
        "PAIRED": paired, "RESIDUAL": residual is not None, "num_warps": config.num_warps, **pdl_options(x.device, pdl),
    }  # fmt: skip
    if config.kernel == "stream":
        kernel = small_gemm_stream_kernel
        fixed |= {"BLOCK_K": config.block_k, "STAGES": config.depth, "PREFETCH": _prefetch_columns(config, steps)}
    else:
        kernel = small_gemm_fma_kernel if config.kernel == "fma" else small_gemm_tile_kernel
        fixed |= {"CHUNKS": config.block_k // LANE_SPAN.value, "PRELOAD": min(config.depth, steps)}
    if config.kernel == "fma":
        fixed |= {"ROWS": triton.next_power_of_2(rows), "WARPS": config.num_warps}
    gain = x if norm_weight is None else norm_weight
    base = x if residual is None else residual
    grid = (tiles, config.split_k)
    fixed |= push_arguments(places, out)
    kernel[grid](x, weight, gain, out, base, scratch, counters, rows=rows, n_out=n_out, eps=eps, **fixed)
    return out


def _prefetch_columns(config: GemmConfig, steps: int) -> int:
    """Columns of each weight row to bring into L2 early: what the loop keeps in flight, a power of two within its K."""
    within = 1 << ((steps * config.block_k).bit_length() - 1)
    return max(64, min(within, triton.next_power_of_2(config.block_k * config.depth)))
