"""A sorted list of block beginnings. The longest common prefix is with one of the two neighbours of the place where the
query would be inserted."""

from array import array
from bisect import bisect_left

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
    """A set of block starts, in order."""

    def __init__(self, least: int) -> None:
        """`least`: minimum tokens in common for two starts to count as near."""
        self._least = least
        self.in_order: list[bytes] = []

    def add(self, start: bytes) -> None:
        at = bisect_left(self.in_order, start)
        if at == len(self.in_order) or self.in_order[at] != start:
            self.in_order.insert(at, start)

    def remove(self, start: bytes) -> None:
        """Removes a start, which must be in the set."""
        at = bisect_left(self.in_order, start)
        assert self.in_order[at] == start
        del self.in_order[at]

    def clear(self) -> None:
        self.in_order.clear()

    def nearest(self, start: bytes) -> tuple[bytes, int]:
        """The start with the most leading tokens in common, and their number; (b"", 0) where that is too few."""
        at = bisect_left(self.in_order, start)
        begin = start[: KEY_SIZE + 4 * self._least]
        found, most = b"", 0
        for other in self.in_order[max(0, at - 1) : at + 1]:
            if other.startswith(begin) and (common := num_common(start, other)) > most:
                found, most = other, common
        return found, most
