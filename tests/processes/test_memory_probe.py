"""An engine's own memory on a GPU on which others take and give back memory at any point of its start."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.runner.memory_probe import GIB, MIB, MemoryProbe, TorchMemory
from nanovllm.runner.state_memory import num_blocks

DEVICE = torch.device("cuda")


@dataclass
class Gpu(TorchMemory):
    """A GPU of 140 GiB with this process on it: what torch holds and caches, what libraries and others hold."""

    total: int = 140 * GIB
    context: int = 528 * MIB
    live: int = 0
    cached: int = 0
    garbage: int = 0
    libraries: int = 528 * MIB
    mapped: int = 0
    others: int = 0
    most: int = 0
    meanwhile: Callable[["Gpu"], None] = field(default=lambda gpu: None)
    """Act of others each time that this process does something."""

    def moved(self) -> None:
        self.meanwhile(self)
        own = self.live + self.cached + self.libraries + self.mapped
        self.others = max(0, min(self.others, self.total - own))

    def free(self) -> int:
        self.moved()
        return self.total - self.live - self.cached - self.libraries - self.mapped - self.others

    def reserved(self) -> int:
        return self.live + self.cached

    def reset_peak(self) -> None:
        self.most = self.reserved()

    def peak(self) -> int:
        return self.most

    def release_cached(self) -> None:
        self.moved()
        self.cached = 0

    def collect(self) -> None:
        self.give_back(self.garbage)
        self.garbage = 0

    def take(self, nbytes: int) -> None:
        """Takes memory by torch, from its cache as far as that goes."""
        self.moved()
        self.cached, self.live = max(0, self.cached - nbytes), self.live + nbytes
        self.most = max(self.most, self.reserved())

    def give_back(self, nbytes: int) -> None:
        self.live, self.cached = self.live - nbytes, self.cached + nbytes

    def load(self, nbytes: int) -> None:
        """Takes memory by a library."""
        self.moved()
        self.libraries += nbytes


@dataclass
class Start:
    """One engine's start, in the order of ModelRunner: what it has when its cache has been sized, and what is sized."""

    weights: int = 8 * GIB
    step: int = 2 * GIB
    mapped: int = 0
    kernels: int = 80 * MIB
    graphs: int = 300 * MIB

    def run(self, gpu: Gpu, utilization: float) -> tuple[MemoryProbe, int]:
        probe = MemoryProbe(DEVICE, gpu)
        probe.count(lambda: gpu.mapped)
        with probe.libraries():
            gpu.take(self.weights)
            gpu.mapped += self.mapped
            gpu.load(self.kernels)
        with probe.libraries():
            gpu.load(self.kernels)
            probe.begin_step()
            gpu.take(self.step)
            gpu.give_back(self.step)
            step = probe.end_step()

        def capture() -> None:
            gpu.take(self.graphs // 2)
            gpu.load(self.graphs - self.graphs // 2)

        graphs = probe.growth(capture, 64 * MIB)
        gpu.give_back(self.graphs // 2)
        gpu.libraries -= self.graphs - self.graphs // 2
        return probe, probe.kv_budget(utilization, step=step, graphs=graphs)

    @property
    def taken(self) -> int:
        return self.weights + self.step + self.mapped + 2 * self.kernels + self.graphs + 528 * MIB


def test_alone_it_is_exact() -> None:
    start, gpu = Start(mapped=3 * GIB), Gpu()
    probe, budget = start.run(gpu, 0.5)
    assert start.taken + budget == 70 * GIB
    assert probe.used_bytes() == start.weights + start.mapped + 2 * start.kernels + 528 * MIB and not probe.crowded


@given(
    moves=st.lists(st.integers(-90 * GIB, 90 * GIB) | st.integers(-GIB, GIB) | st.just(0), min_size=1),
    start=st.builds(
        Start, st.integers(GIB, 12 * GIB), st.integers(0, 4 * GIB), st.integers(0, 2 * GIB), st.integers(0, 200 * MIB),
        st.integers(0, 400 * MIB),
    ),
    trainer=st.integers(0, 10 * GIB), cached=st.integers(0, 60 * GIB), utilization=st.floats(0.2, 0.4),
)  # fmt: skip
def test_others_move_memory_at_any_point(
    moves: list[int], start: Start, trainer: int, cached: int, utilization: float
) -> None:
    """In other processes, and by a trainer and an engine closed before in this one: the share is held but for what
    libraries may have taken while others moved. Nothing is handed out that is not free."""
    left = iter(moves * 20)

    def meanwhile(gpu: Gpu) -> None:
        gpu.others += next(left, 0)

    gpu = Gpu(live=trainer, cached=cached, meanwhile=meanwhile, others=15 * GIB)
    probe, budget = start.run(gpu, utilization)
    gpu.meanwhile = lambda gpu: None
    asked = utilization * gpu.total - start.taken
    most_of_libraries = 4 * (2 * 96 + 64) * MIB
    if probe.crowded:
        assert budget <= asked + most_of_libraries
    else:
        assert abs(budget - asked) <= most_of_libraries


@given(st.lists(st.sampled_from([-60, -20, 20, 60]).map(lambda gib: gib * GIB), min_size=8))
def test_large_moves_of_others_cost_a_fiftieth_of_a_share_at_most(moves: list[int]) -> None:
    """Weights and caches come and go in pieces that no library takes: the usual is counted then."""
    left = iter(moves * 20)

    def meanwhile(gpu: Gpu) -> None:
        gpu.others = max(0, min(gpu.others + next(left, 0), 80 * GIB))

    start = Start(weights=GIB)
    probe, budget = start.run(Gpu(meanwhile=meanwhile), 0.15)
    assert probe.crowded or abs(start.taken + budget - 21 * GIB) <= 0.02 * 21 * GIB


@pytest.mark.parametrize("others", [60, 129])
def test_others_that_hold_too_much_are_named_with_both_figures(others: int, caplog: pytest.LogCaptureFixture) -> None:
    probe, budget = Start().run(Gpu(others=others * GIB), 0.9)
    assert "share is 126.00 GiB, of which it has taken 8.67;" in caplog.text
    assert f"; others hold {others}.00 of the GPU's 140.00 GiB" in caplog.text
    option = "gpu_memory_utilization=0.9"
    if others == 60:
        assert num_blocks(budget, 64 * MIB, 1, None, option, probe.crowded) > 1000
    else:
        with pytest.raises(ValueError, match=re.escape(probe.crowded)):
            num_blocks(budget, GIB, 1, None, option, probe.crowded)


def test_the_memory_of_an_engine_closed_before_is_not_this_engines() -> None:
    """It goes back to the device during the start, from torch's cache or only once it is collected."""
    start, gpu = Start(), Gpu(live=20 * GIB, garbage=20 * GIB, cached=40 * GIB)
    assert start.taken + start.run(gpu, 0.5)[1] == 70 * GIB
    assert gpu.live == start.weights
