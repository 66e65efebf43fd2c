"""Tensor descriptors (TMA) over one layer's paged keys or values."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


def paged_descriptor(cache: torch.Tensor, block_n: int) -> TensorDescriptor:
    """A descriptor over cache [num_blocks, num_kv_heads, block_size, head_dim]: it loads block_n tokens of one head."""
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, 1, block_n, cache.shape[-1]])
