"""Device memory that every rank of one host can read and write: one block a rank, mapped into all the others.

The blocks travel by CUDA's inter-process handles (driver API through ctypes). `torch.distributed._symmetric_memory` is
not used: its newer versions look a registered process group up by name, and engines here register none; and where only
plain handles are opened, no NVLink multicast object can come into being by accident. docs/peer-memory.md shows the
block and says what each region holds.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import NamedTuple

import torch
from torch.distributed import Store

from nanovllm.parallel.peer.driver import DeviceBytes, Driver
from nanovllm.parallel.peer.limits import PEER_BYTES, one_shot_rows

MAX_PROGRAMS = 128
"""Maximum programs of one launch: each must be resident for its peers to make progress, and the chip has 132 SMs."""

MAX_SPLIT = 4
"""Parts that the columns of a row are cut into, for two-shot sums of few rows."""

SENTINELS = {2: -(2**15), 4: -(2**31), 8: -(2**63)}
"""Item size -> what an empty place holds, read as an integer: -0.0 for floats, the smallest int64 for keys."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLAG_STRIDE = 32
"""int32 between two kinds of flags: a line of memory for each."""

_ALIGNMENT = 512  # bytes: every region starts where 16-byte accesses and whole lines do


class PeerMemoryUnavailable(RuntimeError):
    """The ranks cannot map each other's memory; every rank raises it together, and the caller falls back to NCCL."""


class Region(NamedTuple):
    """An array in a block, contiguous."""

    offset: int
    """Byte of the block where it begins."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Byte where the next may begin."""
        return self.offset + -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The array, in a block uint8 [nbytes]."""
        return block[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """Capacities of a block, in rows of `hidden_size` elements and in int64 keys, and its regions; equal on every rank,
    so that one offset serves all base addresses."""

    world_size: int
    hidden_size: int
    dtype: torch.dtype
    one_shot_rows: int
    two_shot_rows: int
    max_keys: int
    half_rows: int = 0

    @classmethod
    def for_limits(
        cls, world_size: int, hidden_size: int, dtype: torch.dtype, max_rows: int, max_keys: int, half_rows: int = 0
    ) -> "Layout":
        """Capacities that serve `max_rows` rows, and halves of `half_rows`, as far as limits.py leaves them to peer
        memory."""
        row = hidden_size * dtype.itemsize
        most = PEER_BYTES // row
        one_shot, two_shot = min(max_rows, one_shot_rows(world_size, row, rounds=True)), min(max_rows, most)
        two_shot = two_shot if two_shot > one_shot_rows(world_size, row) else 0
        return cls(world_size, hidden_size, dtype, one_shot, two_shot, max_keys, min(half_rows, most))

    @property
    def units(self) -> int:
        """Rows of a two-shot all-reduce that one rank owns."""
        return -(-self.two_shot_rows // self.world_size)

    @property
    def half_units(self) -> int:
        """Rows of half a step that one rank owns."""
        return -(-self.half_rows // self.world_size)

    @cached_property
    def regions(self) -> dict[str, Region]:
        """Regions by name, in their order; docs/peer-memory.md says what each holds. The first dimension is the parity
        of a call, and for the last three the half of a step."""
        world, hidden, rows = self.world_size, self.hidden_size, self.dtype
        regions, end = {}, 0
        for name, dtype, *shape in (
            ("one_shot", rows, world, self.one_shot_rows, hidden),
            ("scatter", rows, world, self.units, hidden),
            ("gather", rows, self.units, world, hidden),
            ("squares", torch.float32, self.units, world, MAX_SPLIT, MAX_SPLIT),
            ("keys", torch.int64, world, self.max_keys),
            ("inbox", rows, world, self.half_units, hidden),
            ("gathered", rows, self.half_rows, hidden),
            ("flags", torch.int32, 2, _FLAG_STRIDE),
        ):
            regions[name] = found = Region(end, (2, *shape), dtype)
            end = found.end
        return regions

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.regions["flags"].end


def fill_with_sentinels(block: torch.Tensor, layout: Layout) -> None:
    """block uint8 [layout.nbytes]: every place becomes empty, every flag zero."""
    block.zero_()
    for name in ("one_shot", "scatter", "gather", "squares", "keys"):
        region = layout.regions[name]
        size = region.dtype.itemsize
        region.of(block).view(_INTEGERS[size]).fill_(SENTINELS[size])


def agree(
    store: Store, phase: str, rank: int, world_size: int, work: Callable[[], bytes], timeout: float = 60.0
) -> list[bytes]:
    """Does this rank's work, and returns what the work of every rank returned, in their order. Where one fails, or does
    not answer within `timeout` seconds, all raise PeerMemoryUnavailable."""
    keys = [f"peer_memory/{phase}/{each}" for each in range(world_size)]
    try:
        text = b"+" + work()
    except Exception as failure:  # whatever it was, the other ranks must hear of it
        text = f"-{type(failure).__name__}: {failure}".encode()
    try:
        store.set(keys[rank], text.hex())
        store.wait(keys, timedelta(seconds=timeout))
        answers = [bytes.fromhex(store.get(key).decode()) for key in keys]
    except RuntimeError as failure:
        raise PeerMemoryUnavailable(f"peer memory, {phase}: a rank did not answer ({failure})") from failure
    errors = [f"rank {each}: {answer[1:].decode()}" for each, answer in enumerate(answers) if answer[:1] != b"+"]
    if errors:
        raise PeerMemoryUnavailable(f"peer memory, {phase}: " + "; ".join(errors))
    return [answer[1:] for answer in answers]


def _uuid(index: int) -> str:
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", index))


def _check_access(rank: int, device: torch.device, uuids: list[str], allow_shared_device: bool) -> None:
    visible = {_uuid(index): index for index in range(torch.cuda.device_count())}
    for peer, uuid in enumerate(uuids):
        if peer == rank or (allow_shared_device and uuid == uuids[rank]):
            continue
        if uuid == uuids[rank]:
            raise RuntimeError(f"ranks {rank} and {peer} are on the same GPU {uuid}")
        if uuid not in visible:
            raise RuntimeError(f"GPU {uuid} of rank {peer} is not visible to this process")
        if not torch.cuda.can_device_access_peer(device.index, visible[uuid]):
            raise RuntimeError(f"cuda:{device.index} has no peer access to cuda:{visible[uuid]} of rank {peer}")


class PeerMemory:
    """One rank's block and the addresses of all of them.

    store: a Store that only this block uses. layout: of rows of a multiple of 8 elements of bfloat16, float16 or
    float32. timeout: seconds to wait for the other ranks. allow_shared_device: ranks may sit on one GPU (they take
    turns by time slice).
    The memory is outside torch's allocator (`torch.cuda.mem_get_info` counts it, `memory_allocated` does not).
    """

    def __init__(
        self, store: Store, rank: int, device: torch.device, layout: Layout, *, timeout: float = 60.0,
        allow_shared_device: bool = False,
    ) -> None:  # fmt: skip
        if layout.hidden_size % 8 or layout.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            need = "a multiple of 8 elements of bfloat16, float16 or float32"
            raise PeerMemoryUnavailable(f"peer memory: rows of {layout.hidden_size} x {layout.dtype}, need {need}")
        self.rank, self.device, self.layout = rank, torch.device(device), layout
        self._driver: Driver | None = None
        self._own = 0
        self._mapped: dict[int, int] = {}  # peer -> address here

        def together(phase: str, work: Callable[[], bytes]) -> list[bytes]:
            return agree(store, phase, rank, layout.world_size, work, timeout)

        try:
            uuids = [uuid.decode() for uuid in together("device", self._device_id)]
            handles = together("allocate", lambda: self._allocate(uuids, allow_shared_device))
            together("map", lambda: self._map(handles))
            together("fill", self._fill)  # no rank writes into a block before its sentinels are there
        except Exception:
            self._release()
            raise

    def _device_id(self) -> bytes:
        if self.device.type != "cuda" or self.device.index is None:
            raise RuntimeError(f"device {self.device} (need cuda:<index>)")
        return _uuid(self.device.index).encode()

    def _allocate(self, uuids: list[str], allow_shared_device: bool) -> bytes:
        """The handle of this rank's block."""
        _check_access(self.rank, self.device, uuids, allow_shared_device)
        self._driver = Driver(self.device)
        self._own = self._driver.allocate(self.layout.nbytes)
        return self._driver.export(self._own)

    def _map(self, handles: list[bytes]) -> bytes:
        assert self._driver is not None
        for peer, handle in enumerate(handles):
            if peer != self.rank:
                self._mapped[peer] = self._driver.open(handle)
        return b""

    def _fill(self) -> bytes:
        layout = self.layout
        self.block = torch.as_tensor(DeviceBytes(self._own, layout.nbytes), device=self.device)
        """uint8 [nbytes]: this rank's own block."""
        assert self.block.data_ptr() == self._own, "torch copied the block instead of viewing it"
        fill_with_sentinels(self.block, layout)
        addresses = [self._own if peer == self.rank else self._mapped[peer] for peer in range(layout.world_size)]
        self.peers = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        """int64 [world]: base address of every rank's block, as this rank sees it."""
        self.parity = torch.zeros(3, MAX_PROGRAMS, dtype=torch.int32, device=self.device)
        """int32 [3, programs]: the parity of the next call, for each kind of kernel and each program of it."""
        self.abort_word = torch.zeros(1, dtype=torch.int32, device=self.device)
        """int32 [1]: nonzero stops every wait (1: the host said so; 2: a wait passed its bound)."""
        self._abort_stream = torch.cuda.Stream(self.device)
        self._abort_source = torch.ones(1, dtype=torch.int32, device="cpu").pin_memory()
        torch.cuda.synchronize(self.device)
        return b""

    def send(self, peer: int, source: torch.Tensor, place: torch.Tensor) -> None:
        """Copies `source`, contiguous, to where `place` in this rank's block is in another's, in the current stream and
        by a copy engine: no multiprocessor works for it. (torch's own copies ask for the device that owns an address,
        which they know of their own memory alone.)"""
        assert self._driver is not None and peer != self.rank
        address = self._mapped[peer] + place.data_ptr() - self._own
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._driver.copy(address, source.data_ptr(), source.nbytes, stream)

    def abort(self) -> None:
        """Stops every wait of this rank's kernels, from any thread, also while one spins: they end with garbage. The
        object is then fit only for `close`. The copy engine does it, so no free SM is needed."""
        with torch.cuda.stream(self._abort_stream):
            self.abort_word.copy_(self._abort_source, non_blocking=True)

    def _release(self) -> None:
        driver, self._driver = self._driver, None
        if driver is None:
            return
        for address in self._mapped.values():
            with contextlib.suppress(RuntimeError):  # a dead peer or a broken context: nothing more can be given back
                driver.close(address)
        if self._own:
            with contextlib.suppress(RuntimeError):
                driver.free(self._own)

    def close(self) -> None:
        """Stops what still waits, unmaps, frees. Only rank 0 gets here, after the other ranks' processes have ended and
        what they had mapped has gone with them. No graph with kernels of this block may be replayed afterwards."""
        if self._driver is not None:
            with contextlib.suppress(RuntimeError):
                self.abort()
                torch.cuda.synchronize(self.device)
            self._release()
