"""Products by weights of 4 and 8 bits (W4A16, W8A16): integers, of which a weight is (q - zero) * scale, one scale and
zero for each group of columns, or 4-bit floats (e2m1.py).

Scales of integers have the dtype of x. The kernel reads memory at 4 or 8 bits a weight, multiplies x by the integers q
- zero, or by floats times their scale, and each group's float32 sums by its scale or factor: no weight is rounded. For
many rows a range of weight rows at a time is widened into scratch memory that stays in the L2 cache, rounded to the
dtype of x, and the library multiplies.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.padded_rows import empty_product
from nanovllm.kernels.base.triton_import import HAS_TRITON, triton
from nanovllm.kernels.gemm import e2m1
from nanovllm.kernels.gemm.dense import library_linear
from nanovllm.kernels.gemm.e2m1 import E2M1, MX_GROUP, NV_GROUP, SPAN
from nanovllm.kernels.gemm.int4_kernel import int4_gemm_kernel, int4_widen_kernel
from nanovllm.kernels.plan.config import INT4, INT8, SCRATCH_FLOATS, GemmConfig

WORDS = {INT4: 32, INT8: 64, E2M1: 32}
"""Words of a block, by code."""
GROUPS = {INT4: (0, 32, 64, SPAN), INT8: (0, SPAN), E2M1: (NV_GROUP, MX_GROUP)}
"""Columns of a group, by code."""
ZERO = 8
"""Code that stands for 0 in a weight without zeros of its own."""
PREFETCH_BYTES = 8 << 20
"""Bytes of all programs' words to bring into L2 before they may start: more would drive out what other kernels use."""
WIDENED_BYTES = 32 << 20
"""Bytes of weights widened at a time: what is written is read again from the L2 cache."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight [n, k], or those of experts, with one dimension more in front.

    words: int16 [ceil(k / 128), n, 32], the columns of a block for each row. code "int4": word i of a block has the
    columns i, i + 32, i + 64, i + 96, the first in its lowest bits; "int8": of 64 words, i and i + 64; "e2m1": see
    e2m1.words_of. group: columns of one: 32, 64 or 128, or 0: one for all; of "int8" 0 or 128; of "e2m1" 16 or 32.

    scales: of integers [number of groups, n, 2], scale and zero in the dtype of x, as many groups as the padded columns
    have; of "e2m1" int32 [sets of four groups, n] (e2m1.scales_of). has_zeros: some zero of "int4" may be another than
    8. factors: float32 [n], on the sums of "e2m1": 1, or in groups of 16 NV_FACTOR times the tensor's scale; experts of
    groups of 32 have none.
    """

    words: Tensor
    scales: Tensor
    code: str
    group: int
    has_zeros: bool
    k: int
    factors: Tensor | None = None

    @classmethod
    def empty(
        cls, n: int, k: int, group: int, has_zeros: bool, dtype: torch.dtype, device: torch.device,
        stack: tuple[int, ...] = (), code: str = INT4,
    ) -> "PackedWeight":  # fmt: skip
        """Weight of zeros; stack: dimensions in front of it."""
        check_group(group, code)
        blocks = -(-k // SPAN)
        words = torch.zeros(*stack, blocks, n, WORDS[code], dtype=torch.int16, device=device)
        if code == E2M1:
            shape = (*stack, blocks * (SPAN // (4 * group)), n)
            has_factors = group == NV_GROUP or not stack
            factors = torch.ones(*stack, n, dtype=torch.float32, device=device) if has_factors else None
            return cls(words, torch.zeros(shape, dtype=torch.int32, device=device), code, group, False, k, factors)
        groups = torch.zeros(*stack, -(-blocks * SPAN // group) if group else 1, n, 2, dtype=dtype, device=device)
        groups[..., 1] = ZERO if code == INT4 else 0
        return cls(words, groups, code, group, has_zeros, k)

    @property
    def n(self) -> int:
        return self.words.shape[-2]

    def of_expert(self, index: int | None) -> "PackedWeight":
        """The weight of one expert; of None, which there is no more than one of, this."""
        if index is None:
            return self
        factors = None if self.factors is None else self.factors[index]
        return replace(self, words=self.words[index], scales=self.scales[index], factors=factors)

    def widened(self, expert: int | None = None) -> Tensor:
        """The weight [n, k], or of one expert, in float32, without rounding; by plain PyTorch."""
        held = self.of_expert(expert)
        if self.code == E2M1:
            return e2m1.widened(held.words, held.scales, self.group, held.factors)[:, : self.k]
        by_column = held.scales.float().repeat_interleave(self.group or self.k, dim=0)[: self.k]
        scale, zero = by_column.permute(2, 1, 0)
        codes = unpack(held.words, self.k) if self.code == INT4 else unpack_bytes(held.words, self.k)
        return (codes.float() - zero) * scale


def check_group(group: int, code: str = INT4) -> None:
    """Raises ValueError for a size of groups that the kernels do not take."""
    if group not in GROUPS[code]:
        raise ValueError(f"groups of {group} columns of {code}: must be one of {GROUPS[code]}, 0 for all")


def check_fits(x: Tensor, weight: PackedWeight) -> None:
    """Raises ValueError where x is not contiguous [M, k] in the dtype of the scales of integers [n, k]."""
    is_other = weight.code != E2M1 and x.dtype != weight.scales.dtype
    if x.shape[1] != weight.k or is_other or not x.is_contiguous():
        found = f"x {list(x.shape)} of {x.dtype}, strides {x.stride()}"
        raise ValueError(f"{weight.code} weight [{weight.n}, {weight.k}] of {weight.scales.dtype} does not fit {found}")


def pack(codes: Tensor) -> Tensor:
    """uint8 [n, k], numbers of 4 bits -> words [ceil(k / 128), n, 32]; padding is 0."""
    n, k = codes.shape
    blocks = -(-k // SPAN)
    planes = F.pad(codes, (0, blocks * SPAN - k)).view(n, blocks, 4, -1).int()
    words = planes[:, :, 0] | planes[:, :, 1] << 4 | planes[:, :, 2] << 8 | planes[:, :, 3] << 12
    return words.to(torch.int16).transpose(0, 1).contiguous()


def unpack(words: Tensor, k: int) -> Tensor:
    """Inverse of `pack`: words -> uint8 [n, k]."""
    wide = words.transpose(0, 1).int()
    planes = torch.stack([wide >> shift & 15 for shift in (0, 4, 8, 12)], dim=2)
    return planes.flatten(1)[:, :k].to(torch.uint8)


def pack_bytes(codes: Tensor) -> Tensor:
    """int8 [..., k] -> words int16 [..., ceil(k / 128), 64], as `pack` but for the order of dimensions."""
    low, high = F.pad(codes, (0, -codes.shape[-1] % SPAN)).unflatten(-1, (-1, 2, 64)).int().unbind(-2)
    return (low & 255 | high << 8).to(torch.int16)


def unpack_bytes(words: Tensor, k: int) -> Tensor:
    """int8 numbers of words [blocks, n, 64] -> int32 [n, k]."""
    wide = words.transpose(0, 1).int()
    return torch.stack([wide << 24 >> 24, wide >> 8], 2).flatten(1)[:, :k]


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
    x: Tensor, weight: PackedWeight, config: GemmConfig, *, gated: bool = False, delta: Tensor | None = None
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
        x, weight.words, weight.scales, weight.factors, out, scratch, counters, delta, rows=rows, n=weight.n,
        n_out=n_out, k=k, ROWS=config.block_m, BLOCK_N=config.block_n, STAGES=config.stages, CODE=weight.code,
        GROUP=weight.group, HAS_ZEROS=weight.has_zeros, PAIRED=gated, ADDS_UP=adds_up,
        PREFETCH=_prefetched(grid, 2 * config.block_n * weight.words.shape[2], blocks), EVEN_K=k % SPAN == 0,
        EVEN_N=n_out % outputs == 0, PTX=x.is_cuda, num_warps=config.num_warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


def _prefetched(grid: tuple[int, int, int], nbytes: int, blocks: int) -> int:
    """Blocks, of so many bytes of words, of each program, a power of two: of PREFETCH_BYTES, and no more than it goes
    through."""
    wanted = min(PREFETCH_BYTES // (grid[1] * grid[2] * nbytes), blocks // grid[2])
    return 1 << (max(1, min(16, wanted)).bit_length() - 1)
