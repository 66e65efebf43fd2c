"""Experts' weights of 4 bits: as they lie in memory, and their products by tiles of the rows that chose one expert.

The kernel knows a format by three facts: the code of a number, the columns of a group, and what the group's scale is. A
tile of weights is on the left of the product, widened in registers from words that already are a thread's part of that
operand. Sums are those of 128 columns, each begun anew, times a factor, added up in float32: a row's bits depend on
blocks of 128 columns alone, not on the tile or on other rows.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.gemm.int4 import SPAN, Int4Weight, widen_reference
from nanovllm.kernels.moe.packed_kernel import packed_tile_kernel
from nanovllm.kernels.moe.routing import Routing
from nanovllm.kernels.plan.config import INT4, GemmConfig

E2M1, E2M1_GROUP = "e2m1", 32
MOST_EXPONENT = 128
"""Largest exponent, of bias 127, of the scale of a group: the kernel makes a number's bits exact by 2^126 times it."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class PackedExperts:
    """Weights [experts, n, k].

    words: int16 [experts, ceil(k / 128), n, 32]; word i of a block has the columns i, i + 32, i + 64, i + 96. code
    "int4": as Int4Weight has them, and scales [experts, groups, n, 2]. code "e2m1" (1 bit of sign, 2 of exponent, 1 of
    mantissa): as `arranged` says, and scales int32 [experts, ceil(k / 128), n], of which byte p is 126 more than the
    exponent, with bias 127, of the power of two of columns 32 p to 32 p + 31 (OCP Microscaling Formats 1.0, 5.4).
    """

    words: Tensor
    scales: Tensor
    code: str
    group: int
    has_zeros: bool
    k: int

    @property
    def n(self) -> int:
        return self.words.shape[2]

    def widened(self, expert: int) -> Tensor:
        """The weight [n, k] of one expert in float32, without rounding; by plain PyTorch."""
        words, scales = self.words[expert], self.scales[expert]
        if self.code == INT4:
            return widen_reference(Int4Weight(words, scales.float(), self.group, self.has_zeros, self.k))
        codes = _codes(words.transpose(0, 1).int() & 0xFFFF).flatten(1)
        values = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], device=codes.device)[codes]
        exponents = torch.stack([scales.T >> 8 * p & 255 for p in range(4)], -1).flatten(1) - 126 - 127
        return torch.ldexp(values, exponents.repeat_interleave(self.group, 1))[:, : self.k]


def arranged(codes: Tensor) -> Tensor:
    """e2m1 numbers int32 [..., 4, 32] -> words int16 [..., 32]. Number p of the first three has its sign in bit 15 - 3p
    and its magnitude from bit 6 - 3p on, so that a shift and a mask make a bfloat16 of it, times 2^-126; the fourth is
    in bits 14, 13, 11 and 10."""
    last = codes[..., 3, :]
    word = last >> 3 << 14 | (last >> 2 & 1) << 13 | (last & 3) << 10
    for p in range(3):
        word = word | codes[..., p, :] >> 3 << 15 - 3 * p | (codes[..., p, :] & 7) << 6 - 3 * p
    return word.to(torch.int16)


def _codes(word: Tensor) -> Tensor:
    """Inverse of `arranged`, of words int32: [..., 32] -> [..., 4, 32]."""
    planes = [(word >> 12 - 3 * p & 8) | (word >> 6 - 3 * p & 7) for p in range(3)]
    return torch.stack([*planes, (word >> 11 & 8) | (word >> 11 & 4) | (word >> 10 & 3)], -2)


def words_of(blocks: Tensor) -> Tensor:
    """e2m1 numbers uint8 [..., groups, 16], the lower half of a byte first -> words int16 [..., blocks of 128, 32]."""
    four = F.pad(blocks, (0, 0, 0, -blocks.shape[-2] % 4)).unflatten(-2, (-1, 4))
    return arranged(torch.stack([four & 15, four >> 4], -1).flatten(-2).int())


def scales_of(exponents: Tensor) -> Tensor:
    """Exponents uint8 [..., groups], at most MOST_EXPONENT -> int32 [..., blocks of 128]."""
    four = F.pad(exponents, (0, -exponents.shape[-1] % 4)).unflatten(-1, (-1, 4)).int() + 126
    return four[..., 0] | four[..., 1] << 8 | four[..., 2] << 16 | four[..., 3] << 24


def quantize(wide: Tensor) -> tuple[Tensor, Tensor]:
    """wide [..., columns], a multiple of 32 -> blocks uint8 [..., groups, 16] and exponents uint8 [..., groups], as a
    checkpoint has them. A group's power of two is that of its largest magnitude / 4, and numbers are rounded to the
    nearest, of two equally near to the even one, and cut at 6 (OCP Microscaling Formats 1.0, 6.3)."""
    grouped = wide.float().contiguous().unflatten(-1, (-1, E2M1_GROUP))
    exponents = (torch.frexp(grouped.abs().amax(-1)).exponent - 1 - 2 + 127).clamp(0, MOST_EXPONENT)
    scaled = torch.ldexp(grouped, 127 - exponents.unsqueeze(-1))
    # Between two neighbours the even one, whose last bit is 0, wins on both sides.
    magnitude = scaled.abs()
    ends = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=wide.device)
    codes = torch.bucketize(magnitude, ends) + ((magnitude.unsqueeze(-1) == ends[1::2]).any(-1)).int()
    codes = codes.to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4, exponents.to(torch.uint8)


def multiply(
    x: Tensor, weight: PackedExperts, routing: Routing, config: GemmConfig, bias: Tensor | None, out: Tensor,
    gated: bool, activation: tuple[float | None, float | None],
) -> Tensor:  # fmt: skip
    """Fills and returns `out`: if gated [T * top_k, I], of x [T, H], else [top_k, T, H], of that; see moe/experts.py.
    activation: alpha and limit."""
    if x.shape[1] != weight.k or not x.is_contiguous():
        raise ValueError(f"4-bit experts [{weight.n}, {weight.k}] do not fit x {list(x.shape)}, {x.stride()}")
    grid = (triton.cdiv(out.shape[-1], config.block_n), routing.tiles.shape[0])
    packed_tile_kernel[grid](
        x, weight.words, weight.scales, bias, routing.tiles, routing.order, routing.weights, out, routing.num_tokens,
        out.shape[-1], weight.k, 1.0, TOP_K=routing.top_k, GATED=gated, ALPHA=activation[0], LIMIT=activation[1],
        CODE=weight.code, GROUP=weight.group, HAS_ZEROS=weight.has_zeros, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, STAGES=config.stages, EVEN_K=weight.k % SPAN == 0, PTX=x.is_cuda,
        PAIRED=gated and weight.n == 2 * out.shape[-1], num_warps=config.num_warps, **pdl_options(x.device),
    )  # fmt: skip
    return out
