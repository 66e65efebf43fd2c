"""Programmatic dependent launch: a kernel's start overlaps the end of the one before it.

A kernel launched so must call `gdc_wait` in every program before it touches anything that an earlier kernel writes;
then chains of such kernels, and of ordinary ones among them, read what they should.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from nanovllm.kernels.base.device_features import supports_pdl

_allowed: ContextVar[bool] = ContextVar("dependent_launch", default=True)


def pdl_options(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """For the launch of a kernel that takes PDL as a constant: that, and Triton's own option where it is on."""
    dependent = wanted and _allowed.get() and supports_pdl(device)
    return {"PDL": True, "launch_pdl": True} if dependent else {"PDL": False}


@contextmanager
def ordinary_launch() -> Iterator[None]:
    """Within it this thread launches nothing dependently; what a graph captures there stays so."""
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)
