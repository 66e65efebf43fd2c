"""Kernels run compiled in bfloat16 where there is a CUDA device, and by Triton's interpreter in float32 elsewhere."""

import ctypes
import os
from collections.abc import Iterator
from typing import Any

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


@pytest.fixture
def forget_cublas_lt() -> Iterator[None]:
    """Nothing that was found out about one library serves a test with another."""
    from nanovllm.kernels.gemm import cublas_lt as lt
    from nanovllm.layers import few_rows
    from nanovllm.runner import tuning

    caches: Any = (lt.library, lt._handle, lt.description, lt.plan, lt._product, lt._initialised)
    caches += (few_rows._suits, tuning._warn)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def fake_cublas_lt(forget_cublas_lt: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A ColumnMajorLibrary in the place of libcublasLt."""
    from column_major_library import ColumnMajorLibrary

    from nanovllm.kernels.gemm import cublas_lt as lt

    made = ColumnMajorLibrary()
    monkeypatch.setattr(lt, "library", lambda: made)
    monkeypatch.setattr(lt, "_handle", lambda device: None)
    monkeypatch.setattr(lt, "_stream", lambda device: 0)
    return made


@pytest.fixture
def no_library(forget_cublas_lt: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
