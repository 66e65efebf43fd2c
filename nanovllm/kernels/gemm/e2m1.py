"""4-bit floats, e2m1 (1 bit of sign, 2 of exponent, 1 of mantissa), in groups of columns that share a scale, by plain
PyTorch: as they lie in memory, and rounding to them.

group  scale                                                                    format
32     a power of two, its exponent with bias 127 a byte (e8m0)                 MXFP4 (OCP Microscaling Formats 1.0)
16     e4m3, not negative, times a factor in float32 of the whole tensor        NVFP4
"""

import torch
import torch.nn.functional as F
from torch import Tensor

E2M1, MX_GROUP, NV_GROUP = "e2m1", 32, 16
SPAN = 128
"""Columns of a block of the layout; the last one is padded."""
MOST_EXPONENT = 128
"""Largest exponent, of bias 127, of a power of two: the kernel makes a number's bits exact by 2^126 times it."""
NV_FACTOR = 256.0
"""Factor from the kernel's numbers to what they stand for, in groups of 16: a part of PackedWeight.factors."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def arranged(codes: Tensor) -> Tensor:
    """e2m1 numbers int32 [..., 4, W] -> words int16 [..., W]. Number p of the first three has its sign in bit 15 - 3p
    and its magnitude from bit 6 - 3p on, so that a shift and a mask make a bfloat16 of it, times 2^-126; the fourth is
    in bits 14, 13, 11 and 10."""
    last = codes[..., 3, :]
    word = last >> 3 << 14 | (last >> 2 & 1) << 13 | (last & 3) << 10
    for p in range(3):
        word = word | codes[..., p, :] >> 3 << 15 - 3 * p | (codes[..., p, :] & 7) << 6 - 3 * p
    return word.to(torch.int16)


def _codes(word: Tensor) -> Tensor:
    """Inverse of `arranged`, of words int32: [..., W] -> [..., 4, W]."""
    planes = [(word >> 12 - 3 * p & 8) | (word >> 6 - 3 * p & 7) for p in range(3)]
    return torch.stack([*planes, (word >> 11 & 8) | (word >> 11 & 4) | (word >> 10 & 3)], -2)


def words_of(numbers: Tensor, group: int) -> Tensor:
    """e2m1 numbers uint8 [..., columns / 2], the lower half of a byte first -> words int16 [..., blocks of 128, 32].
    Word i of four groups, side by side, has their columns i, i + group, i + 2 group and i + 3 group."""
    codes = torch.stack([numbers & 15, numbers >> 4], -1).flatten(-2)
    padded = F.pad(codes, (0, -codes.shape[-1] % SPAN))
    return arranged(padded.unflatten(-1, (-1, 4, group)).int()).flatten(-2).unflatten(-1, (-1, SPAN // 4))


def scales_of(scales: Tensor, group: int) -> Tensor:
    """Bytes uint8 [..., groups] of e4m3, or exponents, at most MOST_EXPONENT -> int32 [..., sets of four groups], of
    which byte p is that of group p, and 126 more than an exponent."""
    four = F.pad(scales, (0, -scales.shape[-1] % 4)).unflatten(-1, (-1, 4)).int() + (126 if group == MX_GROUP else 0)
    return four[..., 0] | four[..., 1] << 8 | four[..., 2] << 16 | four[..., 3] << 24


def widened(words: Tensor, scales: Tensor, group: int, factors: Tensor | None) -> Tensor:
    """words [blocks, n, 32], scales [sets of four groups, n], factors [n] -> float32 [n, columns], without rounding."""
    word = words.transpose(0, 1).flatten(1).unflatten(1, (-1, group)).int() & 0xFFFF
    values = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], device=words.device)[_codes(word)]
    of_groups = torch.stack([scales.T >> 8 * p & 255 for p in range(4)], -1).unsqueeze(-1)
    if group == MX_GROUP:
        values = torch.ldexp(values, of_groups - 126 - 127)
    else:
        values = values * ((of_groups & 127).to(torch.uint8).view(torch.float8_e4m3fn).float() / NV_FACTOR)
    return values.flatten(1) * (1.0 if factors is None else factors[:, None])


def quantize(wide: Tensor) -> tuple[Tensor, Tensor]:
    """wide [..., columns] -> numbers uint8 [..., columns / 2] and exponents uint8 [..., groups], as a checkpoint of
    groups of 32 has them, columns padded to whole groups. A group's power of two is that of its largest magnitude / 4,
    and numbers are rounded to the nearest, of two equally near to the even one, and cut at 6 (OCP Microscaling Formats
    1.0, 6.3)."""
    grouped = F.pad(wide.float(), (0, -wide.shape[-1] % MX_GROUP)).contiguous().unflatten(-1, (-1, MX_GROUP))
    exponents = (torch.frexp(grouped.abs().amax(-1)).exponent - 1 - 2 + 127).clamp(0, MOST_EXPONENT)
    scaled = torch.ldexp(grouped, 127 - exponents.unsqueeze(-1))
    # Between two neighbours the even one, whose last bit is 0, wins on both sides.
    magnitude = scaled.abs()
    ends = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=wide.device)
    codes = torch.bucketize(magnitude, ends) + ((magnitude.unsqueeze(-1) == ends[1::2]).any(-1)).int()
    codes = codes.to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).flatten(-2), exponents.to(torch.uint8)
