"""The gated norm behind Mamba-2: y = norm(x * silu(z)) * weight, over each group of columns alone. Where a rank has a
share of a group, the ranks' mean squares are added up between the two kernels."""

import torch
from torch.nn.functional import silu as torch_silu

from nanovllm.kernels.base.activations import silu
from nanovllm.kernels.base.device import pdl_options, start_early
from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit
def _norm_kernel(
    OUT, Z, NORM, z_stride, eps, MEANS, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The gated norm of OUT [T, WIDTH] in place, token program_id(0), SIZE columns from program_id(1) * SIZE on, whose
    mean square is MEANS[token * GROUPS], or theirs alone where MEANS is None."""
    start_early(PDL)
    token, order = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    cols, mask = tl.program_id(1) * SIZE + order, order < SIZE
    places = OUT + token * WIDTH + cols
    z = tl.load(Z + token * z_stride + cols, mask=mask, other=0.0)
    y = tl.load(places, mask=mask, other=0.0).to(tl.float32) * silu(z.to(tl.float32))
    if MEANS is None:
        mean = tl.sum(y * y, 0) / SIZE
    else:
        mean = tl.load(MEANS + token * GROUPS)
    normed = (y * tl.rsqrt(mean + eps)).to(z.dtype).to(tl.float32)
    weight = tl.load(NORM + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, (weight * normed).to(z.dtype), mask=mask)


@triton.jit
def _squares_kernel(
    X, Z, OUT, z_stride, group, share, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """OUT float32 [T, GROUPS]: in column `group` `share` times the sum of squares of token program_id(0), else 0."""
    token, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = cols < WIDTH
    z = tl.load(Z + token * z_stride + cols, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(X + token * WIDTH + cols, mask=mask, other=0.0).to(tl.float32) * silu(z)
    found = tl.sum(y * y, 0) * share
    for column in tl.static_range(GROUPS):
        tl.store(OUT + token * GROUPS + column, tl.where(column == group, found, 0.0))


def gated_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, groups: int,
    mean_squares: torch.Tensor | None = None, group: int = 0,
) -> torch.Tensor:  # fmt: skip
    """x [T, W], z [T, W] whose rows may be strided, weight [W] -> y in x, of so many groups of columns. mean_squares:
    see gated_mean_squares; all columns are those of its `group`."""
    width = x.shape[1]
    size = width // groups
    block, found = triton.next_power_of_2(size), mean_squares
    _norm_kernel[(x.shape[0], groups)](
        x, z, weight, z.stride(0), eps, None if found is None else found[:, group:], WIDTH=width, SIZE=size,
        BLOCK=block, GROUPS=1 if found is None else found.shape[1], num_warps=max(1, min(8, block // 256)),
        **pdl_options(x.device),
    )  # fmt: skip
    return x


def gated_norm_reference(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, groups: int,
    mean_squares: torch.Tensor | None = None, group: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Plain twin of `gated_norm`, whose result is a tensor of its own."""
    y = (x.float() * torch_silu(z.float())).unflatten(1, (groups, -1))
    found = y.square().mean(-1, keepdim=True) if mean_squares is None else mean_squares[:, group, None, None]
    return weight * (y * torch.rsqrt(found + eps)).flatten(1).to(x.dtype)


def gated_mean_squares(x: torch.Tensor, z: torch.Tensor, share: float, group: int, groups: int) -> torch.Tensor:
    """Mean squares of x * silu(z), [T, W] both, by group of the whole model, this rank's part, float32 [T, groups]; the
    ranks' parts add up. All columns are of `group`; share: 1 / columns of a group."""
    out = torch.empty(x.shape[0], groups, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    _squares_kernel[(x.shape[0],)](
        x, z, out, z.stride(0), group, share, WIDTH=x.shape[1], BLOCK=block, GROUPS=groups,
        num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return out


def gated_mean_squares_reference(
    x: torch.Tensor, z: torch.Tensor, share: float, group: int, groups: int
) -> torch.Tensor:  # fmt: skip
    """Plain twin of `gated_mean_squares`."""
    out = torch.zeros(x.shape[0], groups, dtype=torch.float32, device=x.device)
    out[:, group] = (x.float() * torch_silu(z.float())).square().sum(1) * share
    return out
