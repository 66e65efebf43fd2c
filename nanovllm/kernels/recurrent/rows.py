"""Where the rows of a step have memory of fixed size, in lines: what recurrent kernels know of a step.

A row reads one line and writes one, mostly the same. A row that begins reads zeros, or the line of a state that was
kept; a row whose state is kept goes on in another line. So nothing is copied or cleared.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from nanovllm.kernels.base.triton_import import tl, triton


class Lines(NamedTuple):
    """Lines by slot; the last entry of each is for rows of padding, whose slot is -1."""

    read: torch.Tensor
    """int32 [max_num_seqs + 1]: line where a row's memory is; -1: it is zeros."""
    write: torch.Tensor
    """int32 [max_num_seqs + 1]: line where it goes."""
    keep: torch.Tensor
    """int32 [max_num_seqs + 1]: line that gets what the row's memory is after `keep_at` of its tokens, besides."""
    keep_at: torch.Tensor
    """int32 [max_num_seqs + 1]: between 1 and the row's tokens of this step; 0: nothing is kept."""


class StepRows(NamedTuple):
    """The rows of a step, as AttentionMetadata has them."""

    slots: torch.Tensor
    """int32 [R]; -1: padding."""
    cu_seqlens: torch.Tensor
    """int32 [R + 1]: where each row's tokens start."""
    num_decode_rows: int
    """The first so many rows have one token each, row r token r."""
    num_tokens: int
    """T, padding included."""
    lines: Lines


class RowPlace(NamedTuple):
    """A row on the host, for twins."""

    tokens: slice
    read: int
    write: int
    keep: int
    keep_at: int

    def load(self, memory: torch.Tensor) -> torch.Tensor:
        """The row's memory [...] of all lines [L, ...], a copy."""
        return memory[self.read].clone() if self.read >= 0 else torch.zeros_like(memory[0])


def row_places(rows: StepRows) -> Iterator[RowPlace]:
    """Rows that have tokens."""
    ends = rows.cu_seqlens.tolist()
    for row, slot in enumerate(rows.slots.tolist()):
        if ends[row + 1] > ends[row]:
            yield RowPlace(slice(ends[row], ends[row + 1]), *(int(lines[slot]) for lines in rows.lines))


@triton.jit
def line_of(SLOTS, LINES, row, PADDING: tl.constexpr):
    """The entry of LINES int32 [PADDING + 1] for row `row`."""
    slot = tl.load(SLOTS + row)
    return tl.load(LINES + tl.where(slot < 0, PADDING, slot))
