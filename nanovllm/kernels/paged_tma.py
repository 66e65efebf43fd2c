"""Tensor descriptors (TMA) over one layer's paged keys or values."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


def supports_tma(device: torch.device) -> bool:
    """Whether the device has the bulk tensor copy engine (compute capability 9.0 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def paged_descriptor(cache: torch.Tensor, block_n: int) -> TensorDescriptor:
    """A descriptor over cache [num_blocks, num_kv_heads, block_size, head_dim]: it loads block_n tokens of one head."""
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, 1, block_n, cache.shape[-1]])
