"""KV blocks: what is a hit, what is reused first, and that none is lost or owned twice."""

from collections import OrderedDict

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulation import make_sequence

from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import BlockManager, prefix_hashes
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.sharing import most_cached_tokens

BLOCK_SIZE = 4


def admit(manager: BlockManager, tokens: list[int]) -> Sequence:
    """A row of `tokens` that owns its blocks and whose KV is all there."""
    seq = make_sequence(0, tokens)
    hits, parent_hash = manager.match_prefix(seq, most_cached_tokens(seq))
    assert manager.can_admit(seq, hits)
    manager.admit(seq, hits, parent_hash)
    manager.publish(seq, seq.num_tokens)
    return seq


def num_hits(manager: BlockManager, tokens: list[int]) -> int:
    return len(manager.match_prefix(make_sequence(0, tokens), len(tokens) - 1)[0])


def block_of(*tokens: int) -> list[int]:
    """Tokens for whole blocks, each filled with one value."""
    return [token for token in tokens for _ in range(BLOCK_SIZE)]


def test_a_colliding_hash_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager.xxhash, "xxh3_128_digest", lambda content: b"always the same")
    manager = BlockManager(10, BLOCK_SIZE)
    manager.release(admit(manager, block_of(1, 2)))
    assert num_hits(manager, [*block_of(2), 0]) == 0
    assert num_hits(manager, [*block_of(1), 0]) == 1
    other = admit(manager, block_of(3, 4))  # finds its place taken: it stays private
    manager.check_integrity([other])
    assert num_hits(manager, [*block_of(3), 0]) == 0


@pytest.mark.parametrize("damage", ["lost", "counted twice", "dangling hash"])
def test_the_integrity_check_notices(damage: str) -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    seq = admit(manager, block_of(1, 2))
    if damage == "lost":
        owners = []
    elif damage == "counted twice":
        owners = [seq, seq]
    else:
        owners = [seq]
        manager._blocks[seq.block_table[0]].hash = b"?"
    with pytest.raises(AssertionError):
        manager.check_integrity(owners)


class BlockManagerMachine(RuleBasedStateMachine):
    """Against a model that knows texts only: which prefixes are hits, and which of them goes next."""

    @initialize(num_blocks=st.integers(1, 6), is_caching=st.sampled_from((True, True, False)))
    def start(self, num_blocks: int, is_caching: bool) -> None:
        self.manager, self.is_caching = BlockManager(num_blocks, BLOCK_SIZE, is_caching), is_caching
        self.rows: list[Sequence] = []
        self.texts: dict[int, tuple[int, ...]] = {}  # block -> the text that ends with it, where it is a hit
        self.free_hits: OrderedDict[tuple[int, ...], None] = OrderedDict()  # hits that nobody owns, next to go first
        self.seen: set[tuple[int, ...]] = set()

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)]

    def took(self, blocks: list[int], num_empty: int) -> None:
        """Fresh blocks were handed out: the empty ones first, then the hit that was free for longest."""
        for index, block in enumerate(blocks):
            if index < num_empty:
                assert block not in self.texts
            else:
                assert self.texts.pop(block) == self.free_hits.popitem(last=False)[0]

    @rule(
        values=st.lists(st.integers(0, 1), max_size=3),
        tail=st.integers(1, BLOCK_SIZE),
        then=st.sampled_from(("runs", "is written", "is written and ends", "ends")),
    )
    def admit(self, values: list[int], tail: int, then: str) -> None:
        seq = make_sequence(0, block_of(*values) + [2] * tail)
        self.seen.add(tuple(seq.token_ids))
        hits, parent_hash = self.manager.match_prefix(seq, most_cached_tokens(seq))
        known = set(self.texts.values())
        expected = [p for p in self.prefixes(seq.token_ids) if len(p) < len(seq.token_ids)]
        longest = next((i for i, prefix in enumerate(expected) if prefix not in known), len(expected))
        assert [self.texts[block] for block in hits] == expected[:longest]
        assert [b"", *prefix_hashes(seq.token_ids, BLOCK_SIZE)][longest] == parent_hash
        num_fresh = self.manager.num_blocks_for(seq.num_tokens) - len(hits)
        revived = [text for text in expected[:longest] if text in self.free_hits]
        free = self.manager.num_free_blocks
        assert self.manager.can_admit(seq, hits) == (num_fresh <= free - len(revived))
        if self.manager.can_admit(seq, hits):
            num_empty = free - len(self.free_hits)
            for text in revived:
                del self.free_hits[text]
            self.manager.admit(seq, hits, parent_hash)
            assert seq.block_table[: len(hits)] == hits
            assert len(seq.block_table) == 1 + (seq.num_tokens - 1) // BLOCK_SIZE
            self.took(seq.block_table[len(hits) :], num_empty)
            self.rows.append(seq)
            if "written" in then:
                self.publish_first(seq, seq.num_tokens)
            if "ends" in then:
                self.release_row(len(self.rows) - 1)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.rows))
        self.publish_first(seq, data.draw(st.integers(0, seq.num_tokens)))

    def publish_first(self, seq: Sequence, written: int) -> None:
        known = seq.num_hashed_blocks  # what has been forgotten since stays so
        self.manager.publish(seq, written)
        prefixes = self.prefixes(seq.token_ids[:written]) if self.is_caching else []
        for block, prefix in list(zip(seq.block_table, prefixes, strict=False))[known:]:
            if prefix not in self.texts.values():
                assert block not in self.texts
                self.texts[block] = prefix

    @precondition(lambda self: self.rows and self.manager.num_free_blocks)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.rows))
        num_empty = self.manager.num_free_blocks - len(self.free_hits)
        block = self.manager.append_block(seq)
        assert seq.block_table[-1] == block
        self.took([block], num_empty)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_row(data.draw(st.integers(0, len(self.rows) - 1)))

    def release_row(self, index: int) -> None:
        seq = self.rows.pop(index)
        owned = list(seq.block_table)
        self.manager.release(seq)
        still = {block for row in self.rows for block in row.block_table}
        for block in reversed(owned):
            if block not in still and block in self.texts:
                self.free_hits[self.texts[block]] = None

    @rule()
    def forget(self) -> None:
        """Rows keep their blocks."""
        self.manager.forget_cached()
        self.texts.clear()
        self.free_hits.clear()

    @invariant()
    def check(self) -> None:
        self.manager.check_integrity(self.rows)
        for tokens in self.seen:
            expected = [p for p in self.prefixes(list(tokens)) if len(p) < len(tokens)]
            known = set(self.texts.values())
            longest = next((i for i, prefix in enumerate(expected) if prefix not in known), len(expected))
            assert num_hits(self.manager, list(tokens)) == longest

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.check()
            for seq in self.rows:
                self.manager.release(seq)
            self.manager.check_integrity([])
            assert self.manager.num_free_blocks == self.manager.num_blocks


TestAgainstModel = BlockManagerMachine.TestCase
