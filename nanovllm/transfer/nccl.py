"""NCCL through ctypes: torch's own groups take no unique id that another library has made."""

import ctypes
import threading
import time
from typing import Any

import torch

_UINT8, _FLOAT32, _SUM = 1, 7, 0  # ncclDataType_t, ncclRedOp_t
_LOOK_INTERVAL = 0.001  # seconds


class UniqueId(ctypes.Structure):
    """ncclUniqueId: where the ranks of a communicator meet."""

    _fields_ = [("internal", ctypes.c_ubyte * 128)]


class Communicator:
    """A rank of a communicator that others may have made with another program. All waits end after `timeout` seconds,
    by RuntimeError; then it is of no more use."""

    def __init__(self, size: int, rank: int, unique_id: bytes, device: torch.device, timeout: float) -> None:
        """Joins, with all ranks at the same time, and sums one number with them, as vLLM's ranks do first."""
        self._lib = library()
        self._device, self._timeout = device, timeout
        self._comm = ctypes.c_void_p()
        self._stream = torch.cuda.Stream(device)
        joined: list[int] = []

        def join() -> None:
            with torch.cuda.device(device):
                token = UniqueId.from_buffer_copy(unique_id)
                joined.append(self._lib.ncclCommInitRank(ctypes.byref(self._comm), size, token, rank))

        waiting = threading.Thread(target=join, name="nanovllm-nccl-join", daemon=True)  # it cannot be interrupted
        waiting.start()
        waiting.join(timeout)
        if not joined:
            raise RuntimeError(f"the {size} ranks of the group did not meet within {timeout:g} s")
        _check(self._lib, "ncclCommInitRank", joined[0])
        one = torch.zeros(1, device=device)
        self._run("ncclAllReduce", one, ctypes.c_size_t(1), _FLOAT32, _SUM)

    def broadcast(self, memory: torch.Tensor, source: int) -> None:
        """uint8 [n], contiguous: from rank `source` to all; returns when it is there."""
        self._run("ncclBroadcast", memory, ctypes.c_size_t(memory.numel()), _UINT8, source)

    def _run(self, name: str, memory: torch.Tensor, *args: Any) -> None:
        if not self._comm:
            raise RuntimeError(f"{name}: this rank has left the group")
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        pointer, stream = ctypes.c_void_p(memory.data_ptr()), ctypes.c_void_p(self._stream.cuda_stream)
        with torch.cuda.device(self._device):
            _check(self._lib, name, getattr(self._lib, name)(pointer, pointer, *args, self._comm, stream))
        done = torch.cuda.Event()
        done.record(self._stream)
        deadline = time.monotonic() + self._timeout
        while not done.query():
            if time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"{name} did not end within {self._timeout:g} s")
            time.sleep(_LOOK_INTERVAL)

    def close(self) -> None:
        """Leaves, without a word to the others. Does nothing the second time: NCCL has freed it."""
        if self._comm:
            self._lib.ncclCommAbort(self._comm)
            self._comm = ctypes.c_void_p()


def library() -> ctypes.CDLL:
    """The NCCL that torch computes with."""
    torch.cuda.init()
    lib = ctypes.CDLL("libnccl.so.2")
    lib.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int]
    lib.ncclGetErrorString.restype = ctypes.c_char_p
    return lib


def new_unique_id() -> bytes:
    """128 bytes for the ranks of a new communicator."""
    lib, made = library(), UniqueId()
    _check(lib, "ncclGetUniqueId", lib.ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


def _check(lib: ctypes.CDLL, name: str, code: int) -> None:
    if code != 0:
        raise RuntimeError(f"{name}: {lib.ncclGetErrorString(code).decode()} ({code})")
