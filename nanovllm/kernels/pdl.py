"""Programmatic dependent launch: a kernel's start overlaps the end of the one before it.

A kernel launched so must call `gdc_wait` in every program before it touches anything that an earlier kernel writes;
then chains of such kernels, and of ordinary ones among them, read what they should.
"""

from functools import cache

import torch


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether `device` can: compute capability 9.0 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """For the launch of a kernel that takes PDL as a constant: that, and Triton's own option where it is on."""
    return {"PDL": True, "launch_pdl": True} if wanted and supports_pdl(device) else {"PDL": False}
