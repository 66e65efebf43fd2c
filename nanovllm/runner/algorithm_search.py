"""Timing cuBLASLt's algorithms at start-up, for decode steps and prompts that go to the library otherwise.

Within a budget of seconds, the numbers of rows in the order of their worth; an algorithm is taken for the very number
that it was timed at, for at another its tiles may end past the last row, which is slow. What our own kernels serve
stays with them: they gain by their neighbours, which a product by itself does not show.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import Kernels
from nanovllm.kernels.gemm.cublas_lt import CublasLtError, Problem
from nanovllm.kernels.gemm.cublas_lt_rule import MANY_ROWS
from nanovllm.kernels.gemm.cublas_lt_tune import by_rough_time, candidates
from nanovllm.kernels.gemm.decode import SplitConfig
from nanovllm.kernels.gemm.lt_config import LtConfig
from nanovllm.kernels.gemm.skinny_tune import EPS, graph_us, rotation
from nanovllm.layers.few_rows import linear

logger = logging.getLogger(__name__)

PROMPT_ROWS = 4096
"""The number that stands for MANY_ROWS and more."""
TIMED_ROWS = (256, 128, PROMPT_ROWS, 192, 64, 224, 160, 96, 32, 240, 208, 176, 144, 112, 80, 48)
"""In the order of their worth, should the budget end."""
CANDIDATES, FINALISTS = 64, 3
GAIN = 0.02
"""Share of the time that an algorithm must save to be taken: less is noise."""
_MOST_ERROR = 1e-2  # relative to the library's own result

Chosen = LtConfig | SplitConfig | None
Weights = dict[str, list[Tensor]]
"""Projection -> the layers' weights [n, k], all of one shape."""


def search(
    weights: Weights, present: Callable[[str, int], object], kernels: Kernels, fused: bool, buckets: Iterable[int],
    seconds: float,
) -> dict[str, dict[int, LtConfig]]:  # fmt: skip
    """Projection -> rows of `buckets`, or MANY_ROWS -> the algorithm that beats what is there now.

    present: what multiplies now for a projection and such a number of rows; our own kernels are not challenged.
    fused: o and down may leave parts of K to add + RMSNorm.
    """
    deadline = time.perf_counter() + seconds
    buckets = [rows for rows in buckets if 16 < rows <= TIMED_ROWS[0]]
    timed = [rows for rows in TIMED_ROWS if rows in buckets or rows == PROMPT_ROWS]
    if buckets and buckets[-1] not in timed:
        timed.insert(0, buckets[-1])
    best: dict[str, dict[int, LtConfig]] = {name: {} for name in weights}
    try:
        for rows in timed:
            for name, layers in weights.items():
                many = rows == PROMPT_ROWS
                now = present(name, MANY_ROWS if many else rows)
                if time.perf_counter() < deadline and isinstance(now, Chosen) and not (many and name == "head"):
                    takes_parts = fused and name in ("o", "down") and not many
                    found = _fastest(layers, rows, now, kernels, takes_parts)
                    if found is not None:
                        best[name][MANY_ROWS if many else rows] = found
    except CublasLtError as error:
        logger.warning("products stay with the algorithms that cuBLAS takes: %s", error)
    return best


def _fastest(layers: list[Tensor], rows: int, now: Chosen, kernels: Kernels, takes_parts: bool) -> LtConfig | None:
    """The algorithm that beats `now` by GAIN, if there is one."""
    weights = rotation(layers)
    n, k = weights[0].shape
    x = torch.randn(rows, k, dtype=weights[0].dtype, device=weights[0].device)
    residual, norm_weight = x.new_zeros(rows, n), x.new_ones(n)

    def product(weight: Tensor, config: Chosen) -> Tensor:
        return F.linear(x, weight) if config is None else linear(x, weight, config)

    def run(config: Chosen) -> Callable[[Tensor], object]:
        if not takes_parts:
            return lambda weight: product(weight, config)
        return lambda weight: kernels.add_rms_norm(product(weight, config), residual, norm_weight, EPS)

    ways = [Problem.of(x, weights[0], parts) for parts in (1, 2)[: 1 + takes_parts]]
    tried = [config for problem in ways for config in candidates(problem, CANDIDATES)]
    finalists = by_rough_time(tried, run, weights)[:FINALISTS]
    turns = list(weights) * max(1, 6 // len(weights))
    fastest, best = graph_us([partial(run(now), w) for w in turns]) * (1 - GAIN), None
    want = F.linear(x, weights[0]).float()
    for config in finalists:
        if not _close(product(weights[0], config), want):
            continue
        us = graph_us([partial(run(config), w) for w in turns])
        if us < fastest:
            fastest, best = us, config
    return best


def _close(got: Tensor, want: Tensor) -> bool:
    got = got.sum(0) if got.dim() == 3 else got.float()
    return bool((got - want).norm() <= _MOST_ERROR * want.norm())
