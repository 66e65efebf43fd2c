"""A bucket of memory that one process fills and others on the same host map: of a GPU by CUDA's inter-process handles,
of a CPU by a file without a name. From a trainer to an engine, and from rank 0 of an engine to its other ranks."""

import base64
import itertools
import math
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from nanovllm.errors import refuse
from nanovllm.parallel.peer.driver import DeviceBytes, Driver
from nanovllm.transfer.buckets import (
    Entry,
    NamedTensors,
    as_bytes,
    described,
    entries_of,
    from_base64,
    grouped,
    unpacked,
)

_FILE = re.compile(r"/proc/\d+/fd/\d+")


class SharedBucket:
    """The side that fills it: `nbytes` of memory of its own on `device`, for any number of updates."""

    def __init__(self, nbytes: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._where: dict[str, Any]
        if self.device.type == "cuda":
            self._driver = Driver(self.device)
            self._address = self._driver.allocate(nbytes)
            self._memory = torch.as_tensor(DeviceBytes(self._address, nbytes), device=self.device)
            handle = base64.b64encode(self._driver.export(self._address)).decode()
            uuid = str(torch.cuda.get_device_properties(self.device).uuid)
            self._where = {"ipc_handle": {"gpu_uuid": uuid, "handle_b64": handle}}
        else:
            self._file = os.fdopen(os.memfd_create("nanovllm-bucket"), "r+b")
            self._file.truncate(nbytes)
            self._memory = torch.frombuffer(mmap.mmap(self._file.fileno(), nbytes), dtype=torch.uint8)
            self._where = {"shared_memory": f"/proc/{os.getpid()}/fd/{self._file.fileno()}"}

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def fill(self, tensors: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Copies them in, and returns what says so, in JSON's types. What was filled in before must have been read.
        Raises ValueError where they do not fit."""
        contents = [as_bytes(tensor) for _, tensor in tensors]
        needed = sum(map(torch.Tensor.numel, contents))
        if needed > self.nbytes:
            names = ", ".join(repr(name) for name, _ in tensors[:3])
            refuse("nbytes", self.nbytes, f"at least the {needed} of {names}")
        if needed and {content.device for content in contents} == {self._memory.device}:
            torch.cat(contents, out=self._memory[:needed])
        elif needed:  # all in one copy
            self._memory[:needed].copy_(torch.cat([content.to(contents[0].device) for content in contents]))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        entries = [Entry.of(name, tensor) for name, tensor in tensors]
        return {**described(entries), **self._where, "nbytes": self.nbytes}

    def messages(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, Any]]:
        """`fill` for as many tensors as fit at a time: each message must have been taken in, by a WeightReceiver's
        `update`, before the next is asked for."""
        for group in grouped(weights, self.nbytes, lambda item: Entry.of(*item).nbytes, within=True):
            message = self.fill(group)
            group.clear()
            yield message

    def close(self) -> None:
        """Frees the bucket after the last update: the engine must not read it any more."""
        del self._memory
        if self.device.type == "cuda":
            self._driver.free(self._address)
        else:
            self._file.close()


class FarTensor:
    """A tensor in memory of another GPU that this process has mapped: a TensorSource, of which this GPU copies what is
    asked for."""

    def __init__(self, address: int, dtype: torch.dtype, shape: tuple[int, ...], driver: Driver) -> None:
        """driver: of this GPU."""
        self.address, self.dtype, self.shape, self._driver = address, dtype, torch.Size(shape), driver

    def view(self, dtype: torch.dtype) -> "FarTensor":
        """A view of the bytes as another dtype of equal size."""
        return FarTensor(self.address, dtype, self.shape, self._driver)

    def whole(self) -> torch.Tensor:
        return self.narrow(0, 0, (*self.shape, 1)[0]).view(self.shape)

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        shape = [*(self.shape or (1,))]
        rows, width = math.prod(shape[:dim]), math.prod(shape[dim + 1 :]) * self.dtype.itemsize
        stride, shape[dim] = shape[dim] * width, length
        out = torch.empty(shape, dtype=self.dtype, device=self._driver.device)
        stream = torch.cuda.current_stream(out.device).cuda_stream
        where = out.data_ptr(), self.address + start * width, length * width
        if out.numel() and rows == 1:
            self._driver.copy(*where, stream)
        elif out.numel():
            self._driver.copy_rows(*where, stride, rows, stream)
        return out


class MappedBuckets:
    """The other side: buckets that a process on `device` has mapped, until `close`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}
        """Files by device and inode: a name goes on to another file where a process closes one and opens a second."""
        self._addresses: dict[bytes, int] = {}
        """Device addresses of mapped buckets on a GPU, by handle."""

    def tensors(self, message: dict[str, Any]) -> NamedTensors:
        """The tensors of a SharedBucket's message: to be copied before the bucket is filled again. Raises ValueError
        naming what is wrong with the message."""
        found = self.sources(message)
        return ((name, source if isinstance(source, torch.Tensor) else source.whole()) for name, source in found)

    def sources(self, message: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor | FarTensor]]:
        """Tensors of a message where they lie, not copied, for a reader that needs a part of them."""
        entries, nbytes = entries_of(message), message.get("nbytes")
        needed = sum(entry.nbytes for entry in entries)
        if not isinstance(nbytes, int) or nbytes < needed:
            refuse("nbytes", nbytes, f"an integer >= {needed}, the bytes of the tensors")
        if "ipc_handle" in message:
            return self._of_device(message["ipc_handle"], nbytes, entries)
        return unpacked(self._of_file(message.get("shared_memory"), nbytes), entries)

    def _of_device(
        self, where: Any, nbytes: int, entries: list[Entry]
    ) -> Iterator[tuple[str, torch.Tensor | FarTensor]]:
        """Mapped by this GPU, also where the bucket is on another, so that none other is touched."""
        where = where if isinstance(where, dict) else {}
        uuid, handle = where.get("gpu_uuid"), from_base64("ipc_handle.handle_b64", where.get("handle_b64"), 64)
        if self._device.type != "cuda":
            refuse("ipc_handle.gpu_uuid", uuid, f"left out: this engine runs on {self._device}")
        driver = Driver(self._device)
        if handle not in self._addresses:
            self._addresses[handle] = driver.open(handle)
        address = self._addresses[handle]
        if driver.size_of(address) < nbytes:
            refuse("nbytes", nbytes, f"at most the {driver.size_of(address)} that are there")
        if uuid == str(torch.cuda.get_device_properties(self._device).uuid):
            return unpacked(torch.as_tensor(DeviceBytes(address, nbytes), device=self._device), entries)
        ends = itertools.accumulate(entry.nbytes for entry in entries)
        return (
            (entry.name, FarTensor(address + end - entry.nbytes, entry.dtype, entry.shape, driver))
            for entry, end in zip(entries, ends, strict=True)
        )

    def _of_file(self, name: Any, nbytes: int) -> torch.Tensor:
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            refuse("shared_memory", name, "/proc/PID/fd/NUMBER of a SharedBucket")
        with open(name, "r+b") as file:
            found = os.fstat(file.fileno())
            if found.st_size < nbytes:
                refuse("nbytes", nbytes, f"at most the {found.st_size} that are there")
            place = found.st_dev, found.st_ino
            if place not in self._mapped:
                self._mapped[place] = torch.frombuffer(mmap.mmap(file.fileno(), found.st_size), dtype=torch.uint8)
        return self._mapped[place]

    def close(self) -> None:
        """Lets go of all."""
        self._mapped.clear()
        for address in self._addresses.values():
            Driver(self._device).close(address)
        self._addresses.clear()
