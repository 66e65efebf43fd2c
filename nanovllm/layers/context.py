"""What every layer of one rank is built with."""

from dataclasses import dataclass

import torch

from nanovllm.kernels import Kernels
from nanovllm.parallel.group import TensorParallelGroup


@dataclass(frozen=True)
class LayerContext:
    """The same for all layers."""

    group: TensorParallelGroup
    kernels: Kernels
    dtype: torch.dtype
    """Of activations, and of weights that are not quantised."""
    device: torch.device
