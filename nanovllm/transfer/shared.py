"""A bucket of memory that a trainer fills and an engine on the same host maps: of a GPU by CUDA's inter-process
handles, of a CPU by a file without a name."""

import base64
import binascii
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from nanovllm.errors import refuse
from nanovllm.parallel.peer.driver import DeviceBytes, Driver
from nanovllm.transfer.buckets import Entry, NamedTensors, as_bytes, described, entries_of, unpacked

_FILE = re.compile(r"/proc/\d+/fd/\d+")
_ALIGNMENT = 16  # bytes, so that any type can be viewed


class SharedBucket:
    """The trainer's side: `nbytes` of memory of its own on `device`, for any number of updates."""

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
            self._file = os.memfd_create("nanovllm-bucket")
            os.truncate(self._file, nbytes)
            self._memory = torch.frombuffer(mmap.mmap(self._file, nbytes), dtype=torch.uint8)
            self._where = {"shared_memory": f"/proc/{os.getpid()}/fd/{self._file}"}

    def messages(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, Any]]:
        """What a WeightReceiver's `update` takes, as JSON: one message for as many tensors as fit at a time. A message
        must have been taken in before the next is asked for. Raises ValueError for a tensor that does not fit at all.
        """
        entries: list[Entry] = []
        end = 0
        for name, tensor in weights:
            content = as_bytes(tensor)
            if content.numel() > self._memory.numel():
                bound = f"at least the {content.numel()} of {name!r}"
                refuse("nbytes", self._memory.numel(), bound)
            if end + content.numel() > self._memory.numel():
                yield self._message(entries, end)
                entries, end = [], 0
            self._memory[end : end + content.numel()].copy_(content)
            entries.append(Entry.of(name, tensor))
            end += content.numel()
        if entries:
            yield self._message(entries, end)

    def _message(self, entries: list[Entry], nbytes: int) -> dict[str, Any]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {**described(entries), **self._where, "nbytes": self._memory.numel()}

    def close(self) -> None:
        """After the last update: the engine must not read it any more."""
        del self._memory
        if self.device.type == "cuda":
            self._driver.free(self._address)
        else:
            os.close(self._file)


class MappedBuckets:
    """The engine's side: buckets that it has mapped, until `close`."""

    def __init__(self) -> None:
        self._mapped: dict[str, torch.Tensor] = {}
        self._opened: list[tuple[Driver, int]] = []

    def tensors(self, message: dict[str, Any]) -> NamedTensors:
        """The tensors of a SharedBucket's message, as views: to be copied before the trainer fills the bucket again.
        Raises ValueError naming what is wrong with the message."""
        entries, nbytes = entries_of(message), message.get("nbytes")
        needed = sum(entry.nbytes for entry in entries)
        if not isinstance(nbytes, int) or nbytes < needed:
            refuse("nbytes", nbytes, f"an integer >= {needed}, the bytes of the tensors")
        if "ipc_handle" in message:
            return unpacked(self._of_device(message["ipc_handle"], nbytes), entries)
        return unpacked(self._of_file(message.get("shared_memory"), nbytes), entries)

    def _of_device(self, where: Any, nbytes: int) -> torch.Tensor:
        uuid, handle_b64 = (where.get("gpu_uuid"), where.get("handle_b64")) if isinstance(where, dict) else (None, None)
        devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
        known = {str(torch.cuda.get_device_properties(index).uuid): index for index in devices}
        if not isinstance(uuid, str) or uuid not in known:
            refuse("ipc_handle.gpu_uuid", uuid, f"a GPU that this engine sees: {sorted(known)}")
        try:
            handle = base64.b64decode(handle_b64 or "", validate=True)
        except (TypeError, binascii.Error):
            handle = b""
        if not isinstance(handle_b64, str) or len(handle) != 64:
            refuse("ipc_handle.handle_b64", handle_b64, "64 bytes in base64")
        if handle_b64 not in self._mapped:
            device = torch.device("cuda", known[uuid])
            driver = Driver(device)
            address = driver.open(handle)
            self._opened.append((driver, address))
            self._mapped[handle_b64] = torch.as_tensor(DeviceBytes(address, nbytes), device=device)
        return self._mapped[handle_b64]

    def _of_file(self, name: Any, nbytes: int) -> torch.Tensor:
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            refuse("shared_memory", name, "/proc/PID/fd/NUMBER of a SharedBucket")
        if name not in self._mapped:
            with open(name, "r+b") as file:
                size = os.fstat(file.fileno()).st_size
                if size < nbytes:
                    refuse("nbytes", nbytes, f"at most the {size} that are there")
                self._mapped[name] = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
        return self._mapped[name]

    def close(self) -> None:
        """Lets go of all."""
        self._mapped.clear()
        for driver, address in self._opened:
            driver.close(address)
        self._opened.clear()
