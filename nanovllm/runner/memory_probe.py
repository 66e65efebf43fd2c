"""Measurement of the memory that an engine takes of a GPU which others use, too, and of the room that its share leaves
for the KV cache."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

logger = logging.getLogger(__name__)

GIB = 1 << 30
MIB = 1 << 20

CONTEXT_PER_SM = 4 * MIB
"""A CUDA context takes some 0.5 GiB of a GPU with 132 multiprocessors, and less of smaller ones. It exists before the
free memory can be read, so it cannot be measured."""
KERNELS = 96 * MIB
"""Bytes that loading kernels usually takes in one stage of the start."""
NCCL_BYTES = 512 * MIB
"""Bytes that NCCL usually takes."""
_PLAUSIBLE = 4
"""Times its usual growth: what libraries may take at once. More was taken by others."""


def kv_room(share: int, used: int, free: int, reserved: Mapping[str, int]) -> int:
    """Bytes left for the KV cache of a `share` of a GPU of which so many are `used`, with so many `free` and some of
    those `reserved`, by name."""
    return min(share - used, free) - sum(reserved.values())


class TorchMemory:
    """Figures of a GPU's memory in bytes, from torch and the driver."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total = torch.cuda.mem_get_info(device)[1]
        self.context = torch.cuda.get_device_properties(device).multi_processor_count * CONTEXT_PER_SM

    def free(self) -> int:
        """Free bytes of the whole GPU."""
        return torch.cuda.mem_get_info(self._device)[0]

    def reserved(self) -> int:
        """Bytes of this process's allocator: tensors, pools of graphs, and its cache."""
        return torch.cuda.memory_reserved(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Most bytes that were reserved since reset_peak."""
        return torch.cuda.max_memory_reserved(self._device)

    def release_cached(self) -> None:
        """Gives the allocator's unused memory back to the device."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def collect(self) -> None:
        """Frees tensors that nothing can reach any more."""
        gc.collect()


class MemoryProbe:
    """Memory that this engine has taken of its GPU since it began, whatever others take and give back meanwhile. On a
    CPU it measures nothing.

    Torch's allocator knows what is this process's own, and `count` is told what is mapped beside it. Only what
    libraries take (kernels, communicators, graphs) has no figure but the GPU's free memory, which others move as well:
    it is read just before and after the work that grows them, and where the difference cannot be theirs, their usual
    growth counts.
    """

    def __init__(self, device: torch.device, gpu: TorchMemory | None = None) -> None:
        """gpu: figures in place of the device's own, for tests."""
        self._device = device
        self._gpu = TorchMemory(device) if device.type == "cuda" and gpu is None else gpu
        self._reported: dict[str, int] = {}
        self._mapped: list[Callable[[], int]] = []
        self.crowded = ""
        """Report of what others hold, where that leaves less than this engine's share; else ""."""
        if self._gpu is not None:
            self._libraries = self._gpu.context
            self._gpu.release_cached()
            if self._gpu.reserved():  # a trainer's, or of a closed engine that is not collected yet
                self._gpu.collect()
                self._gpu.release_cached()
            self._reserved_at_start = self._gpu.reserved()

    def count(self, mapped_bytes: Callable[[], int]) -> None:
        """Adds memory outside torch's allocator that the engine maps itself. `mapped_bytes` is called at each
        measurement."""
        self._mapped.append(mapped_bytes)

    def used_bytes(self) -> int:
        """Bytes that the engine has, with the process's CUDA context and what torch's allocator caches."""
        assert self._gpu is not None
        return self._gpu.reserved() - self._reserved_at_start + self._mapped_bytes() + self._libraries

    def _mapped_bytes(self) -> int:
        return sum(mapped() for mapped in self._mapped)

    @contextmanager
    def libraries(self, usual: int = 0) -> Iterator[None]:
        """Context for work in which libraries take memory: kernels, and usually so many bytes beside them."""
        if self._gpu is None:
            yield
            return
        before = self._free_of_libraries()
        yield
        self._libraries += self._believed(before - self._free_of_libraries(), KERNELS + usual)

    def growth(self, work: Callable[[], object], usual: int) -> int:
        """Bytes that `work` takes, in torch's allocator and, usually so many, in libraries. They do not count in
        used_bytes where they go back."""
        assert self._gpu is not None
        reserved, before = self._gpu.reserved(), self._free_of_libraries()
        work()
        by_libraries = self._believed(before - self._free_of_libraries(), usual)
        return self._gpu.reserved() - reserved + by_libraries

    def _free_of_libraries(self) -> int:
        """Bytes that shrink as libraries grow, and that move with what others do."""
        assert self._gpu is not None
        return self._gpu.free() + self._gpu.reserved() + self._mapped_bytes()

    @staticmethod
    def _believed(growth: int, usual: int) -> int:
        return growth if 0 <= growth <= _PLAUSIBLE * usual else usual

    def begin_step(self) -> None:
        """Begins the measurement of a step. What earlier work left in torch's cache goes back first."""
        assert self._gpu is not None
        self._gpu.release_cached()
        self._gpu.reset_peak()
        self._before = self._gpu.reserved()

    def end_step(self) -> int:
        """Ends it; returns the bytes that the step needed at its peak, beyond what was there."""
        assert self._gpu is not None
        step_bytes = self._gpu.peak() - self._before
        self._gpu.release_cached()
        return step_bytes

    def kv_budget(self, utilization: float, **reserved: int) -> int:
        """Computes the bytes left for the KV cache: within `utilization` of the whole GPU, within what is free, and
        beside those `reserved` for other things, by name. Where others hold too much, `crowded` and the log say so."""
        assert self._gpu is not None
        self._gpu.release_cached()
        self._reported = reserved
        used, free, share = self.used_bytes(), self._gpu.free(), int(utilization * self._gpu.total)
        self.crowded = ""
        if free < share - used:
            others = (self._gpu.total - free - used) / GIB
            has = f"this engine's share is {share / GIB:.2f} GiB, of which it has taken {used / GIB:.2f}"
            self.crowded = f"{has}; others hold {others:.2f} of the GPU's {self._gpu.total / GIB:.2f} GiB"
            logger.warning("gpu_memory_utilization=%g: %s", utilization, self.crowded)
        return kv_room(share, used, free, reserved)

    def release_cached(self) -> None:
        """Gives torch's unused memory back to the device."""
        if self._gpu is not None:
            self._gpu.release_cached()

    def is_idle_within(self, seconds: float) -> bool:
        """Waits at most so long for the device. Returns False if it does not finish, or reports an error."""
        if self._gpu is None:
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
        """Records the bytes that the graphs took in the end, of those kept free for them."""
        self._reported["graphs_taken"] = num_bytes

    def report(self) -> dict[str, object]:
        """Figures in GiB by name: what is kept free beside weights and KV; of what is kept for graphs, what they took;
        what the engine has taken in all."""
        if self._gpu is None:
            return {}
        figures = {**self._reported, "libraries": self._libraries, "taken": self.used_bytes()}
        return {f"{name}_gib": round(num_bytes / GIB, 3) for name, num_bytes in figures.items()}
