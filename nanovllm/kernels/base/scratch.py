"""Memory in which programs of a kernel leave sums to each other."""

from functools import cache

import torch
from torch import Tensor

from nanovllm.kernels.plan.config import SCRATCH_FLOATS


def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for partial sums, float32 [SCRATCH_FLOATS], and int32 [16384] for what says that they are there, zeros,
    which every launch leaves so. Shared by the launches of the current stream: they are ordered by it."""
    return _workspace(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@cache
def _workspace(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("run a kernel that needs it once before capturing it: the workspace must outlive the graph")
    return torch.empty(SCRATCH_FLOATS, device=device), torch.zeros(1 << 14, dtype=torch.int32, device=device)
