"""KV blocks: allocate, share by content, free, evict.

A block is free (in `_free`, oldest first), or owned by `ref_count` rows. A free block keeps its hash until it is handed
out again, so that a later prompt with the same prefix revives it: freed blocks are hits until reused, least recently
used first.

Where a text leaves a cached one in the middle of a block, its row gets a copy of that block and goes on from there.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from nanovllm.engine.openings import Openings, opening_of
from nanovllm.engine.sequence import Sequence


@dataclass(slots=True)
class Block:
    block_id: int
    ref_count: int = 0
    hash: bytes | None = None
    """Chained hash: of the hash of the block before and of this block's tokens. None: not in the prefix cache."""
    content: bytes = b""
    """The block's tokens and its parent's hash, compared on a hit: a colliding hash is a miss, not another's text."""
    opening: bytes = b""
    """How the block begins, as far as it is written, where a copy of it may be found by that."""
    parent_hash: bytes = b""
    """Of such a block, what comes before it."""


_LEAST_COPIED = 16
"""Tokens for which a copy is made, at least: fewer are computed sooner. In small blocks it is half a block."""
_ROOT_OF_SALT = b"cache_salt="


def _root_of(salt: str | None) -> bytes:
    """What the hash of a row's first block continues: nothing, or a cache_salt, which is longer than a block's hash, so
    that it equals none."""
    return b"" if salt is None else _ROOT_OF_SALT.ljust(32, b".") + salt.encode("utf-8", "surrogatepass")


def _content(parent_hash: bytes, token_ids: list[int]) -> bytes:
    return parent_hash + array("i", token_ids).tobytes()


def prefix_hashes(token_ids: list[int], block_size: int, cache_salt: str | None = None) -> list[bytes]:
    """Chained hashes of the full blocks of a text: equal where a BlockManager would share the block."""
    hashes: list[bytes] = []
    parent = _root_of(cache_salt)
    for start in range(0, len(token_ids) // block_size * block_size, block_size):
        parent = xxhash.xxh3_128_digest(_content(parent, token_ids[start : start + block_size]))
        hashes.append(parent)
    return hashes


class BlockManager:
    """Owner of every KV block. Raises only on its own mistakes: callers ask `num_free_blocks` first."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks))
        self._block_of_hash: dict[bytes, int] = {}
        self._openings = Openings()
        self._block_of_opening: dict[bytes, Block] = {}
        """Of several that begin alike, the newest."""
        self.least_copied = min(_LEAST_COPIED, -(-block_size // 2))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out; those that are still hits count too."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, seq: Sequence, most_tokens: int) -> tuple[list[int], bytes]:
        """The longest cached prefix of `seq` within its first `most_tokens`: its blocks and the hash of the last."""
        hits: list[int] = []
        parent = _root_of(seq.params.cache_salt)
        if self.enable_prefix_caching:
            size = self.block_size
            for start in range(0, most_tokens // size * size, size):
                content = _content(parent, seq.token_ids[start : start + size])
                digest = xxhash.xxh3_128_digest(content)
                block_id = self._block_of_hash.get(digest)
                if block_id is None or self._blocks[block_id].content != content:
                    break
                hits.append(block_id)
                parent = digest
        return hits, parent

    def opening(self, seq: Sequence, num_blocks: int, parent_hash: bytes, num_tokens: int) -> bytes | None:
        """That of the block after the first `num_blocks` of a row, whose hash is parent_hash, within the row's first
        `num_tokens`. None where these are too few, and without a prefix cache."""
        begin, end = num_blocks * self.block_size, min((num_blocks + 1) * self.block_size, num_tokens)
        if not self.enable_prefix_caching or end - begin < self.least_copied:
            return None
        return opening_of(parent_hash, seq.token_ids[begin:end])

    def match_opening(self, opening: bytes | None, parent_hash: bytes) -> tuple[int, int]:
        """A block whose copy serves a row that goes on with `opening`, and for how many tokens; (-1, 0): none."""
        if opening is not None:
            found, common = self._openings.nearest(opening)
            if common >= self.least_copied and (block := self._block_of_opening[found]).parent_hash == parent_hash:
                return block.block_id, common
        return -1, 0

    def num_in_use(self, hits: list[int]) -> int:
        """How many of these blocks some row owns."""
        return sum(1 for block_id in hits if self._blocks[block_id].ref_count)

    def can_admit(self, seq: Sequence, hits: list[int]) -> bool:
        """Whether the whole known row fits, `hits` shared and the rest from free blocks."""
        revived = len(hits) - self.num_in_use(hits)
        return self.num_blocks_for(seq.num_tokens) - len(hits) <= len(self._free) - revived

    def admit(self, seq: Sequence, hits: list[int], parent_hash: bytes) -> None:
        """Gives `seq` its hits and fresh blocks for the rest of its known tokens."""
        assert not seq.block_table, seq
        for block_id in hits:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
            block.ref_count += 1
        seq.block_table = list(hits)
        seq.num_hashed_blocks = len(hits)
        seq.parent_hash = parent_hash
        for _ in range(self.num_blocks_for(seq.num_tokens) - len(hits)):
            seq.block_table.append(self._take())

    def append_block(self, seq: Sequence) -> int:
        """One more block for a growing row; returns its id."""
        block_id = self._take()
        seq.block_table.append(block_id)
        return block_id

    def publish(self, seq: Sequence, num_written_tokens: int) -> None:
        """Makes the row's full blocks below `num_written_tokens` hits: their data is written and their tokens known.
        What is left may be copied."""
        if not self.enable_prefix_caching or seq.is_stale:
            return
        size, num_tokens = self.block_size, min(num_written_tokens, seq.num_tokens)
        for index in range(seq.num_hashed_blocks, num_tokens // size):
            block = self._blocks[seq.block_table[index]]
            token_ids = seq.token_ids[index * size : (index + 1) * size]
            self._note_opening(block, seq.parent_hash, token_ids)
            content = _content(seq.parent_hash, token_ids)
            digest = xxhash.xxh3_128_digest(content)
            assert block.hash is None and block.ref_count > 0, block
            if digest not in self._block_of_hash:  # else: computed twice at the same time; the first copy stays the hit
                block.hash, block.content = digest, content
                self._block_of_hash[digest] = block.block_id
            seq.num_hashed_blocks, seq.parent_hash = index + 1, digest
        begin = seq.num_hashed_blocks * size
        if num_tokens - begin >= self.least_copied:
            block = self._blocks[seq.block_table[seq.num_hashed_blocks]]
            self._note_opening(block, seq.parent_hash, seq.token_ids[begin:num_tokens])

    def _note_opening(self, block: Block, parent_hash: bytes, token_ids: list[int]) -> None:
        """These tokens of the block are written."""
        opening = opening_of(parent_hash, token_ids)
        if block.opening == opening:
            return
        self._forget_opening(block)
        if (other := self._block_of_opening.get(opening)) is not None:
            other.opening = b""
        else:
            self._openings.add(opening)
        self._block_of_opening[opening] = block
        block.opening, block.parent_hash = opening, parent_hash

    def _forget_opening(self, block: Block) -> None:
        if block.opening:
            self._openings.remove(block.opening)
            del self._block_of_opening[block.opening]
            block.opening = b""

    def release(self, seq: Sequence) -> None:
        """Takes the row's blocks back. Its tail is reused first: the front of a prompt is the likelier hit."""
        for block_id in reversed(seq.block_table):
            block = self._blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                if block.hash is None:
                    self._free.move_to_end(block_id, last=False)  # nothing to find in it: reuse it before any hit
        seq.block_table = []
        seq.is_stale = False
        seq.epoch += 1

    def forget_cached(self) -> None:
        """Empties the prefix cache (the weights have changed). Rows keep their blocks."""
        self._block_of_hash.clear()
        self._openings.clear()
        self._block_of_opening.clear()
        for block in self._blocks:
            block.hash, block.content, block.opening = None, b"", b""

    def _take(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self._blocks[block_id]
        assert block.ref_count == 0, block
        if block.hash is not None:
            del self._block_of_hash[block.hash]
            block.hash, block.content = None, b""
        self._forget_opening(block)
        block.ref_count = 1
        return block_id

    def check_integrity(self, owners: Iterable[Sequence]) -> None:
        """Asserts that every block is free or owned exactly as often as counted, and every hash leads to its block."""
        counted = Counter(block_id for seq in owners for block_id in seq.block_table)
        for block in self._blocks:
            assert block.ref_count == counted[block.block_id], (block, counted[block.block_id])
            assert (block.ref_count == 0) == (block.block_id in self._free), block
            if block.hash is not None:
                assert self._block_of_hash.get(block.hash) == block.block_id, block
                assert xxhash.xxh3_128_digest(block.content) == block.hash, block
        assert len(self._free) + sum(1 for n in counted.values() if n > 0) == self.num_blocks
        assert all(self._blocks[i].hash == digest for digest, i in self._block_of_hash.items())
        assert {block.opening: block for block in self._blocks if block.opening} == self._block_of_opening
        assert sorted(self._block_of_opening) == self._openings.in_order
