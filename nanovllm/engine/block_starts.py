"""Block beginnings in sorted lists. The longest common prefix is with one of the two neighbours of the place where the
query would be inserted."""

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain

from nanovllm.engine.prefix_keys import KEY_SIZE


def block_start(before: bytes, token_ids: list[int]) -> bytes:
    """Key of the text before a block (prefix_keys.before_block), then the block's first tokens, 4 bytes each."""
    return before + array("I", token_ids).tobytes()


def num_common(start: bytes, other: bytes) -> int:
    """Number of leading tokens that two starts have in common; 0 where the texts before the blocks differ."""
    length = min(len(start), len(other))
    different = int.from_bytes(start[:length]) ^ int.from_bytes(other[:length])
    num_equal = length - (different.bit_length() + 7) // 8
    return max(0, (num_equal - KEY_SIZE) // 4)


class BlockStarts:
    """A set of block starts. Those that begin alike are in order: few, unless many texts part in one block."""

    def __init__(self, least: int) -> None:
        """`least`: minimum tokens in common for two starts to count as near, which every start has."""
        self._begin_size = KEY_SIZE + 4 * least
        self._in_order: dict[bytes, list[bytes]] = {}
        """The starts with each beginning of that size."""

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._in_order.values())

    def add(self, start: bytes) -> None:
        alike = self._in_order.setdefault(start[: self._begin_size], [])
        at = bisect_left(alike, start)
        if at == len(alike) or alike[at] != start:
            alike.insert(at, start)

    def remove(self, start: bytes) -> None:
        """Removes a start, which must be in the set."""
        begin = start[: self._begin_size]
        alike = self._in_order[begin]
        at = bisect_left(alike, start)
        assert alike[at] == start
        del alike[at]
        if not alike:
            del self._in_order[begin]

    def clear(self) -> None:
        self._in_order.clear()

    def nearest(self, start: bytes) -> tuple[bytes, int]:
        """The start with the most leading tokens in common, and their number; (b"", 0) where that is too few."""
        alike = self._in_order.get(start[: self._begin_size], [])
        at = bisect_left(alike, start)
        found, most = b"", 0
        for other in alike[max(0, at - 1) : at + 1]:
            if (common := num_common(start, other)) > most:
                found, most = other, common
        return found, most
