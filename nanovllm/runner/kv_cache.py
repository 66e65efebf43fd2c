"""The paged KV cache of one rank: how many blocks fit, and the tensors."""

import math
import os
import threading
from contextlib import suppress

import torch

from nanovllm.kernels.step.blocks import BlockTensors
from nanovllm.layers.attention import Attention
from nanovllm.runner.sleep import SleepableMemory

GIB = 1 << 30
_SCALE = torch.bfloat16
_MIB = 1 << 20


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", _MIB)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.3f} {unit}"
    return f"{num_bytes} bytes"


def block_bytes(layers: list[Attention], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block on one rank: keys and values of all layers, and the scales of e4m3."""
    per_head = 2 * (_SCALE.itemsize if dtype == torch.float8_e4m3fn else 0)
    return sum(layer.cache_shape[0] * block_size * (2 * layer.cache_shape[1] * dtype.itemsize + per_head)
               for layer in layers)


def blocks_that_fit(budget_bytes: int, bytes_per_block: int, option: str) -> int:
    """Blocks within `budget_bytes`. Raises ValueError naming `option` (written out with its value) where there is no
    room for one."""
    blocks = budget_bytes // bytes_per_block
    if blocks < 1:
        raise ValueError(
            f"{option}: leaves {_size(budget_bytes)} for the KV cache, must leave at least {_size(bytes_per_block)} "
            "(one block)"
        )
    return int(blocks)


def host_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
        heads, head_dim = layer.cache_shape
        if len(scales):
            own, scales = scales.tensor_split((num_blocks * heads * block_size * 2,))
            layer.kv_scales = own.view(num_blocks, heads, block_size, 2)
        if token_major:
            layer.k_cache, layer.v_cache = part.view(2, num_blocks, block_size, heads, head_dim).transpose(2, 3)
        else:
            layer.k_cache, layer.v_cache = part.view(2, num_blocks, heads, block_size, head_dim)


def block_tensors(layers: list[Attention]) -> BlockTensors:
    """Everything that a block is made of, in all layers."""
    parts = ((layer.k_cache, layer.v_cache, layer.kv_scales) for layer in layers)
    return BlockTensors.of([part for of_layer in parts for part in of_layer if part is not None])


class MemoryProbe:
    """What this rank has taken of its GPU since it started. On a CPU it measures nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._reported: dict[str, int] = {}
        if self._is_cuda:
            self.free_at_start, self.total = torch.cuda.mem_get_info(device)

    def used_bytes(self) -> int:
        """Bytes taken since the start, by torch and by libraries."""
        return self.free_at_start - torch.cuda.mem_get_info(self._device)[0]

    def begin_step(self) -> None:
        """A measured step follows; what earlier work left in torch's cache goes back first."""
        self.release_cached()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_reserved(self._device)

    def end_step(self) -> int:
        """Bytes that the step needed at its peak, beyond what was there."""
        step_bytes = torch.cuda.max_memory_reserved(self._device) - self._before
        self.release_cached()
        return step_bytes

    def kv_budget(self, utilization: float, **reserved: int) -> int:
        """Bytes left for the KV cache within `utilization` of the whole GPU, and within what is free, when the bytes
        `reserved` for other things, by name, stay free."""
        self.release_cached()
        self._reported = reserved
        free = torch.cuda.mem_get_info(self._device)[0]
        return int(min(utilization * self.total - self.used_bytes(), free) - sum(reserved.values()))

    def release_cached(self) -> None:
        """Gives torch's unused memory back to the device."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def is_idle_within(self, seconds: float) -> bool:
        """Waits for the device, at most so long. False where it does not finish, or reports an error."""
        if not self._is_cuda:
            return True
        finished: list[bool] = []

        def synchronize() -> None:
            with suppress(RuntimeError):
                torch.cuda.synchronize(self._device)
                finished.append(True)

        waiting = threading.Thread(target=synchronize, name="nanovllm-last-wait", daemon=True)
        waiting.start()
        waiting.join(seconds)
        return bool(finished)

    def note_graphs(self, num_bytes: int) -> None:
        """What the graphs took in the end, of what was kept free for them."""
        self._reported["graphs_taken"] = num_bytes

    def report(self) -> dict[str, object]:
        """What is kept free beside weights and KV, in GiB, by name; and of what is kept for graphs, what they took."""
        return {f"{name}_gib": round(num_bytes / GIB, 3) for name, num_bytes in self._reported.items()}
