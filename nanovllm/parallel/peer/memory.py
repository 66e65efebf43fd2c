"""Device memory that every rank of one host can read and write: one block a rank, mapped into all the others.

The blocks travel by CUDA's inter-process handles (driver API through ctypes). `torch.distributed._symmetric_memory` is
not used: its newer versions look a registered process group up by name, and engines here register none; and where only
plain handles are opened, no NVLink multicast object can come into being by accident. docs/peer-memory.md shows the
block and says what each region holds.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch.distributed import Store

from nanovllm.parallel.peer.driver import DeviceBytes, Driver
from nanovllm.parallel.peer.limits import PEER_BYTES, one_shot_rows

MAX_PROGRAMS = 128
"""Most programs of one launch: each must be resident for its peers to make progress, and the chip has 132 SMs."""

MAX_SPLIT = 4
"""Parts that the columns of a row are cut into, for two-shot sums of few rows."""

SENTINELS = {2: -(2**15), 4: -(2**31), 8: -(2**63)}
"""Item size -> what an empty place holds, read as an integer: -0.0 for floats, the smallest int64 for keys."""

FLAG_STRIDE = 32
"""int32 between two kinds of flags: a line of memory for each."""

_ALIGNMENT = 512  # bytes: every region starts where 16-byte accesses and whole lines do


class PeerMemoryUnavailable(RuntimeError):
    """The ranks cannot map each other's memory; every rank raises it together, and the caller falls back to NCCL."""


@dataclass(frozen=True)
class Layout:
    """Capacities of a block, in rows of `hidden_size` elements of `itemsize` bytes and in int64 keys, and the byte at
    which each region begins; equal on every rank, so that one offset serves all base addresses."""

    world_size: int
    hidden_size: int
    itemsize: int
    one_shot_rows: int
    two_shot_rows: int
    max_keys: int
    half_rows: int = 0
    units: int = field(init=False)
    """Rows of a two-shot all-reduce that one rank owns."""
    half_units: int = field(init=False)
    """Rows of half a step that one rank owns."""
    scatter: int = field(init=False)
    gather: int = field(init=False)
    squares: int = field(init=False)
    keys: int = field(init=False)
    inbox: int = field(init=False)
    gathered: int = field(init=False)
    flags: int = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        world, row = self.world_size, self.hidden_size * self.itemsize
        units, half_units = -(-self.two_shot_rows // world), -(-self.half_rows // world)
        found, end = {"units": units, "half_units": half_units}, 0
        for size, following in (
            (2 * world * self.one_shot_rows * row, "scatter"),
            (2 * world * units * row, "gather"),
            (2 * world * units * row, "squares"),
            (2 * world * units * MAX_SPLIT**2 * 4, "keys"),
            (2 * world * self.max_keys * 8, "inbox"),
            (2 * world * half_units * row, "gathered"),
            (2 * self.half_rows * row, "flags"),
            (2 * 2 * FLAG_STRIDE * 4, "nbytes"),
        ):
            found[following] = end = end + -(-size // _ALIGNMENT) * _ALIGNMENT
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @classmethod
    def for_limits(
        cls, world_size: int, hidden_size: int, itemsize: int, max_rows: int, max_keys: int, half_rows: int = 0
    ) -> "Layout":
        """Capacities that serve `max_rows` rows, and halves of `half_rows`, as far as limits.py leaves them to peer
        memory."""
        row = hidden_size * itemsize
        most = PEER_BYTES // row
        one_shot, two_shot = min(max_rows, one_shot_rows(world_size, row, rounds=True)), min(max_rows, most)
        two_shot = two_shot if two_shot > one_shot_rows(world_size, row) else 0
        return cls(world_size, hidden_size, itemsize, one_shot, two_shot, max_keys, min(half_rows, most))


def fill_with_sentinels(block: torch.Tensor, layout: Layout) -> None:
    """block uint8 [layout.nbytes]: every place becomes empty, every flag zero."""
    rows, squares, keys = block[: layout.inbox].tensor_split((layout.squares, layout.keys))
    rows.view(torch.int16 if layout.itemsize == 2 else torch.int32).fill_(SENTINELS[layout.itemsize])
    squares.view(torch.int32).fill_(SENTINELS[4])
    keys.view(torch.int64).fill_(SENTINELS[8])
    block[layout.inbox :].zero_()


class _Rounds:
    """Rounds over the store in which every rank posts bytes or an error, and all go on or all give up."""

    def __init__(self, store: Store, name: str, rank: int, world_size: int, timeout: float) -> None:
        self._store, self._name, self._timeout = store, name, timeout
        self._rank, self._world_size = rank, world_size

    def post(self, phase: str, payload: bytes, error: str | None = None, timeout: float | None = None) -> list[bytes]:
        """Posts this rank's payload (or error) and returns everyone's, in rank order."""
        keys = [f"{self._name}/{phase}/{rank}" for rank in range(self._world_size)]
        text = b"+" + payload if error is None else b"-" + error.encode()
        try:
            self._store.set(keys[self._rank], text.hex())
            self._store.wait(keys, timedelta(seconds=timeout or self._timeout))
            answers = [bytes.fromhex(self._store.get(key).decode()) for key in keys]
        except RuntimeError as failure:
            raise PeerMemoryUnavailable(f"peer memory, {phase}: a rank did not answer ({failure})") from failure
        errors = [f"rank {rank}: {a[1:].decode()}" for rank, a in enumerate(answers) if a[:1] != b"+"]
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

    store: a Store that only this engine uses. max_rows: the most rows of one all-reduce (larger sums go to NCCL anyway,
    see limits.py). hidden_size: elements of a row, a multiple of 8. dtype: bfloat16, float16 or float32.
    max_keys: the most int64 keys of one maximum. half_rows: the most rows of half a step. name: keeps two blocks over
    one store apart. timeout: seconds to wait for the other ranks.
    allow_shared_device: ranks may sit on one GPU (for tests: they take turns by time slice).
    The memory is outside torch's allocator (`torch.cuda.mem_get_info` counts it, `memory_allocated` does not).
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, device: torch.device, max_rows: int, hidden_size: int,
        dtype: torch.dtype, *, max_keys: int = 1024, half_rows: int = 0,
        layout: Layout | None = None, name: str = "peer_memory", timeout: float = 60.0,
        allow_shared_device: bool = False,
    ) -> None:  # fmt: skip
        if hidden_size % 8 or dtype not in (torch.bfloat16, torch.float16, torch.float32):
            need = "a multiple of 8 elements of bfloat16, float16 or float32"
            raise PeerMemoryUnavailable(f"peer memory: rows of {hidden_size} x {dtype}, need {need}")
        self.rank, self.world_size, self.device, self.dtype = rank, world_size, torch.device(device), dtype
        itemsize = torch.empty((), dtype=dtype, device="cpu").element_size()
        self.layout = layout or Layout.for_limits(world_size, hidden_size, itemsize, max_rows, max_keys, half_rows)
        self._rounds = _Rounds(store, name, rank, world_size, timeout)
        self._driver: Driver | None = None
        self._own = 0
        self._mapped: dict[int, int] = {}  # peer -> address here
        try:
            self._connect(allow_shared_device)
        except Exception:
            self._unmap()
            self._free()
            raise

    def _connect(self, allow_shared_device: bool) -> None:
        uuids = [uuid.decode() for uuid in self._agree("device", self._device_id)]
        handles = self._agree("allocate", lambda: self._allocate(uuids, allow_shared_device))
        self._agree("map", lambda: self._map(handles))
        self._agree("fill", self._fill)  # no rank writes into a block before its sentinels are there

    def _agree(self, phase: str, work: Callable[[], bytes]) -> list[bytes]:
        """Does this rank's work; returns what the work of every rank returned. Where one fails, all raise."""
        payload, error = b"", None
        try:
            payload = work()
        except Exception as failure:  # whatever it was, the other ranks must hear of it
            error = f"{type(failure).__name__}: {failure}"
        return self._rounds.post(phase, payload, error)

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
        self._make_state()
        torch.cuda.synchronize(self.device)
        return b""

    def _make_state(self) -> None:
        layout = self.layout
        self.block = torch.as_tensor(DeviceBytes(self._own, layout.nbytes), device=self.device)
        """uint8 [nbytes]: this rank's own block."""
        assert self.block.data_ptr() == self._own, "torch copied the block instead of viewing it"
        fill_with_sentinels(self.block, layout)
        addresses = [self._own if peer == self.rank else self._mapped[peer] for peer in range(self.world_size)]
        self.peers = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        """int64 [world]: base address of every rank's block, as this rank sees it."""
        self.parity = torch.zeros(3, MAX_PROGRAMS, dtype=torch.int32, device=self.device)
        """int32 [3, programs]: the parity of the next call, for each kind of kernel and each program of it."""
        self.abort_word = torch.zeros(1, dtype=torch.int32, device=self.device)
        """int32 [1]: nonzero stops every wait (1: the host said so; 2: a wait passed its bound)."""
        self._abort_stream = torch.cuda.Stream(self.device)
        self._abort_source = torch.ones(1, dtype=torch.int32, device="cpu").pin_memory()
        self._abort_target = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()

    def send(self, peer: int, offset: int, source: torch.Tensor) -> None:
        """Copies `source`, contiguous, to byte `offset` of another rank's block, in the current stream and by a copy
        engine: no multiprocessor works for it. (torch's own copies ask for the device that owns an address, which they
        know of their own memory alone.)"""
        assert self._driver is not None and peer != self.rank
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._driver.copy(self._mapped[peer] + offset, source.data_ptr(), source.nbytes, stream)

    def abort(self) -> None:
        """Stops every wait of this rank's kernels, from any thread, also while one spins: they end with garbage. The
        object is then fit only for `close`. The copy engine does it, so no free SM is needed."""
        with torch.cuda.stream(self._abort_stream):
            self.abort_word.copy_(self._abort_source, non_blocking=True)

    def aborted(self) -> int:
        """The abort word, read beside running kernels: 0, 1 (`abort` was called) or 2 (a wait passed its bound)."""
        with torch.cuda.stream(self._abort_stream):
            self._abort_target.copy_(self.abort_word, non_blocking=True)
        self._abort_stream.synchronize()
        return int(self._abort_target.item())

    def _unmap(self) -> None:
        driver, mapped, self._mapped = self._driver, self._mapped, {}
        for address in mapped.values():
            with contextlib.suppress(RuntimeError):  # a dead peer or a broken context: nothing more can be given back
                assert driver is not None
                driver.close(address)

    def _free(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None and self._own:
            with contextlib.suppress(RuntimeError):
                driver.free(self._own)
        self._own = 0

    def close(self) -> None:
        """Stops what still waits, unmaps, frees. Only rank 0 gets here, after the other ranks' processes have ended and
        what they had mapped has gone with them. No graph with kernels of this block may be replayed afterwards."""
        if self._driver is None:
            return
        with contextlib.suppress(RuntimeError):
            self.abort()
            torch.cuda.synchronize(self.device)
        self._unmap()
        self._free()
