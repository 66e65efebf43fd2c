"""Kernels are decorated when they are imported, so their interpreter is switched on before any test module here is."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets PyTorch's attention compute at once on a CPU, where it otherwise makes a graph for each shape first."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
