"""SwiGLU's pointwise half (Shazeer, arXiv 2002.05202)."""

import torch
import torch.nn.functional as F


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gates first -> silu(gate) * up, [T, I]; silu(gate) is rounded to the dtype before the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
