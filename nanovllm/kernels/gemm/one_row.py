"""y = f(x) @ W^T for one row, where K is so short that a program holds all of its weights in shared memory: with the
bits of decode.py and of the kernels before it, for EngineConfig.exact_bits.

A step of a small model is a chain of short kernels, each of which waits for the one before it. So a program fetches its
weights before it waits, and what was a kernel of its own between two products is computed anew by every program: the
sum, the addition and the norm of a joint, or the activation. The row is one column of a tile for the tensor cores,
whose order along K is that of every other tile.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.padded_rows import empty_rows
from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.gemm.choice import GemmConfig
from nanovllm.kernels.gemm.decode import silu_mul
from nanovllm.kernels.pointwise.activation import silu_mul_reference
from nanovllm.kernels.pointwise.norm import Norm, add_norms_reference, load_sum, norm_row

COLUMNS = 1024
"""Most columns of K that a program holds, of 64 weight rows: 128 KB."""
_BLOCK_N, _ROWS = 64, tl.constexpr(16)  # the least that a matrix instruction of Hopper takes, and Triton gives it


class Unnormed(NamedTuple):
    """A row before its joint (layers/norm.py), an addition and a norm of kind "rms", which the product takes in."""

    partial: Tensor
    """[1, H], or float32 [parts, 1, H]."""
    residual: Tensor
    """[1, H]"""
    norm: Norm
    total: Tensor
    """[1, H]: becomes residual + partial as the product runs. Not `residual`, which other programs still read."""

    @property
    def shape(self) -> torch.Size:
        return self.residual.shape


class Gated(NamedTuple):
    """silu(gates) * ups, which the product computes."""

    gates_and_ups: Tensor
    """[1, 2 I]"""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((1, self.gates_and_ups.shape[1] // 2))


Row = Tensor | Unnormed | Gated


def config_for(k: int, parts: int) -> GemmConfig | None:
    """This kernel over so many parts of K; None where a program does not hold one, or they are no powers of two."""
    block_k = triton.next_power_of_2(k // parts)
    if block_k > COLUMNS or (parts > 1 and block_k * parts != k):
        return None
    return GemmConfig("one_row", _BLOCK_N, _ROWS.value, block_k, 1, parts)


@triton.jit
def one_row_kernel(
    X, RESIDUAL, GAIN, TOTAL, W, OUT, n_out, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    X_PARTS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of weights, parts of K of BLOCK_K columns). W: a descriptor of the weights. Where there is a RESIDUAL
    the row is that of an Unnormed whose partial has X_PARTS, with GATED that of a Gated. OUT [parts, n_out]."""
    first_col, part = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    cols = part * BLOCK_K + tl.arange(0, BLOCK_K)
    live = cols < K
    w = W.load([first_col, part * BLOCK_K])
    if RESIDUAL is not None:
        gain = tl.load(GAIN + cols, mask=live, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # not before: those after these would take their place
        tl.extra.cuda.gdc_wait()

    if RESIDUAL is not None:
        residual = tl.load(RESIDUAL + cols, mask=live, other=0.0)
        x = load_sum(X, K, cols, live, X_PARTS, residual.dtype)
        total = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        x = norm_row(total, gain, 0.0, eps, live, K, "rms", False)
    elif GATED:
        gate = tl.load(X + cols, mask=live, other=0.0).to(tl.float32)
        x = silu_mul(gate, tl.load(X + K + cols, mask=live, other=0.0).to(tl.float32), w.dtype).to(w.dtype)
    else:
        x = tl.load(X + cols, mask=live, other=0.0)
    for _ in tl.static_range(4):  # the first of _ROWS columns, next to each other in a thread's registers
        x = tl.join(x, tl.zeros_like(x))
    acc = tl.zeros([BLOCK_N, _ROWS], dtype=tl.float32)
    acc = tl.dot(w, tl.reshape(x, [BLOCK_K, _ROWS]), acc, input_precision="ieee")
    y = tl.sum(tl.where((tl.arange(0, _ROWS) == 0)[None, :], acc, 0.0), 1)  # one addend is not zero
    col = first_col + tl.arange(0, BLOCK_N)
    tl.store(OUT + part * n_out + col, y.to(OUT.dtype.element_ty), mask=col < n_out)
    if RESIDUAL is not None:
        tl.store(TOTAL + cols, total, mask=live & (first_col == 0))


def linear(x: Row, weight: Tensor, config: GemmConfig, *, pdl: bool = True) -> Tensor:
    """x [1, K] @ weight [N, K]^T: [1, N], or float32 [config.split_k, 1, N], sums over parts of K. Fills x.total."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    (n, k), parts, tile = weight.shape, config.split_k, [config.block_n, config.block_k]
    if x.shape != (1, k) or (parts > 1 and parts * config.block_k != k) or k > parts * config.block_k:
        raise ValueError(f"one row of {parts} x {config.block_k} columns expected, got {list(x.shape)} and K = {k}")
    total = norm = residual = None
    given = x
    if isinstance(x, Unnormed):
        given, residual, norm, total = x
    elif isinstance(x, Gated):
        [given] = x
    assert isinstance(given, Tensor)
    if not (given.is_contiguous() and weight.is_contiguous()):
        raise ValueError("contiguous tensors expected")
    if parts > 1:
        out = given.new_empty(parts, 1, n, dtype=torch.float32)
    else:
        out = empty_rows(1, n, weight.dtype, weight.device)
    one_row_kernel[(triton.cdiv(n, config.block_n), parts)](
        given, residual, norm and norm.weight, total, TensorDescriptor(weight, [n, k], [k, 1], tile), out, n,
        norm.eps if norm else 0.0, K=k, BLOCK_K=config.block_k, BLOCK_N=config.block_n,
        X_PARTS=len(given) if given.dim() == 3 else 1, GATED=isinstance(x, Gated), num_warps=config.num_warps,
        **pdl_options(weight.device, pdl),
    )  # fmt: skip
    return out


def row_reference(x: Row) -> Tensor:
    """The row that is multiplied, [1, K], by the plain twins; fills x.total."""
    if isinstance(x, Unnormed):
        row, total = add_norms_reference(x.partial, x.residual.clone(), x.norm)
        x.total.copy_(total)
        return row
    return silu_mul_reference(x.gates_and_ups) if isinstance(x, Gated) else x
