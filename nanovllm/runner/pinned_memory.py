"""Host memory that a device copies to and from at full speed. Torch's own takes the next power of two of bytes, and
one thread to fill in its pages."""

import contextlib
import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from nanovllm.errors import OutOfMemory
from nanovllm.parallel.peer.driver import Driver
from nanovllm.processes.machine import available_memory

_PIECE = 256 << 20  # bytes that a thread fills in at a time
_MAX_THREADS = 16


class PinnedMemory:
    """`nbytes` of page-locked memory, private to this process."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        """Raises OutOfMemory where the host does not have it."""
        self._driver = driver
        if nbytes > (room := available_memory()):  # taking it would end some process
            raise OutOfMemory(f"{nbytes} bytes of host memory are needed, and {room} are available")
        try:
            self._mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemory(f"{nbytes} bytes of host memory: {error.strerror}") from None
        with contextlib.suppress(OSError):  # a hint, which some kernels do not know
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        """uint8 [nbytes], on the CPU."""
        address = self.bytes.data_ptr()
        with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
            for begin in range(0, nbytes, _PIECE):  # the first touch makes the pages
                pool.submit(ctypes.memset, address + begin, 0, min(_PIECE, nbytes - begin))
        driver.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(0))

    def free(self) -> None:
        """Gives the memory back; no copy may be under way."""
        self._driver.call("cuMemHostUnregister", ctypes.c_void_p(self.bytes.data_ptr()))
        del self.bytes
        self._mapping.close()
