"""KV blocks: what is a hit, what is reused first, and that none is lost or owned twice."""

from collections import OrderedDict

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulation import make_sequence

from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

BLOCK_SIZE = 4


def admit(manager: BlockManager, tokens: list[int], *, written: bool = True) -> Sequence:
    """A row of `tokens` that owns its blocks; `written`: and whose KV is all there."""
    seq = make_sequence(0, tokens)
    hits, parent_hash = manager.match_prefix(seq)
    assert manager.can_admit(seq, hits)
    manager.admit(seq, hits, parent_hash)
    if written:
        manager.publish(seq, seq.num_tokens)
    return seq


def num_hits(manager: BlockManager, tokens: list[int]) -> int:
    return len(manager.match_prefix(make_sequence(0, tokens))[0])


def block_of(*tokens: int) -> list[int]:
    """Tokens for whole blocks, each filled with one value."""
    return [token for token in tokens for _ in range(BLOCK_SIZE)]


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_row_owns_the_blocks_of_its_tokens(length: int, blocks: int) -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    seq = admit(manager, [7] * length)
    assert len(set(seq.block_table)) == blocks == manager.num_blocks_for(length)
    assert manager.num_free_blocks == 10 - blocks
    manager.check_integrity([seq])


def test_equal_prefixes_share_blocks_while_both_run() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    first = admit(manager, block_of(1, 2, 3))
    second = admit(manager, [*block_of(1, 2), 9])
    assert second.block_table[:2] == first.block_table[:2]
    assert not set(second.block_table[2:]) & set(first.block_table)
    assert manager.num_free_blocks == 10 - 4
    manager.check_integrity([first, second])
    manager.release(first)
    manager.check_integrity([second])
    manager.release(second)
    assert manager.num_free_blocks == 10


@pytest.mark.parametrize(("length", "hits"), [(3, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_one_token_at_least_stays_to_be_computed(length: int, hits: int) -> None:
    """A prompt that is one exact multiple of the block keeps its last block to compute: that is where it samples."""
    manager = BlockManager(10, BLOCK_SIZE)
    tokens = list(range(13))
    manager.release(admit(manager, tokens))
    assert num_hits(manager, tokens[:length]) == hits


def test_a_block_is_a_hit_only_once_its_data_is_written() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    tokens = block_of(1, 2, 3)
    seq = admit(manager, tokens, written=False)
    assert num_hits(manager, [*tokens, 0]) == 0
    manager.publish(seq, 7)
    assert num_hits(manager, [*tokens, 0]) == 1
    manager.publish(seq, 12)
    assert num_hits(manager, [*tokens, 0]) == 3


def test_unwritten_blocks_are_no_hits_after_release() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    seq = admit(manager, block_of(1, 2, 3), written=False)
    manager.publish(seq, 4)
    manager.release(seq)
    assert num_hits(manager, [*block_of(1, 2, 3), 0]) == 1


def test_a_hit_needs_the_whole_prefix_equal() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    manager.release(admit(manager, block_of(1, 2, 3)))
    assert num_hits(manager, [*block_of(1, 2, 3), 0]) == 3
    assert num_hits(manager, [*block_of(5, 2, 3), 0]) == 0, "same second block after another first one"
    assert num_hits(manager, [*block_of(2, 3), 0]) == 0
    assert num_hits(manager, [*block_of(1, 5, 3), 0]) == 1


def test_a_text_computed_twice_at_the_same_time_is_one_hit() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    first, second = (admit(manager, block_of(1, 2), written=False) for _ in range(2))
    manager.publish(first, 8)
    manager.publish(second, 8)
    manager.check_integrity([first, second])
    manager.release(first)
    manager.release(second)
    manager.check_integrity([])
    third = admit(manager, [*block_of(1, 2), 0])
    assert manager.num_free_blocks == 7
    manager.check_integrity([third])


def test_without_prefix_caching_nothing_is_a_hit() -> None:
    manager = BlockManager(10, BLOCK_SIZE, enable_prefix_caching=False)
    manager.release(admit(manager, block_of(1, 2)))
    assert num_hits(manager, block_of(1, 2, 3)) == 0
    manager.check_integrity([])


def test_blocks_without_content_go_before_hits_and_hits_least_recently_freed_first() -> None:
    manager = BlockManager(6, BLOCK_SIZE)
    old, new = block_of(1, 2), block_of(3, 4)
    rows = [admit(manager, old), admit(manager, new)]
    for seq in rows:
        manager.release(seq)  # 4 hits and 2 blocks that nobody has used
    rows = [admit(manager, [9], written=False) for _ in range(2)]
    assert (num_hits(manager, [*old, 0]), num_hits(manager, [*new, 0])) == (2, 2)
    rows.append(admit(manager, [9], written=False))
    assert (num_hits(manager, [*old, 0]), num_hits(manager, [*new, 0])) == (1, 2), "the older text's tail goes first"
    rows.append(admit(manager, [9], written=False))
    rows.append(admit(manager, [9], written=False))
    assert (num_hits(manager, [*old, 0]), num_hits(manager, [*new, 0])) == (0, 1)
    manager.check_integrity(rows)


def test_a_block_freed_without_content_goes_before_hits_freed_earlier() -> None:
    manager = BlockManager(2, BLOCK_SIZE)
    manager.release(admit(manager, block_of(1)))
    manager.release(admit(manager, [9], written=False))
    admit(manager, [9], written=False)
    assert num_hits(manager, [*block_of(1), 0]) == 1


def test_being_used_again_makes_a_hit_recent() -> None:
    manager = BlockManager(4, BLOCK_SIZE)
    for tokens in (block_of(1), block_of(2), [*block_of(1), 0]):
        manager.release(admit(manager, tokens))
    rows = [admit(manager, [9], written=False) for _ in range(3)]  # the two empty ones, then the least recent hit
    assert num_hits(manager, [*block_of(1), 0]) == 1
    assert num_hits(manager, [*block_of(2), 0]) == 0
    manager.check_integrity(rows)


def test_a_revived_hit_does_not_count_as_room() -> None:
    manager = BlockManager(3, BLOCK_SIZE)
    manager.release(admit(manager, block_of(1, 2)))
    seq = make_sequence(0, [*block_of(1, 2, 3), 0])
    hits, _ = manager.match_prefix(seq)
    assert len(hits) == 2 and manager.num_free_blocks == 3
    assert not manager.can_admit(seq, hits), "3 are free, 2 of them are its own hits, and it needs 2 more"
    smaller = make_sequence(0, block_of(1, 2, 3))
    assert manager.can_admit(smaller, manager.match_prefix(smaller)[0])


def test_a_colliding_hash_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager.xxhash, "xxh3_128_digest", lambda content: b"always the same")
    manager = BlockManager(10, BLOCK_SIZE)
    manager.release(admit(manager, block_of(1, 2)))
    assert num_hits(manager, [*block_of(2), 0]) == 0
    assert num_hits(manager, [*block_of(1), 0]) == 1
    other = admit(manager, block_of(3, 4))  # finds its place taken: it stays private
    manager.check_integrity([other])
    assert num_hits(manager, [*block_of(3), 0]) == 0


def test_forget_cached_leaves_rows_their_blocks_and_no_hit() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    manager.release(admit(manager, block_of(1, 2)))
    running = admit(manager, block_of(3, 4))
    manager.forget_cached()
    assert num_hits(manager, [*block_of(1), 0]) == num_hits(manager, [*block_of(3), 0]) == 0
    manager.check_integrity([running])
    manager.release(running)
    manager.check_integrity([])


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

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, BLOCK_SIZE)
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

    @rule(values=st.lists(st.integers(0, 1), max_size=3), tail=st.integers(1, BLOCK_SIZE))
    def admit(self, values: list[int], tail: int) -> None:
        seq = make_sequence(0, block_of(*values) + [2] * tail)
        self.seen.add(tuple(seq.token_ids))
        hits, parent_hash = self.manager.match_prefix(seq)
        known = set(self.texts.values())
        expected = [p for p in self.prefixes(seq.token_ids) if len(p) < len(seq.token_ids)]
        longest = next((i for i, prefix in enumerate(expected) if prefix not in known), len(expected))
        assert [self.texts[block] for block in hits] == expected[:longest]
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
            self.took(seq.block_table[len(hits) :], num_empty)
            self.rows.append(seq)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.rows))
        written = data.draw(st.integers(0, seq.num_tokens))
        self.manager.publish(seq, written)
        for block, prefix in zip(seq.block_table, self.prefixes(seq.token_ids[:written]), strict=False):
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
        seq = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        owned = list(seq.block_table)
        self.manager.release(seq)
        still = {block for row in self.rows for block in row.block_table}
        for block in reversed(owned):
            if block not in still and block in self.texts:
                self.free_hits[self.texts[block]] = None

    @rule()
    def forget(self) -> None:
        for seq in self.rows:
            self.manager.release(seq)
        self.rows.clear()
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
