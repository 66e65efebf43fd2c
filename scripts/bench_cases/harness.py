"""One way to check and time contenders for the same work, shared by all cases."""

import argparse
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.cli.bench.roofline import device_figures
from nanovllm.kernels.base.compile_keys import resolve_keys
from nanovllm.model_config import ModelConfig
from nanovllm.models.published import PUBLISHED_SHAPES
from nanovllm.models.registry import parse_config
from nanovllm.startup.compile_pool import KernelCompiler, process_count
from nanovllm.startup.dry_run import launching_nothing

if TYPE_CHECKING:
    from bench_cases.ranks import Rank

Line = dict[str, Any]
MODULES = {"fp8_gemm": "gemm", "int4_gemm": "gemm"}
ROTATION_BYTES = 160 << 20
"""Bytes of inputs before one is read again: more than twice the 60 MB L2 cache of an H200."""
EPS = 1e-6
Case = Callable[["Setup"], Iterator[Line]]


@dataclass
class Setup:
    """Device and ranks of a case. `rank`: None where one process does all."""

    options: argparse.Namespace
    device: torch.device
    rank: "Rank | None" = None
    compiling: bool = False
    """Contenders are called once, and launch nothing: see compile_in_parallel."""

    @property
    def dry(self) -> bool:
        return bool(self.options.dry)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16  # the interpreter computes in float32

    @property
    def model(self) -> ModelConfig:
        return parse_config(PUBLISHED_SHAPES[self.options.model])

    def rows(self, default: Sequence[int], dry: Sequence[int] = (3,)) -> Sequence[int]:
        given: Sequence[int] | None = self.options.rows
        return given or (dry if self.dry else default)

    def randn(self, *shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
        """[shape] in the case's dtype, the same for the same seed on every rank."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return (torch.randn(*shape, device=self.device, generator=generator) * scale).to(self.dtype)

    def sets(self, nbytes: int, most: int = 256) -> int:
        """Number of inputs of `nbytes` that defeats the cache."""
        return 1 if self.dry or self.compiling else max(2, min(most, -(-ROTATION_BYTES // nbytes)))

    def limit_us(self, nbytes: float, flops: float = 0.0) -> float:
        """Least time that the device allows; nan where its figures are not known."""
        figures = None if self.dry else device_figures(torch.cuda.get_device_name(self.device))
        if figures is None:
            return math.nan
        return 1e6 * max(nbytes / figures.read_bytes_per_second, flops / figures.flops_per_second)


@dataclass
class Point:
    """Contenders that compute the same from the same inputs. Each is called with the number of a set of inputs."""

    labels: Line
    contenders: Mapping[str, Callable[[int], torch.Tensor]]
    """The first is what the others are checked against and shown beside."""
    num_sets: int = 1
    limit_us: float = math.nan
    chosen: str = ""
    """Name of the contender that the engine takes."""
    tolerance: float = 1e-2
    """Largest relative error, as a Frobenius norm."""
    before: Callable[[], object] | None = None
    """Runs ahead of every call; its own time is taken off."""
    reset: Callable[[], object] = field(default=lambda: None)
    """Restores, for the check, what a call overwrites."""


def run_case(case: str, options: argparse.Namespace) -> list[Line]:
    if case == "all_reduce" and not options.dry:  # runs in a process for each rank
        from bench_cases.ranks import launch

        return launch(case, options)
    return collect(case, Setup(options, torch.device("cpu" if options.dry else "cuda")))


@torch.inference_mode()
def collect(case: str, setup: Setup) -> list[Line]:
    """The lines of a case, printed as they come."""
    function: Case = getattr(import_module(f"bench_cases.{MODULES.get(case, case)}"), case)
    if setup.rank is None and not setup.dry:  # minutes, one after the other
        compile_in_parallel(function, setup)
    lines = []
    for line in function(setup):
        lines.append(line)
        if setup.rank is None or setup.rank.rank == 0:
            print(case, " ".join(f"{name}={shown(value)}" for name, value in line.items()), flush=True)
    return lines


def compile_in_parallel(function: Case, setup: Setup) -> None:
    """Goes through a case without launching a kernel, and has every kernel that it needs compiled."""
    processes = process_count(len(os.sched_getaffinity(0)))
    if processes == 0:
        return
    resolve_keys()
    compiler = KernelCompiler(processes)
    try:
        with launching_nothing(compiler.submit):
            for _ in function(replace(setup, compiling=True)):
                pass
        if not compiler.wait(240):
            print("compiled one by one:", "; ".join(compiler.failures), flush=True)
    finally:
        compiler.close()


def compare(setup: Setup, point: Point) -> Line:
    """One line: labels, the limit, the first contender, the engine's, and the fastest ones by name."""
    if setup.compiling:
        for call in point.contenders.values():
            call(0)
        return {}
    errors = check(setup, point)
    line: Line = {**point.labels, "right": not errors}
    if errors:
        print(point.labels, "WRONG:", "; ".join(errors), flush=True)
    if setup.options.check_only:
        return line
    times = dict.fromkeys(point.contenders, math.inf)
    for _ in range(2):  # a chip that grows hot grows slow
        for name, call in point.contenders.items():
            times[name] = min(times[name], time_us(setup, point, call))
    first, best = next(iter(times)), sorted(times, key=lambda name: times[name])
    line |= {"limit": point.limit_us, first: times[first]}
    if point.chosen:
        line["engine"] = times[point.chosen]
    ranking = (f"{times[name]:.1f} {name}{'*' * (name == point.chosen)}" for name in best[: setup.options.most])
    return line | {"fastest": "  ".join(ranking)}


def check(setup: Setup, point: Point) -> list[str]:
    """Lists faults of the contenders' results."""
    want, errors = None, []
    for name, call in point.contenders.items():
        point.reset()
        got = call(0)
        want = got.double() if want is None else want
        error = ((got.double() - want).norm() / want.norm()).item()
        if not error < point.tolerance:
            errors.append(f"{name} is off by {error:.1e}")
        if setup.rank is not None and not setup.rank.same_bits(got):
            errors.append(f"{name}: ranks differ in bits")
    return errors


def time_us(setup: Setup, point: Point, call: Callable[[int], object]) -> float:
    """Microseconds of a call, without what runs before it."""
    repeats = max(1, 12 // point.num_sets)
    before = point.before

    def run(index: int) -> None:
        if before:
            before()
        call(index)

    us = graph_us(setup, [lambda i=i: run(i) for i in range(point.num_sets)] * repeats)
    return us - (graph_us(setup, [before] * 12) if before else 0.0)


def graph_us(setup: Setup, calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """Device microseconds of one call: the median replay of a CUDA graph of all; with ranks, the slowest one's."""
    graph = capture(calls)
    if setup.rank is not None:
        return setup.rank.slowest(statistics.median(setup.rank.replay_us(graph) for _ in range(replays)) / len(calls))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) * 1e3 / len(calls)


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of all calls, one after the other. Every call has run once before."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in dict.fromkeys(calls):
            call()  # compiles, and makes workspaces, which belong to the stream
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for call in calls:
                call()
    torch.cuda.synchronize()
    return graph


def shown(value: object) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.1f}"
    return str(value)


def table(lines: Sequence[Line]) -> str:
    names = list(dict.fromkeys(name for line in lines for name in line))
    rows = [names, *([shown(line.get(name, "-")) for name in names] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(" | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
