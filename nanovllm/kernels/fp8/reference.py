"""FP8 products as one definition, and its plain twin; the kernels of this room compute the same.

Numbers are e4m3 (Micikevicius et al., arXiv 2209.05433), whose largest is 448. A row of activations is cut into groups
of 128 columns. Each group has a scale, its largest magnitude / 448 (or one that the checkpoint gives), and is rounded
to e4m3 after the division by it. A product is

    y[t, n] = sum over groups g, in order, of  sx[t, g] * sw[n, g] * sum over k in g of xq[t, k] * wq[n, k]

in float32. A weight has a scale for each block of 128 x 128 or for each row. So a row of the result depends on no other
row, and ranks that cut columns at multiples of 128 add up the same terms.
"""

import torch
from torch import Tensor

from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_MAXIMUM = 1e-10
"""A group's largest magnitude counts as at least this much: scales are never zero."""
GROUP = 128
"""Columns that share a scale of activations."""
BLOCK = 128
"""Rows and columns of a block of weights that share a scale."""


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp_(-LARGEST, LARGEST).to(FP8)


def _scale(magnitudes: Tensor, dim: tuple[int, ...]) -> Tensor:
    largest = magnitudes.amax(dim, keepdim=True).clamp_min(SMALLEST_MAXIMUM)
    return largest / torch.full_like(largest, LARGEST)  # on a GPU a number would be multiplied by its reciprocal


def _groups(x: Tensor) -> Tensor:
    """[T, K] -> [T, groups, 128], zeros behind the last column."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> e4m3 [N, K], float32 scales [N, 1] of the rows."""
    wide = weight.float()
    scale = _scale(wide.abs(), (1,))
    return _rounded(wide, scale), scale


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> e4m3 [N, K], float32 scales [N / 128, K / 128], rounded up, of blocks from the first element
    on."""
    rows, columns = weight.shape
    wide = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = wide.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [N / 128, 128, K / 128, 128]
    scale = _scale(blocks.abs(), (1, 3))
    values = _rounded(blocks, scale).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return values.contiguous(), scale[:, 0, :, 0]


def quantize_rows_reference(x: Tensor, input_scale: Tensor | None = None) -> FP8Rows:
    """x [T, K], rounded to e4m3. input_scale float32 [count]: the largest of them is the scale of every group."""
    wide = x.float()
    grouped = _groups(wide)
    if input_scale is None:
        scale = _scale(grouped.abs(), (2,))
    else:
        scale = input_scale.max().expand(*grouped.shape[:2], 1)
    values = _rounded(grouped, scale).flatten(1)[:, : x.shape[1]]
    return FP8Rows(values.contiguous(), scale[..., 0].contiguous(), x.dtype)


def widened_products(x: FP8Rows, weight: FP8Weight, delta: Tensor | None = None) -> Tensor:
    """x @ weight^T on a GPU that cannot multiply e4m3: widened, which is exact, and multiplied by the library. x [T, K]
    -> [T, N]. delta float32 [T, N]: added to it before it is rounded."""
    total = torch.zeros(x.shape[0], weight.values.shape[0], dtype=torch.float32, device=weight.values.device)
    n = weight.values.shape[0]
    pairs = zip(x.values.half().split(GROUP, 1), weight.values.half().split(GROUP, 1), strict=True)
    for group, (of_x, of_weight) in enumerate(pairs):
        if total.is_cuda:
            products = torch.mm(of_x, of_weight.t(), out_dtype=torch.float32)
        else:
            products = of_x.float() @ of_weight.float().t()
        factor = x.scales[:, group, None]
        if weight.in_blocks:
            factor = factor * weight.scale[:, group].repeat_interleave(weight.rows_each)[:n]
        total.addcmul_(products, factor)
    total = total if weight.in_blocks else total * weight.scale[:, 0]
    return (total if delta is None else total + delta).to(x.dtype)


def linear_reference(x: FP8Rows, weight: FP8Weight) -> Tensor:
    """x [T, K] @ weight [N, K]^T -> float32 [T, N]; see the head of this file.

    A group's sum of products is exact in float64, so the number of rows does not change how it is rounded.
    """
    exact = torch.einsum("tgk,ngk->gtn", _groups(x.values.double()), _groups(weight.values.double())).float()
    of_rows = weight.scale.repeat_interleave(weight.rows_each, 0)[: weight.values.shape[0]]
    total = torch.zeros_like(exact[0])
    for group, products in enumerate(exact):
        factor = x.scales[:, group, None]
        total += products * (factor * of_rows[:, group] if weight.scale.shape[1] > 1 else factor)
    return total if weight.scale.shape[1] > 1 else total * of_rows[:, 0]
