"""The paged KV cache of one rank: how many blocks fit, and the tensors."""

import math

import torch

from nanovllm.kernels.step.blocks import BlockTensors
from nanovllm.layers.attention import Attention
from nanovllm.runner.memory_probe import GIB, MIB
from nanovllm.runner.sleep import SleepableMemory

_SCALE = torch.bfloat16


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", MIB)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.3f} {unit}"
    return f"{num_bytes} bytes"


def block_bytes(layers: list[Attention], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block on one rank: keys and values of all layers, and the scales of e4m3."""
    per_head = 2 * (_SCALE.itemsize if dtype == torch.float8_e4m3fn else 0)
    return sum(layer.cache_shape[0] * block_size * (2 * layer.cache_shape[1] * dtype.itemsize + per_head)
               for layer in layers)


def blocks_that_fit(budget_bytes: int, bytes_per_block: int, option: str, because: str = "") -> int:
    """Blocks within `budget_bytes`. Raises ValueError naming `option` (written out with its value), and `because` of
    what the budget is so small, where there is no room for one."""
    blocks = budget_bytes // bytes_per_block
    if blocks < 1:
        raise ValueError(
            f"{option}: leaves {_size(budget_bytes)} for the KV cache, must leave at least {_size(bytes_per_block)} "
            f"(one block){because and f': {because}'}"
        )
    return int(blocks)


def bind_kv_cache(
    layers: list[Attention], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
    token_major: bool = False, memory: SleepableMemory | None = None,
) -> None:  # fmt: skip
    """Allocates the cache, in `memory` where there is one, and gives every layer its part: keys, values and, of e4m3,
    scales. token_major: see AttentionBackend.

    Zeros, because attention kernels load a row's whole last block and mask afterwards: what was never written must be
    finite.
    """
    nbytes = num_blocks * block_bytes(layers, block_size, dtype)
    cache = torch.zeros(nbytes, dtype=torch.uint8, device=device) if memory is None else memory.take("kv_cache", nbytes)
    sizes = [2 * num_blocks * block_size * math.prod(layer.cache_shape) for layer in layers]
    elements, scales = cache.split((sum(sizes) * dtype.itemsize, nbytes - sum(sizes) * dtype.itemsize))
    scales = scales.view(_SCALE)
    for layer, part in zip(layers, elements.view(dtype).split(sizes), strict=True):
        (heads, head_dim), own = layer.cache_shape, None
        if len(scales):
            own, scales = scales.tensor_split((num_blocks * heads * block_size * 2,))
            own = own.view(num_blocks, heads, block_size, 2)
        if token_major:
            k_cache, v_cache = part.view(2, num_blocks, block_size, heads, head_dim).transpose(2, 3)
        else:
            k_cache, v_cache = part.view(2, num_blocks, heads, block_size, head_dim)
        layer.bind_cache(k_cache, v_cache, own)


def block_tensors(layers: list[Attention]) -> BlockTensors:
    """Everything that a block is made of, in all layers."""
    parts = ((layer.k_cache, layer.v_cache, layer.kv_scales) for layer in layers)
    return BlockTensors.of([part for of_layer in parts for part in of_layer if part is not None])
