"""One row's joint inside the GEMM after it: y = rms_norm(residual + sum of parts) @ W^T, with the bits of the separate
kernels (pointwise/norm.py, decode.py), for what a kernel less is worth where a step takes microseconds.

Every program adds up and normalises the row anew, which costs a few KB out of L2; one of them stores the sum. With the
activation a tile holds half gates and half ups, so that there are as many programs as without.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.padded_rows import empty_rows
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.choice import GemmConfig
from nanovllm.kernels.gemm.decode import PREFETCH_BYTES
from nanovllm.kernels.gemm.decode_kernel import silu_mul, wait_for_rows
from nanovllm.kernels.gemm.epilogue import normalise
from nanovllm.kernels.pointwise.norm import Norm, add_norms_reference, in_pairs, mean_square


class Unnormed(NamedTuple):
    """A row that the GEMM takes in."""

    partial: Tensor
    """[1, H], or float32 [parts, 1, H]."""
    residual: Tensor
    """[1, H]"""
    norm: Norm
    total: Tensor
    """[1, H]: becomes residual + partial as the GEMM runs. Another tensor than `residual`, which all programs read."""

    @property
    def shape(self) -> torch.Size:
        return self.residual.shape


def takes(config: GemmConfig) -> bool:
    """Whether the kernel here multiplies as `config` would."""
    return config.kernel == "decode" and config.split_k == 1 and config.leaves == 1 and config.block_n >= 64


@triton.jit
def _added(PARTIAL, RESIDUAL, cols, mask, K: tl.constexpr, PARTS: tl.constexpr):
    """The sum's `cols`, in the residual's dtype."""
    residual = tl.load(RESIDUAL + cols, mask=mask, other=0.0)
    parts = (tl.load(PARTIAL + cols, mask=mask, other=0.0),)
    for part in tl.static_range(1, PARTS):
        parts = parts + (tl.load(PARTIAL + part * K + cols, mask=mask, other=0.0),)
    x = in_pairs(parts).to(residual.dtype)
    return (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)


@triton.jit
def norm_decode_kernel(
    PARTIAL, RESIDUAL, NORM_WEIGHT, TOTAL, W, w_ptr, OUT, n_out, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of weights). W: a descriptor of the weights [n_out, K], or [2, n_out, K] where GATED: then half
    of BLOCK_N are gates, half the ups that belong to them. BLOCK: a power of two from K on."""
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first_col = tl.program_id(0) * COLUMNS
    wait_for_rows(w_ptr, first_col, n_out, 0, K, COLUMNS, GATED, PREFETCH, PDL)
    all_cols = tl.arange(0, BLOCK)
    total = _added(PARTIAL, RESIDUAL, all_cols, all_cols < K, K, PARTS)
    if tl.program_id(0) == 0:
        tl.store(TOTAL + all_cols, total, mask=all_cols < K)
    scale = tl.rsqrt(mean_square(total.to(tl.float32), K, True) + eps)

    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    is_row = (tl.arange(0, BLOCK_M) == 0)[:, None]
    for step in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        cols = step * BLOCK_K + tl.arange(0, BLOCK_K)
        gain = tl.load(NORM_WEIGHT + cols, mask=cols < K, other=0.0)
        x = _added(PARTIAL, RESIDUAL, cols, cols < K, K, PARTS)
        tile = tl.where(is_row, normalise(x, gain, scale)[None, :], 0.0).to(x.dtype)
        if GATED:
            w = tl.reshape(W.load([0, first_col, step * BLOCK_K]), [BLOCK_N, BLOCK_K])
        else:
            w = W.load([first_col, step * BLOCK_K])
        acc = tl.dot(w, tile.T, acc, input_precision="ieee")
    y = tl.sum(tl.where((tl.arange(0, BLOCK_M) == 0)[None, :], acc, 0.0), 1)  # one addend that is not zero
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(y, [2, COLUMNS])))
        y = silu_mul(gate, up, OUT.dtype.element_ty)
    col = first_col + tl.arange(0, COLUMNS)
    tl.store(OUT + col, y.to(OUT.dtype.element_ty), mask=col < n_out)


def linear(x: Unnormed, weight: Tensor, config: GemmConfig) -> Tensor:
    """The normalised row @ weight [N, K]^T: [1, N]. Fills x.total."""
    return _launch(x, weight, weight.shape[0], config, False)


def linear_silu_mul(x: Unnormed, gate_up_weight: Tensor, config: GemmConfig) -> Tensor:
    """silu(gate) * up of it for gate_up_weight [2 I, K], gates first: [1, I]. Fills x.total."""
    return _launch(x, gate_up_weight, gate_up_weight.shape[0] // 2, config, True)


def normed_reference(x: Unnormed) -> Tensor:
    """The normalised row [1, K], by the plain twins; fills x.total."""
    normed, total = add_norms_reference(x.partial, x.residual.clone(), x.norm)
    x.total.copy_(total)
    return normed


def _launch(x: Unnormed, weight: Tensor, n_out: int, config: GemmConfig, gated: bool) -> Tensor:
    from triton.tools.tensor_descriptor import TensorDescriptor

    k = weight.shape[1]
    if x.shape != (1, k) or not takes(config):
        raise ValueError(f"a row of {k} columns and whole sums expected, got {list(x.shape)} and {config}")
    if not (x.partial.is_contiguous() and x.residual.is_contiguous() and weight.is_contiguous()):
        raise ValueError("contiguous tensors expected")
    out = empty_rows(1, n_out, x.residual.dtype, x.residual.device)
    columns = PREFETCH_BYTES // (config.block_n * weight.element_size())
    shape, strides, tile = [n_out, k], [k, 1], [config.block_n, config.block_k]
    if gated:
        shape, strides, tile = [2, *shape], [n_out * k, *strides], [2, config.block_n // 2, config.block_k]
    norm_decode_kernel[(triton.cdiv(n_out, tile[-2]),)](
        x.partial, x.residual, x.norm.weight, x.total, TensorDescriptor(weight, shape, strides, tile), weight, out,
        n_out, x.norm.eps, K=k, BLOCK=triton.next_power_of_2(k), PARTS=len(x.partial) if x.partial.dim() == 3 else 1,
        BLOCK_N=config.block_n, BLOCK_M=16, BLOCK_K=config.block_k, STAGES=config.stages, GATED=gated,
        PREFETCH=max(64, min(columns, triton.next_power_of_2(k))), num_warps=config.num_warps,
        **pdl_options(x.residual.device),
    )  # fmt: skip
    return out
