"""Products by weights of 4 and 8 bits, by tiles, or widened.

The kernel reads memory at 4 or 8 bits a weight. For many rows a range of weight rows at a time is widened into scratch
memory that stays in the L2 cache, rounded to the dtype of x, and the library multiplies.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.padded_rows import empty_product
from nanovllm.kernels.base.triton_import import HAS_TRITON, triton
from nanovllm.kernels.gemm.dense import library_linear
from nanovllm.kernels.gemm.e2m1 import SPAN
from nanovllm.kernels.gemm.packed import PackedWeight, check_fits
from nanovllm.kernels.gemm.packed_kernel import int4_gemm_kernel, int4_widen_kernel
from nanovllm.kernels.plan.config import SCRATCH_FLOATS, GemmConfig

PREFETCH_BYTES = 8 << 20
"""Bytes of all programs' words to bring into L2 before they may start: more would drive out what other kernels use."""
WIDENED_BYTES = 32 << 20
"""Bytes of weights widened at a time: what is written is read again from the L2 cache."""


def widen(weight: PackedWeight, first: int, end: int, out: Tensor) -> Tensor:
    """Rows [first, end) of the weight into out [end - first, k]; returns out."""
    block_n = 64
    grid = (triton.cdiv(end - first, block_n), weight.words.shape[0])
    int4_widen_kernel[grid](
        weight.words, weight.scales, weight.factors, out, first, end, weight.n, weight.k,
        BLOCK_N=block_n, CODE=weight.code, GROUP=weight.group, HAS_ZEROS=weight.has_zeros, PTX=out.is_cuda,
    )  # fmt: skip
    return out


def linear_widened(x: Tensor, weight: PackedWeight, delta: Tensor | None = None) -> Tensor:
    """x [M, k] @ weight^T -> [M, n] by the library, a range of weight rows at a time. delta: see library_linear."""
    if not x.is_cuda or not HAS_TRITON:
        return library_linear(x, weight.widened().to(x.dtype), delta)
    n, k = weight.n, weight.k
    scratch = _widened(x.device, torch.cuda.current_stream(x.device).cuda_stream, x.dtype)
    rows = max(SPAN, scratch.numel() // k // SPAN * SPAN)
    if rows * k > scratch.numel():
        raise ValueError(f"{weight.code} weight [{n}, {k}]: {SPAN} rows of it must fit into {WIDENED_BYTES} bytes")
    out = x.new_empty(x.shape[0], n) if delta is None else delta.to(x.dtype, copy=True)
    for first in range(0, n, rows):
        end = min(n, first + rows)
        part = widen(weight, first, end, scratch[: (end - first) * k].view(end - first, k))
        if delta is None:
            torch.mm(x, part.T, out=out[:, first:end])
        else:
            out[:, first:end].addmm_(x, part.T)
    return out


@cache
def _workspace(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """Split-K partial sums and arrival counters, shared by the launches of one stream: they are ordered by it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run each split-K shape once before capturing it: the workspace must outlive the graph")
    return torch.empty(SCRATCH_FLOATS, device=device), torch.zeros(1 << 14, dtype=torch.int32, device=device)


@cache
def _widened(device: torch.device, stream: int, dtype: torch.dtype) -> Tensor:
    """Shared by the launches of one stream, which are ordered by it."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("multiply by a widened weight once before capturing it: its memory must outlive the graph")
    return torch.empty(WIDENED_BYTES // dtype.itemsize, dtype=dtype, device=device)


def linear(
    x: Tensor, weight: PackedWeight, config: GemmConfig, *, gated: bool = False, delta: Any = None
) -> Tensor:
    """x [M, k] @ weight^T -> [M, n] by what `config` names; with config.parts > 1 float32 [config.parts, M, n], sums
    over parts of k. gated: the weight is [2 I, k], gates first, and the result silu(gate) * up, [M, I], rounded as the
    product and the activation by themselves do; not by "widened". delta: as in dense.linear."""
    (rows, k), n_out = x.shape, weight.n // 2 if gated else weight.n
    if config.kernel == "widened":
        return linear_widened(x, weight, delta)
    check_fits(x, weight)
    blocks, parts = weight.words.shape[0], config.parts > 1 and not gated
    if config.split_k > blocks:
        raise ValueError(f"{config} leaves a split without columns, K = {k}")
    out = empty_product(rows, n_out, config.parts, gated, x.dtype, x.device)
    outputs = config.block_n // 2 if gated else config.block_n
    grid = (triton.cdiv(rows, config.block_m), triton.cdiv(n_out, outputs), config.split_k)
    scratch = counters = out
    adds_up = config.split_k > 1 and not parts
    if adds_up:
        scratch, counters = _workspace(x.device, torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0)
        needed = config.split_k * grid[0] * config.block_m * grid[1] * config.block_n
        if needed > SCRATCH_FLOATS or grid[0] * grid[1] > counters.numel():
            raise ValueError(f"{config} needs more scratch than there is for {rows} rows of a weight [{weight.n}, {k}]")
    int4_gemm_kernel[grid](
        x, weight.words, weight.scales, weight.factors, out, scratch, counters, delta and delta.operands, rows=rows,
        n=weight.n, n_out=n_out, k=k, ROWS=config.block_m, BLOCK_N=config.block_n, STAGES=config.stages,
        CODE=weight.code, GROUP=weight.group, HAS_ZEROS=weight.has_zeros, PAIRED=gated, ADDS_UP=adds_up,
        PREFETCH=_prefetched(grid, 2 * config.block_n * weight.words.shape[2], blocks), EVEN_K=k % SPAN == 0,
        EVEN_M=config.block_m >= 64 and rows % config.block_m == 0 and k % SPAN == 0,
        EVEN_N=n_out % outputs == 0, PTX=x.is_cuda, num_warps=config.num_warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


def _prefetched(grid: tuple[int, int, int], nbytes: int, blocks: int) -> int:
    """Blocks, of so many bytes of words, of each program, a power of two: of PREFETCH_BYTES, and no more than it goes
    through."""
    wanted = min(PREFETCH_BYTES // (grid[1] * grid[2] * nbytes), blocks // grid[2])
    return 1 << (max(1, min(16, wanted)).bit_length() - 1)
