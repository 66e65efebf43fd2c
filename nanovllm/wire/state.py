"""Kinds of memory for a row's keys and values, on which the scheduler and the ranks agree. No torch."""

from typing import NamedTuple


class PageGroup(NamedTuple):
    """Layers that need keys and values of the same tokens of a row."""

    window: int | None = None
    """Tokens that a query sees, its own among them; None: all before it."""
    num_tables: int = 1
    """Block tables that a row has for these layers. A block holds `block_size` tokens of the layers of one table."""
