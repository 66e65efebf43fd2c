"""Kernels are decorated when they are imported, so their interpreter is switched on before any test module here is."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
