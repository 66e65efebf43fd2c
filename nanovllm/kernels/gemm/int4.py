"""Products by 4-bit weights (W4A16): a weight is (q - zero) * scale, q and zero of 4 bits, one scale and zero for each
group of columns.

Scales have the dtype of x. The kernel reads memory at 4 bits a weight, multiplies x by the integers q - zero, and each
group's float32 sums by its scale: no weight is rounded. For many rows a range of weight rows at a time is widened into
scratch memory that stays in the L2 cache, rounded to the dtype of x, and the library multiplies.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.padded_rows import empty_product
from nanovllm.kernels.base.triton_import import HAS_TRITON, triton
from nanovllm.kernels.gemm.dense import library_linear
from nanovllm.kernels.gemm.int4_kernel import int4_gemm_kernel, int4_widen_kernel
from nanovllm.kernels.plan.config import SCRATCH_FLOATS, GemmConfig

SPAN = 128
"""Columns of a block of the layout; the last one is padded."""
WORDS = 32
ZERO = 8
"""Code that stands for 0 in a weight without zeros of its own."""
PREFETCH_BYTES = 8 << 20
"""Bytes of all programs' words to bring into L2 before they may start: more would drive out what other kernels use."""
WIDENED_BYTES = 32 << 20
"""Bytes of weights widened at a time: what is written is read again from the L2 cache."""


@dataclass(frozen=True)
class Int4Weight:
    """A weight [n, k].

    words: int16 [ceil(k / 128), n, 32]; word i of a block has the columns i, i + 32, i + 64, i + 96, the first in its
    lowest bits. groups: [number of groups, n, 2], scale and zero in the dtype of x; group: columns of one, 32, 64 or
    128, or 0: one for all. There are as many groups as the padded columns have. has_zeros: some zero may
    be another than 8.
    """

    words: Tensor
    groups: Tensor
    group: int
    has_zeros: bool
    k: int

    @classmethod
    def empty(
        cls, n: int, k: int, group: int, has_zeros: bool, dtype: torch.dtype, device: torch.device,
        stack: tuple[int, ...] = (),
    ) -> "Int4Weight":  # fmt: skip
        """Weight of zeros; stack: dimensions in front of it."""
        check_group(group)
        blocks = -(-k // SPAN)
        groups = torch.zeros(*stack, -(-blocks * SPAN // group) if group else 1, n, 2, dtype=dtype, device=device)
        groups[..., 1] = ZERO
        words = torch.zeros(*stack, blocks, n, WORDS, dtype=torch.int16, device=device)
        return cls(words, groups, group, has_zeros, k)

    @property
    def n(self) -> int:
        return self.words.shape[1]


def check_group(group: int) -> None:
    """Raises ValueError for a size of groups that the kernels do not take."""
    if group not in (0, 32, 64, SPAN):
        raise ValueError(f"groups of {group} columns: must be of 32, 64 or 128, or one for all (0)")


def check_fits(x: Tensor, weight: Int4Weight) -> None:
    """Raises ValueError where x is not contiguous [M, k] in the dtype of the scales of the weight [n, k]."""
    if x.shape[1] != weight.k or x.dtype != weight.groups.dtype or not x.is_contiguous():
        found = f"x {list(x.shape)} of {x.dtype}, strides {x.stride()}"
        raise ValueError(f"4-bit weight [{weight.n}, {weight.k}] of {weight.groups.dtype} does not fit {found}")


def pack(codes: Tensor) -> Tensor:
    """uint8 [n, k], numbers of 4 bits -> words [ceil(k / 128), n, 32]; padding is 0."""
    n, k = codes.shape
    blocks = -(-k // SPAN)
    planes = F.pad(codes, (0, blocks * SPAN - k)).view(n, blocks, 4, WORDS).int()
    words = planes[:, :, 0] | planes[:, :, 1] << 4 | planes[:, :, 2] << 8 | planes[:, :, 3] << 12
    return words.to(torch.int16).transpose(0, 1).contiguous()


def unpack(words: Tensor, k: int) -> Tensor:
    """Inverse of `pack`: words -> uint8 [n, k]."""
    wide = words.transpose(0, 1).int()
    planes = torch.stack([wide >> shift & 15 for shift in (0, 4, 8, 12)], dim=2)
    return planes.flatten(1)[:, :k].to(torch.uint8)


def quantize(wide: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """wide [n, k] rounded to 4 bits around a zero of 8, as compressed-tensors does where it is symmetric: codes uint8
    [n, k], scales [n, groups] in `dtype`, a group's largest magnitude / 7.5 (1 where that is 0)."""
    k = wide.shape[1]
    each = group or k
    grouped = F.pad(wide.float(), (0, -k % each)).unflatten(1, (-1, each))
    scales = (grouped.abs().amax(2) / 7.5).to(dtype)
    scales[scales == 0] = 1
    codes = (grouped / scales.float().unsqueeze(2)).round().clamp(-8, 7) + ZERO
    return codes.to(torch.uint8).flatten(1)[:, :k], scales


def widen_reference(weight: Int4Weight) -> Tensor:
    """The weight [n, k] in the dtype of its scales, by plain PyTorch."""
    dtype = weight.groups.dtype
    wide = torch.promote_types(dtype, torch.float32)
    by_column = weight.groups.to(wide).repeat_interleave(weight.group or weight.k, dim=0)[: weight.k]
    scales, zeros = by_column.permute(2, 1, 0)
    return ((unpack(weight.words, weight.k).to(wide) - zeros) * scales).to(dtype)


def widen(weight: Int4Weight, first: int, end: int, out: Tensor) -> Tensor:
    """Rows [first, end) of the weight into out [end - first, k]; returns out."""
    block_n = 64
    grid = (triton.cdiv(end - first, block_n), weight.words.shape[0])
    int4_widen_kernel[grid](
        weight.words, weight.groups, out, first, end, weight.n, weight.k,
        BLOCK_N=block_n, GROUP=weight.group, HAS_ZEROS=weight.has_zeros, PTX=out.is_cuda,
    )  # fmt: skip
    return out


def linear_widened(x: Tensor, weight: Int4Weight, delta: Tensor | None = None) -> Tensor:
    """x [M, k] @ weight^T -> [M, n] by the library, a range of weight rows at a time. delta: see library_linear."""
    if not x.is_cuda or not HAS_TRITON:
        wide = widen_reference(weight)
        return F.linear(x, wide) if delta is None else library_linear(x, wide, delta)
    n, k = weight.n, weight.k
    scratch = _widened(x.device, torch.cuda.current_stream(x.device).cuda_stream, x.dtype)
    rows = max(SPAN, scratch.numel() // k // SPAN * SPAN)
    if rows * k > scratch.numel():
        raise ValueError(f"4-bit weight [{n}, {k}]: {SPAN} rows of it must fit into {WIDENED_BYTES} bytes")
    out = x.new_empty(x.shape[0], n) if delta is None else delta.to(x.dtype)
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
    x: Tensor, weight: Int4Weight, config: GemmConfig, *, gated: bool = False, delta: Tensor | None = None
) -> Tensor:
    """x [M, k] @ weight^T -> [M, n] by what `config` names; with config.parts > 1 float32 [config.parts, M, n], sums
    over parts of k. gated: the weight is [2 I, k], gates first, and the result silu(gate) * up, [M, I], rounded as the
    product and the activation by themselves do; not by "widened". delta: as in skinny.linear, added to the first
    part."""
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
        x, weight.words, weight.groups, out, scratch, counters, delta, rows=rows, n=weight.n, n_out=n_out, k=k,
        ROWS=config.block_m, BLOCK_N=config.block_n, STAGES=config.stages, GROUP=weight.group,
        HAS_ZEROS=weight.has_zeros, PAIRED=gated, ADDS_UP=adds_up, PREFETCH=_prefetched(grid, config.block_n, blocks),
        EVEN_K=k % SPAN == 0, EVEN_N=n_out % outputs == 0, PTX=x.is_cuda,
        num_warps=config.num_warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


def _prefetched(grid: tuple[int, int, int], block_n: int, blocks: int) -> int:
    """Blocks of each program, a power of two: of PREFETCH_BYTES, and no more than it goes through."""
    wanted = min(PREFETCH_BYTES // (grid[1] * grid[2] * block_n * 2 * WORDS), blocks // grid[2])
    return 1 << (max(1, min(16, wanted)).bit_length() - 1)
