"""New weights for an engine from a trainer elsewhere, call by call as vLLM's weight transfer has them."""

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nanovllm.errors import is_integer, refuse
from nanovllm.transfer.buckets import NamedTensors, as_bytes, entries_of, grouped, unpacked
from nanovllm.transfer.group import Broadcast, open_group
from nanovllm.transfer.shared import MappedBuckets

Relay = Callable[[Iterable[tuple[str, torch.Tensor]]], Iterator[tuple[str, torch.Tensor]]]
"""Yields the weights that have come, and sends them to the other engines meanwhile."""
PACKED_BYTES = 1 << 30
"""Tensors are broadcast together until their sum passes this, where neither side says otherwise."""


def _bytes_together(settings: dict[str, Any]) -> int:
    """Past which a broadcast ends; -1: each tensor has one of its own."""
    if not settings.get("packed"):
        return -1
    limit = settings.get("packed_buffer_size_bytes") or PACKED_BYTES
    if not is_integer(limit) or limit < 1:
        refuse("packed_buffer_size_bytes", limit, "an integer >= 1")
    return limit


class Updatable(Protocol):
    """Interface of an LLM, and of the engine inside it, that takes new weights."""

    @property
    def weight_version(self) -> int: ...

    def begin_update(self, in_flight: str, partial: bool) -> None: ...

    def update(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def finish_update(self, version: int | None) -> None: ...


class WeightReceiver:
    """The calls of vLLM's weight-transfer protocol on one engine. A server maps its routes to them:

    | call | method |
    |---|---|
    | POST /init_weight_transfer_engine {"init_info": info} | `init(info)` |
    | POST /start_weight_update | `start()` |
    | POST /update_weights {"update_info": info} | `update(info)`, which returns when all has come |
    | POST /finish_weight_update | `finish()`, returns the version |

    One thread at a time calls, the one that steps the engine or, for an LLM, any. The whole engine is one rank of the
    trainer's group: its ranks and replicas get the weights from it.
    """

    def __init__(self, engine: Updatable, device: torch.device | str, timeout: float = 300.0) -> None:
        """`device`: of the engine's rank 0. `timeout`: seconds that a wait for the trainer may take."""
        self._engine, self._device, self._timeout = engine, torch.device(device), timeout
        self._group: Broadcast | None = None
        self._store: dist.Store | None = None
        self._init_info: dict[str, Any] = {}
        self._buckets = MappedBuckets(self._device)

    def init(self, init_info: dict[str, Any]) -> None:
        """Joins the trainer's group: master_address, master_port (or nccl_unique_id_b64), rank_offset, world_size,
        packed, packed_buffer_size_bytes. With nothing, buckets of shared memory may come. Raises as open_group does."""
        self.close()
        if init_info:
            rank = init_info.get("rank_offset", 1)
            if not is_integer(rank) or rank < 1:
                refuse("rank_offset", rank, "an integer >= 1, as rank 0 is the trainer's")
            self._group, self._store = open_group(init_info, rank, self._device, self._timeout)
        self._init_info = dict(init_info)

    def start(self, in_flight: str = "recompute", partial: bool = False) -> None:
        """LLM.begin_update."""
        self._engine.begin_update(in_flight, partial)

    def update(self, update_info: dict[str, Any], relay: Relay = iter) -> None:
        """Takes in the tensors names, dtype_names, shapes: from a SharedBucket, where its message says so, else by
        broadcast. `relay`: see Relay. Raises ValueError naming what is wrong; RuntimeError where the trainer does not
        send in time, or no group was joined."""
        for tensors in self._groups(update_info):
            self._engine.update(relay(tensors))

    def tensors(self, update_info: dict[str, Any]) -> NamedTensors:
        """The tensors of an `update_info`, such as an adapter's, for whom they are. Those of a bucket lie in it."""
        for tensors in self._groups(update_info):
            yield from tensors

    def _groups(self, update_info: dict[str, Any]) -> Iterator[NamedTensors]:
        """The tensors in the groups in which they come."""
        if "ipc_handle" in update_info or "shared_memory" in update_info:
            yield self._buckets.tensors(update_info)
            return
        if self._group is None:
            raise RuntimeError("update_weights: no group was joined: call init_weight_transfer_engine first")
        limit = _bytes_together({**self._init_info, **update_info})
        for group in grouped(entries_of(update_info), limit, attrgetter("nbytes")):
            memory = torch.empty(sum(entry.nbytes for entry in group), dtype=torch.uint8, device=self._device)
            if memory.numel():
                self._group.broadcast(memory, 0)
            yield unpacked(memory, group)

    def forget_buckets(self) -> None:
        """Lets go of the buckets that are mapped; the next message maps its own again."""
        self._buckets.close()

    def finish(self, version: int | None = None) -> int:
        """LLM.finish_update; returns the version."""
        self._engine.finish_update(version)
        self._buckets.close()
        return int(self._engine.weight_version)

    def close(self) -> None:
        """Leaves the group, and lets go of what is mapped."""
        self._buckets.close()
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.close()


class WeightSender:
    """A trainer's side of the group, for trainers without vLLM: rank 0, which must be on another GPU than engines."""

    def __init__(self, init_info: dict[str, Any], device: torch.device | str, timeout: float = 300.0) -> None:
        """Hosts the rendezvous at init_info's master_address and master_port, and waits there for the other ranks, at
        most `timeout` seconds."""
        self._group, self._store = open_group(init_info, 0, torch.device(device), timeout)
        self._device, self._init_info = torch.device(device), init_info

    def send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Broadcasts all, in the order that the receivers' update_info names; DTensors are gathered."""
        contents = (as_bytes(tensor).to(self._device) for _, tensor in weights)
        for group in grouped(contents, _bytes_together(self._init_info), torch.Tensor.numel):
            memory = torch.cat(group)
            group.clear()
            if memory.numel():
                self._group.broadcast(memory, 0)

    def close(self) -> None:
        self._group.close()
        self._store = None
