"""Device memory that can go back to the driver and return at the same address, so that captured graphs stay valid
(CUDA driver API, Virtual Memory Management)."""

import ctypes

import torch

from nanovllm.parallel.peer.driver import DeviceBytes, Driver
from nanovllm.runner.pinned_memory import PinnedMemory

_GRANULARITY = 2 << 20  # bytes; of every device since Volta
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


def _in_pages(nbytes: int) -> int:
    """Rounded up, and no less than one."""
    return max(1, -(-nbytes // _GRANULARITY)) * _GRANULARITY


class VirtualMemory:
    """A range of device addresses, with memory behind it except while it is asleep."""

    def __init__(self, driver: Driver, nbytes: int, first: int | None = None) -> None:
        """Reserves whole 2 MiB pages and maps memory there, of undefined content: behind all of them, or behind the
        `first` bytes, so that `map` is to follow."""
        self._driver = driver
        self.nbytes = _in_pages(nbytes)
        address = ctypes.c_uint64()
        driver.call(
            "cuMemAddressReserve", ctypes.byref(address), *map(ctypes.c_size_t, (self.nbytes, _GRANULARITY)),
            ctypes.c_uint64(0), ctypes.c_ulonglong(0),
        )  # fmt: skip
        self.address: int = address.value
        self.mapped = 0
        """Bytes that have memory behind them, from the first on."""
        self._pieces: list[tuple[int, int, ctypes.c_ulonglong]] = []
        self._host: PinnedMemory | None = None
        self._is_kept = False
        self.map(first)
        self.bytes = torch.as_tensor(DeviceBytes(self.address, self.nbytes), device=driver.device)
        """uint8 [nbytes]; not to be touched while nothing is mapped."""

    def map(self, end: int | None = None) -> None:
        """Takes memory from the driver, for what has none of all bytes or of those before `end`. Raises OutOfMemory,
        with nothing changed, where the device has no more."""
        size = min(self.nbytes, self.nbytes if end is None else _in_pages(end)) - self.mapped
        if size <= 0:
            return
        location = _Location(_DEVICE, self._driver.device.index or 0)
        properties, access = _AllocationProperties(_PINNED, 0, location), _Access(location, _READ_WRITE)
        handle, size_t = ctypes.c_ulonglong(), ctypes.c_size_t(size)
        call, address = self._driver.call, ctypes.c_uint64(self.address + self.mapped)
        call("cuMemCreate", ctypes.byref(handle), size_t, ctypes.byref(properties), ctypes.c_ulonglong(0))
        self._pieces.append((address.value, size, handle))
        self.mapped += size
        call("cuMemMap", address, size_t, ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
        call("cuMemSetAccess", address, size_t, ctypes.byref(access), ctypes.c_size_t(1))

    def unmap(self) -> None:
        """Gives the memory back to the driver. The device must be idle."""
        pieces, self._pieces, self.mapped = self._pieces, [], 0
        for address, size, handle in pieces:
            self._driver.call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))
            self._driver.call("cuMemRelease", handle)

    def take_host_memory(self) -> None:
        """Pinned host memory for what `sleep` is to keep, where there is none yet; it stays for the next time. Raises
        OutOfMemory where the host has no more."""
        if self._host is None:
            self._host = PinnedMemory(self._driver, self.nbytes)

    def sleep(self, keep: bool) -> None:
        """Gives the memory back; `keep`: its content waits in host memory, which was taken before."""
        torch.cuda.synchronize(self._driver.device)
        if keep:
            assert self._host is not None
            self._host.bytes.copy_(self.bytes)
        self._is_kept = keep
        torch.cuda.synchronize(self._driver.device)
        self.unmap()

    def wake(self) -> None:
        """Restores what `sleep` kept, else zeros, in memory that `map` has taken again."""
        if self._is_kept and self._host is not None:
            self.bytes.copy_(self._host.bytes)
        else:
            self.bytes.zero_()
        torch.cuda.synchronize(self._driver.device)

    def free(self) -> None:
        """Gives memory and addresses back; nothing may use them any more."""
        self.unmap()
        if self._host is not None:
            self._host.free()
        self._driver.call("cuMemAddressFree", ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes))
