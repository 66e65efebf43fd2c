"""GEMMs of decode steps, up to 256 rows: cuBLAS over parts of K, and a kernel of our own for small matrices.

cuBLAS leaves most of the chip idle where a weight has few rows: of N = 4096 it makes 32 tiles for 132
multiprocessors. Here K is cut into parts, computed side by side, and their float32 sums are handed on as [parts, M,
N] to add + RMSNorm (norm.py), which adds them up, in pairs, on its way at next to no cost. No kernel waits for
another's part, so no fence is needed.

The kernel of our own (decode_kernel.py) wins where GEMMs are so short that the gaps between kernels count: it
fetches its first weights into L2 while the kernel before it still runs (PDL), and
computes the activation with gate and up. In large GEMMs of many rows, what its tiles read of x out of L2 weighs more
than the weights, and cuBLAS shares those reads between multiprocessors: choice.py says which takes what.
"""

from itertools import pairwise

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.padded_rows import empty_product, rows_in_memory
from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.gemm.choice import GemmConfig
from nanovllm.kernels.gemm.decode_kernel import decode_gemm_kernel
from nanovllm.kernels.pointwise.activation import silu_mul_reference

PREFETCH_BYTES = 64 << 10
"""Of a program's weights, to bring into L2 before it may start: about what its pipeline asks for first."""


def split_linear(x: Tensor, weight: Tensor, config: GemmConfig) -> Tensor:
    """x [M, K] @ weight [N, K]^T as float32 [split_k, M, N], with config.nodes in x's dtype, a sum over each of
    config.split_k equal parts of K, by cuBLAS."""
    (rows, k), n, splits = x.shape, weight.shape[0], config.split_k
    part = k // splits
    x_parts = x.view(rows, splits, part).transpose(0, 1)
    weight_parts = weight.view(n, splits, part).permute(1, 2, 0)
    if config.nodes:
        return torch.bmm(x_parts, weight_parts)
    if x.is_cuda:
        return torch.bmm(x_parts, weight_parts, out_dtype=torch.float32)
    return torch.bmm(x_parts.float(), weight_parts.float())


def linear(x: Tensor, weight: Tensor, config: GemmConfig, *, gated: bool = False, pdl: bool = True) -> Tensor:
    """x [M, K] @ weight [N, K]^T in one dtype -> [M, N]; with config.split_k > 1 float32 [split_k, M, N], or with
    config.nodes in that dtype, sums over parts of K. gated: the weight is [2 I, K], gates first, and the result
    silu(gate) * up, [M, I], rounded as the GEMM and the activation kernel by themselves do; then K cannot be split."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    (rows, k), parts = x.shape, config.split_k > 1
    n_out = weight.shape[0] // 2 if gated else weight.shape[0]
    if gated and parts:
        raise ValueError(f"{config}: gate and up must be whole before the activation")
    if weight.shape[1] != k or k * x.element_size() % 16:
        raise ValueError(f"weight {list(weight.shape)} does not fit x {list(x.shape)}, or K is no multiple of 16 bytes")
    if not (x.is_contiguous() and weight.is_contiguous()) or x.dtype != weight.dtype:
        raise ValueError(f"contiguous tensors of one dtype expected, got {x.dtype} and {weight.dtype}")
    if config.split_k > triton.cdiv(k, config.block_k):
        raise ValueError(f"{config} leaves a split without columns, K = {k}")
    part_dtype = x.dtype if config.nodes else torch.float32
    out = empty_product(rows, n_out, config.split_k, gated, x.dtype, x.device, part_dtype)
    columns = PREFETCH_BYTES // (config.block_n * (2 if gated else 1) * weight.element_size())
    grid = (triton.cdiv(rows, config.block_m), triton.cdiv(n_out, config.block_n), config.split_k)
    readable = min(rows_in_memory(x), grid[0] * config.block_m)
    decode_gemm_kernel[grid](
        TensorDescriptor(x, [readable, k], [k, 1], [config.block_m, config.block_k]),
        TensorDescriptor(weight, list(weight.shape), [k, 1], [config.block_n, config.block_k]),
        weight, out, rows=rows, n_out=n_out, k=k,
        BLOCK_N=config.block_n, BLOCK_M=config.block_m, BLOCK_K=config.block_k, STAGES=config.stages,
        GATED=gated, PARTS=parts, X_LEFT=config.block_n < 64,
        PREFETCH=max(64, min(columns, triton.next_power_of_2(k))), num_warps=config.num_warps,
        **pdl_options(x.device, pdl),
    )  # fmt: skip
    return out


def split_linear_reference(x: Tensor, weight: Tensor, splits: int) -> Tensor:
    """Plain twin of `split_linear`."""
    return _sums(x, weight, [x.shape[1] // splits * part for part in range(splits + 1)])


def linear_reference(x: Tensor, weight: Tensor, config: GemmConfig, *, gated: bool = False) -> Tensor:
    """Plain twin of `linear`: the same columns in each part."""
    if gated:
        return silu_mul_reference((x.float() @ weight.float().T).to(x.dtype))
    steps = -(-x.shape[1] // config.block_k)
    sums = _sums(x, weight, [steps * part // config.split_k * config.block_k for part in range(config.split_k + 1)])
    return (sums.to(x.dtype) if config.nodes else sums) if config.split_k > 1 else sums[0].to(x.dtype)


def _sums(x: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
    return torch.stack([x[:, a:b].float() @ weight[:, a:b].float().T for a, b in pairwise(ends)])
