"""Sums over the ranks that run in a stream of their own, beside the other work of a large step.

A step of many tokens is cut into two halves that know nothing of each other but the keys in the cache: while one is
summed, the other is multiplied and attends (run_micro_batches). With peer memory the rows of a sum are moved by copy
engines (copy_engine.py). Without it NCCL would sum them, on multiprocessors that the GEMMs need: nothing
is gained (docs/performance.md), so on GPUs steps then stay whole.

On a CPU the same calls are made in the same order, without streams, and the library sums.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from nanovllm.kernels.pointwise.norm import Norm

if TYPE_CHECKING:
    from nanovllm.parallel.group import TensorParallelGroup
    from nanovllm.parallel.peer.copy_engine import CopyEngineSums

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
    stream for each piece (`UnderWay.wait`) before the step ends. So sums follow one another in one order, the same on
    all ranks. In a capture these events are edges of the graph, and the side stream is part of it from the first wait
    to the last.

    Memory: all of it is allocated by the main stream. So the allocator hands a freed block to the main stream alone,
    and takes for granted that this stream's order keeps old and new use apart. It does: what a piece of work reads and
    writes is held by its UnderWay, so it is freed after the main stream has waited, and the block's next use comes
    after that wait. The other way round, work that writes a block which the main stream had freed waits for everything
    that was launched there before. All this is about the order of launches, so it holds in the pool of a graph as well
    (where record_stream would keep every block until the capture ends).
    """

    min_rows = 2048
    """Tokens of a step that is cut: with fewer, halves would leave the GEMMs' last rounds of tiles half empty."""
    cut_multiple = 128
    """Tokens; the height of a GEMM's tile."""

    def __init__(self, device: torch.device) -> None:
        self.sums: CopyEngineSums | None = None
        """None: the library sums, and nothing is cut on GPUs."""
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # The kernel of an all-reduce goes first where it and a GEMM wait for a multiprocessor.
            self.stream = torch.cuda.Stream(device, priority=-1)

    def cut(self, num_rows: int, num_decode_rows: int) -> int | None:
        """Number of the step's tokens in its first half, which has all decodes; None: the step stays whole. All ranks
        get the same number."""
        first = self.first_half(num_rows)
        if num_rows < self.min_rows or not num_decode_rows <= first < num_rows:
            return None
        if self.sums is None:
            return first if self.stream is None else None
        return first if first <= self.sums.max_rows else None

    def first_half(self, num_rows: int) -> int:
        """The larger half of so many tokens."""
        return -(-num_rows // (2 * self.cut_multiple)) * self.cut_multiple

    def fork(self) -> None:
        """Makes the side stream wait for all work that the current stream has been given so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def side(self) -> AbstractContextManager[object]:
        """The side stream as the current one. Nothing may be allocated within that outlives it."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def under_way(self, finish: Callable[[], Result], *used: torch.Tensor | None) -> UnderWay[Result]:
        """Handle on the side stream's work since the last `fork`. `finish` runs in the main stream; the tensors `used`
        live until then."""
        return UnderWay(finish, None if self.stream is None else self.stream.record_event(), used)


Normed = tuple[torch.Tensor, torch.Tensor]
"""(normalised [T, hidden], residual [T, hidden])"""


class Joint(Protocol):
    """Sum over the ranks, addition to the residual stream, norm (layers/norm.py)."""

    group: "TensorParallelGroup"
    is_plain: bool

    @property
    def row_norm(self) -> Norm: ...

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> Normed: ...


Block = tuple[Joint, Callable[..., Any]]
"""A joint, and what follows it: (normalised rows, step) -> partial sums [T, hidden]."""


def start(joint: Joint, partial: torch.Tensor, residual: torch.Tensor | None, half: int) -> UnderWay[Normed]:
    """The joint for half 0 or 1 of a step, beside what this stream does next. `partial` and `residual` may not be
    touched until it is waited for. With peer memory the norm is done with the sum, else when it is waited for."""
    overlap = joint.group.overlap
    assert overlap is not None
    sums = overlap.sums if joint.is_plain else None
    if sums is None:
        overlap.fork()
        with overlap.side():
            joint.group.all_reduce(partial)
        return overlap.under_way(lambda: joint.add_norm(partial, residual), partial, residual)
    kept = sums.empty_residual(partial) if residual is None else residual
    overlap.fork()
    with overlap.side():
        sums.start(half, partial, residual, kept, joint.row_norm)
    return overlap.under_way(lambda: (sums.finish(half, partial.shape[0]), kept), partial, kept)


def run_micro_batches(
    partials: tuple[torch.Tensor, torch.Tensor], steps: tuple[Any, Any], blocks: Sequence[Block], last: Joint
) -> torch.Tensor:
    """Embedded halves of a step's tokens, partial sums [T, hidden] each, through all blocks, with the step of each:
    [both, hidden], normalised by `last`. The sums of each half run beside what the other computes; in every block the
    second half comes after the first, whose keys it sees."""
    joints = [*(joint for joint, _ in blocks), last]
    halves = start(joints[0], partials[0], None, 0), start(joints[0], partials[1], None, 1)
    for (_, block), joint in zip(blocks, joints[1:], strict=True):
        x, residual = halves[0].wait()
        first = start(joint, block(x, steps[0]), residual, 0)
        x, residual = halves[1].wait()
        halves = first, start(joint, block(x, steps[1]), residual, 1)
    return torch.cat([half.wait()[0] for half in halves])
