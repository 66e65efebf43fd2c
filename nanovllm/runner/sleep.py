"""Weights and KV cache of a rank that can sleep: their memory goes back to the driver, and returns at its addresses."""

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import nn

from nanovllm.errors import OutOfMemory
from nanovllm.parallel.peer.driver import Driver
from nanovllm.runner.virtual_memory import VirtualMemory

_ALIGNMENT = 256  # bytes, as torch aligns what it allocates
_PIECE = 1 << 30  # bytes that move at a time


class SleepableMemory:
    """Ranges of device memory by tag. A CPU has none: its memory stays where it is, and nothing changes here."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ranges: dict[str, VirtualMemory] = {}

    @cached_property
    def _driver(self) -> Driver:
        return Driver(self._device)

    def _of(self, tags: Iterable[str]) -> list[VirtualMemory]:
        return [self._ranges[tag] for tag in tags if tag in self._ranges]

    @property
    def nbytes(self) -> int:
        """Bytes that are mapped now."""
        return sum(memory.mapped for memory in self._ranges.values())

    def take(self, tag: str, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], zeros; what the tag had before is freed, and must not be in use."""
        self.free(tag)
        found = self._ranges[tag] = VirtualMemory(self._driver, nbytes)
        return found.bytes[:nbytes].zero_()

    def adopt(self, tag: str, model: nn.Module) -> None:
        """Moves a model's parameters here, with their values; to be called before anything has views of them. What has
        moved goes back to the device as memory is taken, so that both together never need much more than one."""
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        waiting: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    owners.setdefault(id(p), []).append((module, name))
                    waiting[id(p)] = p
        sizes = {key: -(-p.nbytes // _ALIGNMENT) * _ALIGNMENT for key, p in waiting.items()}
        end, total = 0, sum(sizes.values())
        memory = self._ranges[tag] = VirtualMemory(self._driver, total, first=0)
        for key, size in sizes.items():
            p = waiting.pop(key)
            begin, end = end, end + size
            if end > memory.mapped:
                torch.cuda.empty_cache()
                memory.map(max(end, memory.mapped + _PIECE))
            there = memory.bytes[begin : begin + p.nbytes].view(p.dtype).view(p.shape)
            moved = nn.Parameter(there.copy_(p), requires_grad=False)
            for module, name in owners[key]:
                setattr(module, name, moved)

    def prepare_sleep(self) -> str | None:
        """Allocates host memory for the weights that `sleep` is to keep. Returns why there is none, with nothing
        changed: a rank that raised would be gone."""
        try:
            for memory in self._of(["weights"]):
                memory.take_host_memory()
        except OutOfMemory as error:
            return str(error)
        return None

    @torch.inference_mode()
    def sleep(self, tags: tuple[str, ...], keep_weights: bool) -> int:
        """Gives the memory of these tags back; returns the bytes. Weights may wait in host memory, prepared before."""
        for tag in tags:
            for memory in self._of([tag]):
                memory.sleep(keep=tag == "weights" and keep_weights)
        torch.cuda.empty_cache()
        return sum(memory.nbytes for memory in self._of(tags))

    def prepare_wake_up(self, tags: tuple[str, ...]) -> str | None:
        """Takes device memory again, at the same addresses and of undefined content. Returns why there is none, with
        nothing changed."""
        torch.cuda.empty_cache()
        try:
            for memory in self._of(tags):
                memory.map()
        except OutOfMemory as error:
            self.give_up_wake_up(tags)
            return str(error)
        return None

    def give_up_wake_up(self, tags: tuple[str, ...]) -> None:
        """Gives back what prepare_wake_up took."""
        for memory in self._of(tags):
            memory.unmap()

    @torch.inference_mode()
    def wake_up(self, tags: tuple[str, ...]) -> None:
        """Restores what was kept, else zeros, in memory that prepare_wake_up has taken."""
        for memory in self._of(tags):
            memory.wake()

    def free(self, tag: str) -> None:
        """Frees the range of a tag, where there is one."""
        if (found := self._ranges.pop(tag, None)) is not None:
            found.free()
