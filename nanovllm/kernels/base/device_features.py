"""What a device can do that not all can."""

from functools import cache

import torch


@cache  # it is asked at every launch
def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel's start may overlap the end of the one before it (pdl.py)."""
    return _is_hopper_or_later(device)


def supports_tma(device: torch.device) -> bool:
    """Whether it has the bulk tensor copy engine."""
    return _is_hopper_or_later(device)


def _is_hopper_or_later(device: torch.device) -> bool:
    """A GPU of compute capability 9.0 or more."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
