"""CUDA's driver API, as far as ranks need it to reach each other's memory, through ctypes."""

import ctypes
from typing import Any

import torch

from nanovllm.errors import OutOfMemory

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_PAGE = 2 << 20  # bytes


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


class _Rows(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        (f"{side}_{field}", kind)
        for side in ("source", "target")
        for field, kind in (
            ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("kind", ctypes.c_uint), ("host", ctypes.c_void_p),
            ("address", ctypes.c_uint64), ("array", ctypes.c_void_p), ("pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]  # fmt: skip


class Driver:
    """The driver calls for inter-process memory; the CUDA context of `device` is current while they run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lib = ctypes.CDLL("libcuda.so.1")
        pointer, size = ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t
        self._lib.cuMemAlloc_v2.argtypes = [pointer, size]
        self._lib.cuMemFree_v2.argtypes = [ctypes.c_uint64]
        self._lib.cuMemGetAddressRange_v2.argtypes = [pointer, ctypes.POINTER(size), ctypes.c_uint64]
        self._lib.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_uint64]
        self._lib.cuIpcOpenMemHandle_v2.argtypes = [pointer, _Handle, ctypes.c_uint]
        self._lib.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
        self._lib.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, size, ctypes.c_void_p]
        self._lib.cuMemcpy2DAsync_v2.argtypes = [ctypes.POINTER(_Rows), ctypes.c_void_p]
        self._lib.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]

    def call(self, name: str, *args: Any) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().query()  # a runtime call: makes the primary context current on this thread
            self._check(name, getattr(self._lib, name)(*args))

    def _check(self, name: str, code: int) -> None:
        if code != 0:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            kind = OutOfMemory if code == _OUT_OF_MEMORY else RuntimeError
            raise kind(f"{name}: {(text.value or b'unknown error').decode()} ({code})")

    def allocate(self, nbytes: int) -> int:
        """Whole 2 MiB pages: a handle covers the pages of an allocation, and those must hold nothing else."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), -(-nbytes // _PAGE) * _PAGE)
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        handle = _Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        lazy_peer_access = 1
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), lazy_peer_access)
        return address.value

    def size_of(self, address: int) -> int:
        """Bytes of the allocation that begins there."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), address)
        return nbytes.value

    def close(self, address: int) -> None:
        self.call("cuIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Puts a copy between device addresses into a stream, which may be captured: so nothing else may be called, and
        the context must be current already."""
        self._check("cuMemcpyAsync", self._lib.cuMemcpyAsync(target, source, nbytes, stream))

    def copy_rows(self, target: int, source: int, nbytes: int, stride: int, rows: int, stream: int) -> None:
        """Copies `nbytes` of each of `rows` rows. At the source they begin every `stride` bytes (less than 2 GiB); at
        the target they follow one another."""
        unified = 4
        what = _Rows(
            source_kind=unified, source_address=source, source_pitch=stride, target_kind=unified, target_address=target,
            target_pitch=nbytes, width=nbytes, height=rows,
        )  # fmt: skip
        self._check("cuMemcpy2DAsync_v2", self._lib.cuMemcpy2DAsync_v2(ctypes.byref(what), stream))


class DeviceBytes:
    """Lets torch view memory that it did not allocate."""

    def __init__(self, address: int, nbytes: int) -> None:
        data = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = data
