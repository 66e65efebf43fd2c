"""Which of cuBLASLt's algorithms to try for a product, and how long many contenders take, at little cost.

What the library proposes is not all that it can do: the proposals are few where split K is concerned, and its order of
tiles and clusters is off for few rows. So the best proposals are varied, one attribute at a time.
"""

import time
from collections.abc import Callable, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from nanovllm.kernels.gemm.cublas_lt import Problem, heuristic, supports, tiles, variants
from nanovllm.kernels.gemm.lt_config import LtConfig, tile_sizes

SPLITS = (2, 3, 4, 5, 6, 8)
CLUSTERS = range(2, 17)  # the powers of two among cublasLtClusterShape_t
_VARIED = 6  # of the library's proposals
_FAILED = float("inf")
_CYCLES_PER_US, _MOST_HOST_US = 2000, 60_000


def candidates(problem: Problem, most: int) -> list[LtConfig]:
    """At most `most` algorithms that the library says can run: its proposals, up to two thirds, then what is near the
    best of them."""
    proposed = [config for config in heuristic(problem, max(1, most // 3)) if supports(problem, config)]
    varied = proposed[:_VARIED]
    fitting = _fitting(problem)
    more = chain(
        *(variants(problem, config, "split_k", SPLITS) for config in varied if config.split_k == 1),
        *(variants(problem, config, "cluster", CLUSTERS) for config in varied[:3]),
        *(variants(problem, config, "tile", sorted(fitting & set(tiles(problem, config)))) for config in varied[:2]),
    )
    return list(islice(dict.fromkeys(chain(proposed, more)), most))


def _fitting(problem: Problem) -> set[int]:
    """Tiles that end not far behind the last row, neither so small that x is read too often nor too large to run."""

    def fits(n: int, m: int) -> bool:
        return 32 <= m <= 256 and 64 <= n <= 256 and -(-problem.rows // m) * m <= problem.rows * 9 // 8 + 7

    return {number for number, size in tile_sizes().items() if fits(*size)}


def rough_us(
    runs: Sequence[Callable[[Tensor], object]], weights: Sequence[Tensor], calls: int = 4, passes: int = 2
) -> list[float]:
    """Device microseconds of each run(weight), infinite where it raises.

    Launched one after the other behind a pause long enough for the host to get ahead, so without a graph for each;
    `weights` go around, so that none is in the cache. Good enough to tell which few deserve `graph_us`.
    """
    best = [_FAILED] * len(runs)
    works = [index for index, run in enumerate(runs) if _runs(run, weights[0])]
    turn, host_us = 0, 20.0 * len(works) * calls
    for _ in range(passes):
        works.reverse()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
        torch.cuda._sleep(int(host_us * _CYCLES_PER_US))
        begin = time.perf_counter()
        marks[0].record()
        for index, mark in zip(works, marks[1:], strict=True):
            for _ in range(calls):
                runs[index](weights[turn % len(weights)])
                turn += 1
            mark.record()
        host_us = min((time.perf_counter() - begin) * 1e6, _MOST_HOST_US)
        torch.cuda.synchronize()
        for place, index in enumerate(works):
            best[index] = min(best[index], marks[place].elapsed_time(marks[place + 1]) * 1000 / calls)
    return best


def by_rough_time(
    configs: Sequence[LtConfig], run: Callable[[LtConfig], Callable[[Tensor], object]], weights: Sequence[Tensor]
) -> list[LtConfig]:
    """Those that run, by the `rough_us` of run(config), the fastest first."""
    times = rough_us([run(config) for config in configs], weights, 2)
    order = sorted(zip(times, range(len(configs)), strict=True))
    return [configs[index] for us, index in order if us < _FAILED]


def _runs(run: Callable[[Tensor], object], weight: Tensor) -> bool:
    """Tries it once, which also loads or compiles its kernel."""
    try:
        run(weight)
    except Exception:  # the library's, torch's and Triton's have nothing in common
        return False
    return True
