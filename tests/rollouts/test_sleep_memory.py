"""Memory that a model needs when its parameters move to memory that can sleep, on a driver that counts."""

import ctypes
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nanovllm.config import EngineConfig
from nanovllm.errors import OutOfMemory
from nanovllm.kernels import select_kernels
from nanovllm.layers.memory import Pages, Slot, pages_of
from nanovllm.runner import pinned_memory, sleep, virtual_memory
from nanovllm.runner.sleep import SleepableMemory
from nanovllm.runner.state_layout import one_group
from nanovllm.runner.state_memory import StateMemory

PAGE = 2 << 20


class Driver:
    """Device memory in this process's own; it counts what has been created and not released, and that a mapping is
    taken down as it was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.created: dict[int, int] = {}
        self.mappings: dict[int, int] = {}
        self.most = 0
        self.room = 1 << 40
        """Bytes that others leave."""
        self.others: list[weakref.ref[nn.Parameter]] = []
        self._ranges: list[Any] = []

    def call(self, name: str, *args: Any) -> None:
        if name == "cuMemAddressReserve":
            self._ranges.append((ctypes.c_uint8 * args[1].value)())
            args[0]._obj.value = ctypes.addressof(self._ranges[-1])
        elif name == "cuMemCreate":
            handle, size = args[0]._obj, args[1].value
            assert size % PAGE == 0
            if sum(self.created.values()) + size > self.room:
                raise OutOfMemory("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)")
            handle.value = len(self.created) + 1
            self.created[handle.value] = size
            held = sum(p.nbytes for ref in self.others if (p := ref()) is not None)
            self.most = max(self.most, held + sum(self.created.values()))
        elif name == "cuMemMap":
            self.mappings[args[0].value] = args[1].value
        elif name == "cuMemUnmap":
            assert self.mappings.pop(args[0].value) == args[1].value
        elif name == "cuMemRelease":
            self.created[args[0].value] = 0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SleepableMemory:
    def as_bytes(address: int, nbytes: int) -> np.ndarray:
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)

    monkeypatch.setattr(virtual_memory, "DeviceBytes", as_bytes)
    monkeypatch.setattr(sleep, "Driver", Driver)
    monkeypatch.setattr(sleep, "_PIECE", 2 * PAGE)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return SleepableMemory(torch.device("cpu"))


def test_a_model_moves_a_piece_at_a_time(memory: SleepableMemory) -> None:
    """It needs its own size, a piece and its largest parameter; values and sharing stay."""
    shapes = [(1 << 19, 3), (1000,), (1 << 20,), (7, 11), (1 << 19, 2), *[(1 << 18,)] * 30]
    model = nn.ParameterList(nn.Parameter(torch.randn(shape), requires_grad=False) for shape in shapes)
    model.append(model[2])
    expected = [p.clone() for p in model]
    driver: Driver = memory._driver  # type: ignore[assignment]
    driver.others = [weakref.ref(p) for p in model]
    total, largest = sum(p.nbytes for p in model[:-1]), max(p.nbytes for p in model)
    memory.adopt("weights", model)
    assert all(torch.equal(p, value) for p, value in zip(model, expected, strict=True)) and model[-1] is model[2]
    assert total <= memory.nbytes <= total + PAGE + 256 * len(shapes)
    assert driver.most <= total + largest + 3 * PAGE
    for tags in (("weights",), ("weights",)):  # what has been mapped in pieces goes and returns
        memory.sleep(tags, keep_weights=False)
        assert memory.nbytes == 0 == sum(driver.created.values()) and not driver.mappings
        assert memory.prepare_wake_up(tags) is None
        memory.wake_up(tags)
        assert memory.nbytes >= total and not any(p.any() for p in model)


def test_no_memory_changes_nothing(memory: SleepableMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer holds the device's memory, or the host has none: what was there stays, and a later call does it."""
    model = nn.ParameterList([nn.Parameter(torch.randn(1 << 19, 3), requires_grad=False)])
    expected = model[0].clone()
    memory.adopt("weights", model)
    memory.take("kv_cache", 5 * PAGE)
    driver: Driver = memory._driver  # type: ignore[assignment]
    both, mapped = ("kv_cache", "weights"), memory.nbytes
    monkeypatch.setattr(pinned_memory, "available_memory", lambda: PAGE)
    assert "host memory are needed, and 2097152 are available" in str(memory.prepare_sleep())
    assert torch.equal(model[0], expected) and memory.nbytes == mapped
    monkeypatch.setattr(pinned_memory, "available_memory", lambda: 1 << 40)
    assert memory.prepare_sleep() is None
    memory.sleep(both, keep_weights=True)
    for room in (0, 5 * PAGE):  # for nothing, and for the first of two
        driver.room = room
        assert "CUDA_ERROR_OUT_OF_MEMORY" in str(memory.prepare_wake_up(both))
        assert memory.nbytes == 0 == sum(driver.created.values()) and not driver.mappings
    driver.room = 1 << 40
    assert memory.prepare_wake_up(both) is None
    memory.wake_up(both)
    assert torch.equal(model[0], expected) and memory.nbytes >= mapped


class Mixer:
    """A mixer that remembers pages and a slot."""

    def __init__(self) -> None:
        self.memory = (Pages(2, (16, 16)), Slot((5,)))

    def bind(self, *memory: Any) -> None:
        self.bound = memory


def test_slots_sleep_beside_blocks(memory: SleepableMemory) -> None:
    """What layers were given is at its addresses afterwards, and zeros."""
    cpu, mixer = torch.device("cpu"), Mixer()
    config = EngineConfig.from_options("model", num_state_lines=3, kvcache_block_size=16)
    layout = one_group(pages_of([mixer]))
    state = StateMemory(config, [mixer], layout, torch.float32, cpu, select_kernels(cpu), sleepable=memory)
    state.choose_lines(0)
    state.allocate(state.size(7))
    pages, slots = mixer.bound
    every = [*pages.tensors, slots]
    addresses = [tensor.data_ptr() for tensor in every]
    assert slots.shape == (4, 5) and memory.nbytes >= state.fixed_bytes + 7 * state.block_bytes
    for tensor in every:
        assert not tensor.any()
        tensor.fill_(3)
    memory.sleep(("kv_cache",), keep_weights=False)
    assert memory.nbytes == 0
    assert memory.prepare_wake_up(("kv_cache",)) is None
    memory.wake_up(("kv_cache",))
    assert [tensor.data_ptr() for tensor in every] == addresses and not any(tensor.any() for tensor in every)
    state.free()
    assert memory.nbytes == 0 and not memory._driver.mappings  # type: ignore[attr-defined]
