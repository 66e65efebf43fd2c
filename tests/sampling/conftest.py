"""Kernels run compiled where there is a CUDA device, and by Triton's interpreter in float32 elsewhere."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel

from sampling_engines import Engines
from threads import one_thread  # noqa: F401


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="package")
def engines() -> Iterator[Engines]:
    """The demo checkpoint's engines by their options, each started once."""
    started = Engines()
    yield started
    started.close()
