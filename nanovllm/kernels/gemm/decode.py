"""GEMMs of decode steps, up to 256 rows: cuBLAS over parts of K, and a kernel of our own for small matrices.

cuBLAS leaves most of the chip idle where a weight has few rows: of N = 4096 it makes 32 tiles for 132
multiprocessors. Here K is cut into parts, computed side by side, and their float32 sums are handed on as [parts, M,
N] to add + RMSNorm (norm.py), which adds them up, in pairs, on its way at next to no cost. No kernel waits for
another's part, so no fence is needed.

The kernel of our own wins where GEMMs are so short that the gaps between kernels count: it
fetches its first weights into L2 while the kernel before it still runs (PDL), and
computes the activation with gate and up. In large GEMMs of many rows, what its tiles read of x out of L2 weighs more
than the weights, and cuBLAS shares those reads between multiprocessors: kernels/plan/ says which takes what.

Both operands come by tensor descriptors (TMA), which read zeros past the end of a matrix, so that ragged
edges cost no masks in the loop. A Hopper matrix instruction has 64 rows of its left operand at least and 8 of the
right one: tiles of 64 weight rows and more put the weights on the left, so that 32 rows of x are enough, and tiles of
fewer weight rows put x there. A row's sum over K goes in an order that the shapes alone decide, and does not depend on
the other rows.
"""

from itertools import pairwise

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options, prefetch_tile, prefetched_columns
from nanovllm.kernels.base.padded_rows import empty_product, rows_in_memory
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.pointwise.activation import silu_mul_reference


@triton.jit
def wait_for_rows(
    w_ptr, first_col, n_out, begin, k, BLOCK_N: tl.constexpr, GATED: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """After it x may be read. With PDL the program's weights, where GATED its ups too, are on their way into L2 then:
    PREFETCH of their columns from `begin` on."""
    if PDL:
        prefetch_tile(w_ptr, first_col, n_out, begin, k, BLOCK_N, PREFETCH)
        if GATED:
            prefetch_tile(w_ptr, n_out + first_col, 2 * n_out, begin, k, BLOCK_N, PREFETCH)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def multiply(x, w, acc, X_LEFT: tl.constexpr):
    """acc + x @ w^T where x is the left operand, else its transpose."""
    if X_LEFT:
        return tl.dot(x, w.T, acc, input_precision="ieee")
    else:
        return tl.dot(w, x.T, acc, input_precision="ieee")


@triton.jit
def silu_mul(gate, up, dtype: tl.constexpr):
    """The activation kernel's result (activation.py) from float32 sums, with its roundings but the last."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)


@triton.jit
def store_sums(
    acc, out_ptr, first_row, first_col, rows, n_out, split, X_LEFT: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """acc, transposed where not X_LEFT, into out [rows, n_out] from (first_row, first_col) on; with PARTS into the
    matrix `split` of [splits, rows, n_out]."""
    if not X_LEFT:
        acc = tl.trans(acc)
    row = tl.arange(0, acc.shape[0])[:, None]
    col = first_col + tl.arange(0, acc.shape[1])[None, :]
    out_ptr += first_row.to(tl.int64) * n_out
    if PARTS:
        out_ptr += split.to(tl.int64) * rows * n_out
    live = (row < rows - first_row) & (col < n_out)
    tl.store(out_ptr + row * n_out + col, acc.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def decode_gemm_kernel(
    X, W, w_ptr, out_ptr, rows, n_out, k,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, PARTS: tl.constexpr, X_LEFT: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, tiles of weights, splits of K). X and W are descriptors of x [rows, k] and of the weights
    [n_out, k], or [2 n_out, k] where GATED: then a program has BLOCK_N gates and the BLOCK_N ups that belong to them.
    out [rows, n_out]; with PARTS [splits, rows, n_out], a sum for each split.
    """
    split, splits = tl.program_id(2), tl.num_programs(2)
    first_row = tl.program_id(0) * BLOCK_M
    first_col = tl.program_id(1) * BLOCK_N
    steps = tl.cdiv(k, BLOCK_K)
    begin, end = steps * split // splits, steps * (split + 1) // splits
    wait_for_rows(w_ptr, first_col, n_out, begin * BLOCK_K, k, BLOCK_N, GATED, PREFETCH, PDL)

    acc = tl.zeros([BLOCK_M, BLOCK_N] if X_LEFT else [BLOCK_N, BLOCK_M], dtype=tl.float32)
    if GATED:
        up = tl.zeros(acc.shape, dtype=tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        x = X.load([first_row, step * BLOCK_K])
        acc = multiply(x, W.load([first_col, step * BLOCK_K]), acc, X_LEFT)
        if GATED:
            up = multiply(x, W.load([n_out + first_col, step * BLOCK_K]), up, X_LEFT)

    if GATED:
        acc = silu_mul(acc, up, out_ptr.dtype.element_ty)
    store_sums(acc, out_ptr, first_row, first_col, rows, n_out, split, X_LEFT, PARTS)


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
    tile_rows = config.block_n * (2 if gated else 1)
    grid = (triton.cdiv(rows, config.block_m), triton.cdiv(n_out, config.block_n), config.split_k)
    readable = min(rows_in_memory(x), grid[0] * config.block_m)
    decode_gemm_kernel[grid](
        TensorDescriptor(x, [readable, k], [k, 1], [config.block_m, config.block_k]),
        TensorDescriptor(weight, list(weight.shape), [k, 1], [config.block_n, config.block_k]),
        weight, out, rows=rows, n_out=n_out, k=k,
        BLOCK_N=config.block_n, BLOCK_M=config.block_m, BLOCK_K=config.block_k, STAGES=config.stages,
        GATED=gated, PARTS=parts, X_LEFT=config.block_n < 64,
        PREFETCH=prefetched_columns(PREFETCH_BYTES, tile_rows, weight.element_size(), k),
        num_warps=config.num_warps, **pdl_options(x.device, pdl),
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
