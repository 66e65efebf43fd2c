"""Timing what multiplies by a weight matrix for a few rows: cuBLAS or one of our kernels.

Everything is timed the way it will run, inside a CUDA graph, and over the weights of many layers in turn, because one
layer's weights would stay in the L2 cache and flatter every contender. `autotune_small_gemm` times one op as a chain of
itself, which is quick: an engine does so where its `kernel_choices` names a file that is not there (runner/tuning.py).
But kernels that overlap their neighbours also get in their way, and a pair of good kernels can be a bad chain:
`autotune_chain` times choices among their like (scripts/bench_small_gemm.py), scripts/tune_steps.py inside whole steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.gemm.skinny import (
    GemmConfig,
    candidate_configs,
    linear,
    linear_residual,
    norm_linear,
    norm_linear_silu_mul,
)

OPS = ("norm_linear", "norm_linear_silu_mul", "linear", "linear_residual")
# Bytes of weights to go through before one is read again: more than twice the 60 MB cache of an H200.
ROTATION_BYTES = 160 << 20
EPS = 1e-6


@dataclass(frozen=True)
class SmallGemmChoice:
    """What to run for `op` at `rows` rows of a weight [n, k]: our kernel with `config`, or with None cuBLAS. Picklable.

    us: its time.
    """

    op: str
    rows: int
    n: int
    k: int
    config: GemmConfig | None
    us: float


def autotune_small_gemm(
    op: str, weights: Sequence[Tensor], rows: int, *,
    library: Callable[[Tensor, Tensor], object] | None = None, candidates: Sequence[GemmConfig] | None = None,
    pdl: bool = True,
) -> SmallGemmChoice:  # fmt: skip
    """Time the contenders for `op` (see OPS) at `rows` rows and return the fastest.

    weights: the matrices [N, K] that the layers really use; as many are taken as defeat the cache.
    library: called as library(x [rows, K], weight) for the cuBLAS contender, with whatever separate norm, activation or
    add kernels it needs; torch's own by default. candidates: ours to try instead of `candidate_configs`.
    """
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}, expected one of {OPS}")
    n, k = weights[0].shape
    weights = rotation(weights)
    x = torch.randn(rows, k, dtype=weights[0].dtype, device=weights[0].device)
    gain = torch.ones_like(x[0])
    run = library or library_call(op, gain, torch.zeros(rows, n, dtype=x.dtype, device=x.device))
    best = SmallGemmChoice(op, rows, n, k, None, graph_us([lambda w=w: run(x, w) for w in weights]))
    if candidates is None:
        candidates = candidate_configs(rows, n, k)
    for config in candidates:
        call = kernel_call(op, x, gain, n, config, pdl)
        us = graph_us([lambda w=w, call=call: call(w) for w in weights])
        if us < best.us:
            best = replace(best, config=config, us=us)
    return best


def autotune_chain(
    run: Callable[[Mapping[str, GemmConfig | None]], object],
    options: Mapping[str, Sequence[GemmConfig | None]],
    start: Mapping[str, GemmConfig | None],
    timer: Callable[[Sequence[Callable[[], object]]], float] | None = None,
) -> dict[str, GemmConfig | None]:
    """Improve the choices `start` of several parts, one part after the other, by timing `run(choices)` as a whole.

    run: launches a few decode layers (enough to pass ROTATION_BYTES of weights), capturable in a graph.
    options: what to try for each part; None is whatever `run` makes of it, cuBLAS say. timer: `graph_us` by default.
    Each part is gone through once.
    """
    timer = timer or graph_us
    chosen = dict(start)
    fastest = timer([lambda: run(chosen)])
    for part, candidates in options.items():
        for candidate in candidates:
            trial = chosen | {part: candidate}
            if candidate == chosen[part]:
                continue
            us = timer([lambda trial=trial: run(trial)])
            if us < fastest:
                fastest, chosen = us, trial
    return chosen


def rotation(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """The first of `weights` that together pass ROTATION_BYTES, or all of them."""
    size = weights[0].numel() * weights[0].element_size()
    return weights[: max(1, -(-ROTATION_BYTES // size))]


def kernel_call(
    op: str, x: Tensor, gain: Tensor, n: int, config: GemmConfig | None, pdl: bool
) -> Callable[[Tensor], Tensor]:
    """Our kernel for `op` as a function of the weight alone."""
    if op == "norm_linear":
        return lambda w: norm_linear(x, gain, EPS, w, config=config, pdl=pdl)
    if op == "norm_linear_silu_mul":
        return lambda w: norm_linear_silu_mul(x, gain, EPS, w, config=config, pdl=pdl)
    if op == "linear":
        return lambda w: linear(x, w, config=config, pdl=pdl)
    residual = x.new_zeros(x.shape[0], n)
    return lambda w: linear_residual(x, w, residual, config=config, pdl=pdl)


def library_call(op: str, gain: Tensor, residual: Tensor) -> Callable[[Tensor, Tensor], None]:
    """`op` by cuBLAS and torch's separate kernels."""

    def run(x: Tensor, w: Tensor) -> None:
        if op.startswith("norm"):
            x = F.rms_norm(x, (x.shape[1],), gain, EPS)
        y = F.linear(x, w)
        if op == "norm_linear_silu_mul":
            gate, up = y.chunk(2, dim=-1)
            F.silu(gate).mul_(up)
        elif op == "linear_residual":
            residual.add_(y)

    return run


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 4) -> float:
    """Device microseconds of one call: the best replay of a CUDA graph of all the calls, over their number."""
    graph = captured(calls)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(marks)]
    return min(times) * 1000 / len(calls)


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of all the calls, one after the other."""
    current = torch.cuda.current_stream()
    # The default stream cannot be captured, and a workspace belongs to the stream that it was made in.
    stream = torch.cuda.Stream() if current == torch.cuda.default_stream() else current
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        calls[0]()  # compiles and makes workspaces
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for call in calls:
                call()
    return graph
