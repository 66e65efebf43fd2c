"""Lines, in which the rows of a step have memory of fixed size: each row reads one and writes one, mostly the same. A
row that begins reads zeros, or a line that was kept; one whose line is kept goes on in another. So nothing is copied or
cleared (engine/lines.py)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch


class Lines(NamedTuple):
    """Lines by row, int32 [R] each. Rows of padding write a line that nobody reads."""

    read: torch.Tensor
    """Line that a row reads; -1: zeros."""
    write: torch.Tensor
    """Line that it writes."""
    keep: torch.Tensor
    """Line that it writes besides, as its memory is after `keep_at` of its tokens."""
    keep_at: torch.Tensor
    """Number of tokens, 1 to those of the row in this step; 0: nothing is kept. Of decode rows it is 0."""

    def halves(self, first: torch.Tensor, second: torch.Tensor) -> "tuple[Lines, Lines]":
        """Lines for a step cut in two. first, second: int [R1], [R2] tokens of the rows of each half, which are the
        first R1 and the last R2 rows. A row in both goes on where the first half left it."""
        before = torch.zeros_like(self.keep_at)
        before[: first.shape[0]] = first
        early = self.keep_at <= before
        read = torch.where(before > 0, self.write, self.read)
        parts = (
            Lines(self.read, self.write, self.keep, torch.where(early, self.keep_at, 0)),
            Lines(read, self.write, self.keep, torch.where(early, 0, self.keep_at - before)),
        )
        cuts = (slice(first.shape[0]), slice(self.read.shape[0] - second.shape[0], None))
        first_half, second_half = (
            Lines(*(column[cut] for column in part)) for part, cut in zip(parts, cuts, strict=True)
        )
        return first_half, second_half


class StepRows(NamedTuple):
    """The rows of a step, as AttentionMetadata has them."""

    cu_seqlens: torch.Tensor
    """int32 [R + 1]: where each row's tokens start."""
    num_decode_rows: int
    """The first so many rows have one token each, row r token r."""
    num_tokens: int
    """T, padding included."""
    lines: Lines
    has_places: bool = False
    """Whether decode rows may go on where the row before has left off: then they read what it writes."""

    @property
    def num_rows(self) -> int:
        return self.lines.read.shape[0]


class RowPlace(NamedTuple):
    """A row on the host, for twins."""

    tokens: slice
    read: int
    write: int
    keep: int
    keep_at: int

    def load(self, memory: torch.Tensor) -> torch.Tensor:
        """The row's part of memory [lines, ...], a copy."""
        return memory[self.read].clone() if self.read >= 0 else torch.zeros_like(memory[0])


def row_places(rows: StepRows) -> Iterator[RowPlace]:
    """Rows that have tokens."""
    ends = rows.cu_seqlens.tolist()
    for row, lines in enumerate(zip(*(each.tolist() for each in rows.lines), strict=True)):
        if ends[row + 1] > ends[row]:
            yield RowPlace(slice(ends[row], ends[row + 1]), *lines)
