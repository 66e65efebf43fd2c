"""Kinds of memory for a row's keys and values, on which the scheduler and the ranks agree. No torch."""

from collections.abc import Iterable
from typing import NamedTuple

ALIGNED = 16
"""int32 words: what begins at a multiple of them is alike to kernels, whichever line of a tensor it is."""


class PageGroup(NamedTuple):
    """Layers that need keys and values of the same tokens of a row."""

    window: int | None = None
    """Tokens that a query sees, its own among them; None: all before it."""
    num_tables: int = 1
    """Block tables that a row has for these layers. A block holds `block_size` tokens of the layers of one table."""

    def widened(self, num_tokens: int) -> "PageGroup":
        """Returns the group with its window, if it has one, larger by so many tokens."""
        return self if self.window is None else self._replace(window=self.window + num_tokens)

    def most_blocks(self, num_tokens: int, block_size: int) -> int:
        """Maximum blocks of one table that a row of up to `num_tokens` holds while it decodes."""
        most = -(-num_tokens // block_size)
        return most if self.window is None else min(most, -(-(self.window - 1) // block_size) + 1)


class StateSize(NamedTuple):
    """Memory of one rank for what its layers remember of rows."""

    num_blocks: int
    """Number of blocks; each serves any table."""
    block_size: int
    """Tokens in a block."""
    groups: tuple[PageGroup, ...] = (PageGroup(),)
    """Groups of the model's layers."""
    slot_bytes: int = 0
    """Bytes of a line: memory of fixed size that each running row has beside its blocks."""
    num_lines: int = 0
    """Number of lines, for running rows and for states that are kept for later ones."""

    @property
    def num_tables(self) -> int:
        """Block tables of a row, in all groups."""
        return sum(group.num_tables for group in self.groups)


def row_blocks(groups: Iterable[PageGroup], num_tokens: int, block_size: int) -> int:
    """Maximum blocks that a row of up to `num_tokens` holds while it decodes."""
    return sum(group.num_tables * group.most_blocks(num_tokens, block_size) for group in groups)


def capacity_tokens(groups: tuple[PageGroup, ...], num_blocks: int, block_size: int) -> int:
    """Tokens of the longest row that fits alone."""
    low, high = 0, (num_blocks + 1) * block_size
    if row_blocks(groups, high, block_size) <= num_blocks:
        return 1 << 40  # windows alone: as long as it likes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if row_blocks(groups, middle, block_size) <= num_blocks else (low, middle)
    return low


def table_width(max_model_len: int, block_size: int, num_tables: int) -> int:
    """Entries of one block table on the device."""
    width = -(-max_model_len // block_size)
    return width if num_tables == 1 else -(-width // ALIGNED) * ALIGNED
