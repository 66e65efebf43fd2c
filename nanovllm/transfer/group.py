"""A group of a trainer, rank 0, and engines, over which the trainer broadcasts; made from an address.

The rendezvous is that of vLLM's weight transfer, so that its senders serve: rank 0 hosts a TCPStore, NCCL's unique id
lies there as a pickle under `broadcast_from/0/0`, and the ranks sum one number before the first broadcast. On a CPU
gloo does the same over the same store.
"""

import io
import pickle
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nanovllm.errors import is_integer, refuse
from nanovllm.transfer.buckets import from_base64

_ID_KEY = "broadcast_from/0/0"
_ID_BYTES = 128  # of NCCL's unique id


class Broadcast(Protocol):
    def broadcast(self, memory: torch.Tensor, source: int) -> None: ...

    def close(self) -> None: ...


class Gloo:
    """Process group over gloo, with the interface of NCCL's, for processes of one host without GPUs."""

    def __init__(self, size: int, rank: int, store: dist.Store, timeout: float) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout)
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)

    def broadcast(self, memory: torch.Tensor, source: int) -> None:
        """uint8 [n]: from rank `source` to all; returns when it is there."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._group.broadcast([memory], options).wait()

    def close(self) -> None:
        self._group = None


def open_group(
    init_info: dict[str, Any], rank: int, device: torch.device, timeout: float = 300.0
) -> tuple[Broadcast, dist.Store | None]:
    """Joins as `rank` of init_info["world_size"] ranks, which meet at init_info's master_address and master_port, or by
    nccl_unique_id_b64; rank 0 hosts the store, which lives as long as what is returned. Returns when all are there.

    Raises ValueError naming a field that is missing or wrong; RuntimeError where ranks do not come within `timeout`
    seconds.
    """
    size = init_info.get("world_size")
    if not is_integer(size) or not rank < size:
        refuse("world_size", size, f"an integer > {rank}, this rank")
    given = init_info.get("nccl_unique_id_b64")
    if given is not None:
        return _communicator(size, rank, from_base64("nccl_unique_id_b64", given, _ID_BYTES), device, timeout), None
    address, port = init_info.get("master_address"), init_info.get("master_port")
    if not isinstance(address, str) or not address:
        refuse("master_address", address, "the name or number of the trainer's host")
    if not is_integer(port) or not 0 < port < 65536:
        refuse("master_port", port, "in 1..65535")
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(address, port, size, is_master=rank == 0, timeout=limit, wait_for_workers=False)
    if device.type == "cpu":
        return Gloo(size, rank, store, timeout), store
    if rank == 0:
        from nanovllm.transfer.nccl import UniqueId, new_unique_id

        unique_id = new_unique_id()
        store.set(_ID_KEY, pickle.dumps(UniqueId.from_buffer_copy(unique_id)))  # type: ignore[arg-type]
    else:
        unique_id = read_unique_id(store.get(_ID_KEY))
    return _communicator(size, rank, unique_id, device, timeout), store


def _communicator(size: int, rank: int, unique_id: bytes, device: torch.device, timeout: float) -> Broadcast:
    if device.type != "cuda":
        raise ValueError(f"nccl_unique_id_b64: needs a GPU, this engine runs on {device}")
    from nanovllm.transfer.nccl import Communicator

    return Communicator(size, rank, unique_id, device, timeout)


def read_unique_id(pickled: bytes) -> bytes:
    """The 128 bytes of a pickled ctypes structure, whatever module it is from: nothing else of the pickle is run.
    Raises ValueError for any other."""
    try:
        found = _UniqueIdReader(io.BytesIO(pickled)).load()
    except Exception as error:
        raise ValueError(f"{_ID_KEY}: not the pickle of a ncclUniqueId: {error}") from None
    if not isinstance(found, bytes) or len(found) != _ID_BYTES:
        raise ValueError(f"{_ID_KEY}: not the pickle of a ncclUniqueId")
    return found


class _UniqueIdReader(pickle.Unpickler):
    """Knows how ctypes writes a structure, a class and its memory, and takes the memory."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_ctypes", "_unpickle"):
            return lambda _, state: state[1]
        if name in ("ncclUniqueId", "UniqueId"):
            return None
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
