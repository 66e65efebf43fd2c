"""Weights and KV cache of a rank that can sleep: their memory goes back to the driver, and returns at its addresses."""

import torch
from torch import nn

from nanovllm.parallel.peer.driver import Driver
from nanovllm.parallel.peer.virtual_memory import VirtualMemory

_ALIGNMENT = 256  # bytes, as torch aligns what it allocates


class SleepableMemory:
    """One range of device memory for each tag. Not for a CPU, whose memory stays where it is."""

    def __init__(self, device: torch.device) -> None:
        self._driver = Driver(device)
        self._ranges: dict[str, VirtualMemory] = {}

    @property
    def nbytes(self) -> int:
        """That all ranges have while they are awake."""
        return sum(memory.nbytes for memory in self._ranges.values())

    def take(self, tag: str, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], zeros; what the tag had before is freed, and must not be in use."""
        self.free(tag)
        found = self._ranges[tag] = VirtualMemory(self._driver, nbytes)
        return found.bytes[:nbytes].zero_()

    def adopt(self, tag: str, model: nn.Module) -> None:
        """Moves a model's parameters here, with their values; to be called before anything has views of them."""
        places: dict[int, nn.Parameter] = {}
        owners = [
            (module, name, p) for module in model.modules() for name, p in module._parameters.items() if p is not None
        ]
        unique = {id(p): p for _, _, p in owners}
        sizes = {key: -(-p.nbytes // _ALIGNMENT) * _ALIGNMENT for key, p in unique.items()}
        begin, memory = 0, self.take(tag, sum(sizes.values()))
        for key, p in unique.items():
            own = memory[begin : begin + p.nbytes].view(p.dtype).view(p.shape)
            places[key] = nn.Parameter(own.copy_(p), requires_grad=False)
            begin += sizes[key]
        for module, name, p in owners:
            setattr(module, name, places[id(p)])

    def sleep(self, tags: tuple[str, ...], keep_weights: bool) -> int:
        """Gives the memory of these tags back; returns the bytes. Weights may wait in host memory."""
        for tag in tags:
            self._ranges[tag].sleep(keep=tag == "weights" and keep_weights)
        return sum(self._ranges[tag].nbytes for tag in tags)

    def wake(self, tags: tuple[str, ...]) -> None:
        """Memory again: what was kept, or zeros."""
        for tag in tags:
            self._ranges[tag].wake()

    def free(self, tag: str) -> None:
        """Frees the range of a tag, where there is one."""
        if (found := self._ranges.pop(tag, None)) is not None:
            found.free()
