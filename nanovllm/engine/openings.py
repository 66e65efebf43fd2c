"""The first tokens of blocks, as byte strings in sorted order: there the one that has most tokens in common with a text
is next to where the text would be."""

from array import array
from bisect import bisect_left

import numpy as np
import xxhash

_BEFORE = 16
"""Bytes that stand for all that comes before a block."""


def opening_of(parent_hash: bytes, token_ids: list[int]) -> bytes:
    """A block's first tokens, and what comes before it: 16 bytes, then int32 each."""
    before = parent_hash if len(parent_hash) == _BEFORE else xxhash.xxh3_128_digest(parent_hash)
    return before + array("i", token_ids).tobytes()


def num_common(opening: bytes, other: bytes) -> int:
    """First tokens that are equal, where what comes before them is."""
    length = min(len(opening), len(other))
    if opening[:length] == other[:length]:
        return (length - _BEFORE) // 4
    ours, theirs = (np.frombuffer(one[:length], np.int32) for one in (opening, other))
    return max(0, int((ours != theirs).argmax()) - _BEFORE // 4)


class Openings:
    """A set of them, in order."""

    def __init__(self) -> None:
        self.in_order: list[bytes] = []

    def add(self, opening: bytes) -> None:
        at = bisect_left(self.in_order, opening)
        if at == len(self.in_order) or self.in_order[at] != opening:
            self.in_order.insert(at, opening)

    def remove(self, opening: bytes) -> None:
        """One that is there."""
        at = bisect_left(self.in_order, opening)
        assert self.in_order[at] == opening
        del self.in_order[at]

    def clear(self) -> None:
        self.in_order.clear()

    def nearest(self, opening: bytes) -> tuple[bytes, int]:
        """The one with most first tokens in common, and how many; (b"", 0) where none has any."""
        at = bisect_left(self.in_order, opening)
        found, most = b"", 0
        for other in self.in_order[max(0, at - 1) : at + 1]:
            if (common := num_common(opening, other)) > most:
                found, most = other, common
        return found, most
