"""A large step in two halves: while one is summed over the ranks, the other is multiplied and attends.

The halves know nothing of each other but the keys in the cache. Copy engines move the rows of a sum, in a stream of
their own (parallel/peer/copy_engine.py). NCCL would sum on multiprocessors that the GEMMs need, and nothing would be
gained (docs/performance.md): on GPUs without peer memory steps stay whole. On a CPU the same calls are made in the same
order, and the library sums at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from nanovllm.parallel.peer.copy_engine import CopyEngineSums

MIN_ROWS = 2048
"""Tokens of a step that is cut: with fewer, halves would leave the GEMMs' last waves of tiles half empty."""
CUT_MULTIPLE = 128
"""Tokens; the height of a GEMM's tile."""


def first_half(num_rows: int) -> int:
    """The larger half of so many tokens."""
    return -(-num_rows // (2 * CUT_MULTIPLE)) * CUT_MULTIPLE


@dataclass(frozen=True)
class Overlap:
    """The way of one rank's halves."""

    sums: "CopyEngineSums | None"
    """Sums by copy engines; None on a CPU, where the library sums."""

    def cut(self, num_rows: int, num_decode_rows: int) -> int | None:
        """Number of the step's tokens in its first half, which has all decodes; None: the step stays whole. All ranks
        get the same number."""
        first = first_half(num_rows)
        if num_rows < MIN_ROWS or not num_decode_rows <= first < num_rows:
            return None
        return first if self.sums is None or first <= self.sums.max_rows else None


Normed = tuple[torch.Tensor, torch.Tensor]
"""(normalised [T, hidden], residual [T, hidden])"""


class ReduceNorm(Protocol):
    """Sum over the ranks, addition to the residual stream, norm (layers/norm.py)."""

    def start(self, partial: torch.Tensor, residual: torch.Tensor | None, half: int) -> Callable[[], Normed]:
        """Starts it for half 0 or 1 of a step, partial sums ([T, hidden], or parts that are added up here) and residual
        [T, hidden] (with `overlap.sums` this rank's rows of it), beside what this stream does next. They may not be
        touched until it is waited for, by a call of what this returns: normalised rows [T, hidden], and the residual.
        """
        ...


Block = tuple[ReduceNorm, Callable[..., Any]]
"""A ReduceNorm, and what follows it: (normalised rows, call) -> partial sums [T, hidden], or [parts, T, hidden]."""


def run_micro_batches(
    partials: tuple[torch.Tensor, torch.Tensor], calls: tuple[Any, Any], blocks: Sequence[Block], last: ReduceNorm
) -> torch.Tensor:
    """Embedded halves of a step's tokens, partial sums [T, hidden] each, through all blocks, with the call of each:
    [both, hidden], normalised by `last`. The sums of each half run beside what the other computes; in every block the
    second half comes after the first, whose keys it sees."""
    norms = [*(norm for norm, _ in blocks), last]
    halves = norms[0].start(partials[0], None, 0), norms[0].start(partials[1], None, 1)
    for (_, block), norm in zip(blocks, norms[1:], strict=True):
        x, residual = halves[0]()
        first = norm.start(block(x, calls[0]), residual, 0)
        x, residual = halves[1]()
        halves = first, norm.start(block(x, calls[1]), residual, 1)
    return torch.cat([wait()[0] for wait in halves])
