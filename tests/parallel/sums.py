"""Plain twin of every sum through peer memory."""

import torch

from nanovllm.kernels.pointwise.norm import Norm, norm_reference


def sum_reference(
    addends: torch.Tensor, residual: torch.Tensor | None, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """addends [ranks, rows, hidden], residual [rows, hidden] or None (zeros) -> (normalised, sum of the addends in the
    order of ranks + residual), both [rows, hidden] in the dtype of the addends."""
    total = torch.zeros_like(addends[0], dtype=torch.float32)
    for addend in addends:
        total = total + addend.float()
    x = (total if residual is None else total + residual.float()).to(addends.dtype)
    return norm_reference(x, norm), x
