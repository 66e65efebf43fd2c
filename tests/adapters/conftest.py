"""Switch of Triton's interpreter, which must be on before the first room that is collected imports kernels."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
