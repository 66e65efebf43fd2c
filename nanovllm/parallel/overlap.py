"""Sums over the ranks that run in a stream of their own, beside the matrix products of a large step.

A step of many tokens is cut in two halves, and while one half is summed the other is multiplied (models/qwen3.py). What
is won is little (docs/performance.md): both want the multiprocessors, and a sum that takes few of them takes long.

On a CPU the same calls are made in the same order, without streams.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True)
class UnderWay(Generic[Result]):
    """Work that the side stream may not have done yet. See Overlap for why it holds what that work reads and writes."""

    finish: Callable[[], Result]
    done: torch.cuda.Event | None
    used: tuple[torch.Tensor | None, ...]

    def wait(self) -> Result:
        """Lets the current stream wait for it (the host does not), and returns its result."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        return self.finish()


class Overlap:
    """The side stream of one rank.

    Order: the side stream waits for what the main stream has launched before each piece of work (`side`), and the main
    stream for each piece (`UnderWay.wait`) before the step ends. So sums follow one another in one order, whichever
    stream they are in, the same on all ranks: what kernels/all_reduce.py asks for. In a capture these events are edges
    of the graph, and the side stream is part of it from the first wait to the last.

    Memory: all of it is allocated by the main stream. So the allocator hands a freed block to the main stream alone,
    and takes for granted that this stream's order keeps old and new use apart. It does: what a piece of work reads and
    writes is held by its UnderWay, so it is freed after the main stream has waited, and whoever gets the block comes
    after that wait. The other way round, work that writes a block which the main stream had freed waits for everything
    that was launched there before. All this is about the order of launches, so it holds in the pool of a graph as well
    (where record_stream would keep every block until the capture ends). NCCL works in a third stream, which `side`
    orders in the same way.
    """

    min_rows = 2048
    """Tokens of a step that is cut: with fewer, halves would leave the products' last rounds of tiles half empty."""
    cut_multiple = 128
    """Tokens; the height of a product's tile."""
    programs = 48
    """Of one sum, the same on all ranks. A program holds a multiprocessor where rows and ranks are many."""

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # Sums go first where both wait for a multiprocessor: the other half's products wait for them.
            self.stream = torch.cuda.Stream(device, priority=-1)

    def cut(self, num_rows: int) -> int | None:
        """How many of a step's tokens are its first half; None: it stays whole. The same on all ranks."""
        if num_rows < self.min_rows:
            return None
        first = -(-num_rows // (2 * self.cut_multiple)) * self.cut_multiple
        return first if first < num_rows else None

    def fork(self) -> None:
        """What the side stream gets from here on comes after all that the current stream has been given."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def side(self) -> AbstractContextManager[object]:
        """The side stream as the current one. Nothing may be allocated within that outlives it."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def under_way(self, finish: Callable[[], Result], *used: torch.Tensor | None) -> UnderWay[Result]:
        """What the side stream has been given since the last `fork`. `finish` runs in the main stream; `used` lives
        until then."""
        return UnderWay(finish, None if self.stream is None else self.stream.record_event(), used)
