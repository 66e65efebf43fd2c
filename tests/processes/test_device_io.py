"""Waiting for a device: pauses of this process do not count, and an engine whose device hangs can still be closed."""

import threading
import time
from typing import Any

import pytest
import torch
from process_checks import tiny_llm

from nanovllm.errors import StepTimeout
from nanovllm.runner import device_io
from nanovllm.runner.device_io import DeviceIO
from nanovllm.runner.memory_probe import TorchMemory


class Clock:
    """Stands in for `time` in device_io: it moves when somebody looks at the event or sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Event:
    """A step that ends at a moment of `clock`. Between look number `pause_after` and the next, `pause` seconds pass."""

    def __init__(self, clock: Clock, seconds: float, pause_after: int = 0, pause: float = 0.0) -> None:
        self._clock, self._end, self._looks = clock, clock.now + seconds, 0
        self._pause_after, self._pause = pause_after, pause

    def query(self) -> bool:
        done = self._clock.now >= self._end
        self._looks += 1
        self._clock.now += 1e-4 + (self._pause if self._looks == self._pause_after else 0.0)
        return done


def collect(event: Event, clock: Clock, monkeypatch: pytest.MonkeyPatch, timeout: float) -> list[int]:
    monkeypatch.setattr(device_io, "time", clock)
    io = DeviceIO(torch.device("cpu"))
    io._launched.append((torch.tensor([7, 8]), event, slice(0, 0), None))  # type: ignore[arg-type]
    return io.collect(timeout, lambda: False)[0]


@pytest.mark.parametrize("look", [1, 2, 10])
@pytest.mark.parametrize(("seconds", "pause", "timeout"), [(50.0, 100.0, 5.0), (100.5, 100.0, 5.0), (0.9, 0.9, 0.5)])
def test_a_pause_of_this_process_is_no_timeout(
    seconds: float, pause: float, timeout: float, look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z between a look at the event and a look at the clock; the step ends meanwhile, or shortly after."""
    clock = Clock()
    assert collect(Event(clock, seconds, look, pause), clock, monkeypatch, timeout) == [7, 8]


def test_a_step_that_does_not_end_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    begin = clock.now
    with pytest.raises(StepTimeout, match=r"step_timeout=5\.0 s"):
        collect(Event(clock, 1e9), clock, monkeypatch, timeout=5.0)
    assert clock.now - begin == pytest.approx(5.0, abs=0.1)


def test_rows_of_padding_are_left_out() -> None:
    io = DeviceIO(torch.device("cpu"))
    io.receive(torch.tensor([5, 1, 1, 8, -1], dtype=torch.int32), slice(1, 3))
    assert io.collect(1.0, lambda: False) == ([5, 8, -1], None)


def test_tokens_that_nobody_collects_are_not_copied() -> None:
    """Those of all ranks but the first."""
    io = DeviceIO(torch.device("cpu"), keeps_tokens=False)
    io.receive(torch.empty(3, dtype=torch.int32, device="meta"), slice(0))


@pytest.mark.parametrize("how", ["hangs", "raises"])
def test_close_after_a_failure_waits_for_no_device(how: str, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    def synchronize(*_: Any) -> None:
        if how == "raises":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        never.wait()

    def empty_cache() -> None:
        raise AssertionError("freeing memory waits for the device")

    llm = tiny_llm(tiny, tensor_parallel_size=1)
    executor = llm.engine.executor
    gpu = TorchMemory.__new__(TorchMemory)
    gpu._device = torch.device("cuda")
    monkeypatch.setattr(executor.runner.memory, "_gpu", gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    executor._failure = "a test"
    waking = threading.Timer(10.0, never.set)
    waking.start()
    begin = time.monotonic()
    llm.close()
    waking.cancel()
    assert time.monotonic() - begin < 5.0
