"""This room is collected first and imports kernels, which are decorated then: their interpreter is switched on here."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
