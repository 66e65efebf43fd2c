"""Kernels run compiled in bfloat16 where there is a CUDA device, and by Triton's interpreter in float32 elsewhere."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["float32", pytest.param("bfloat16", marks=pytest.mark.gpu)])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    if request.param == "bfloat16" and device.type == "cpu":
        pytest.skip("the interpreter computes in float32")
    return getattr(torch, request.param)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def poison(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NaN, or the least integer: what no kernel writes."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full(shape, value, dtype=dtype, device=device)
