"""Blocks of KV memory: what is a hit, what is reused first, and that none is lost or owned twice."""

import random
from collections import OrderedDict
from itertools import product, takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulation import Simulation, blocks_of, make_sequence

from nanovllm.engine.block_starts import BlockStarts, block_start
from nanovllm.engine.prefix_keys import KEY_SIZE, prefix_keys
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.row_memory import RowMemory
from nanovllm.engine.sequence import Sequence
from nanovllm.wire.state import PageGroup, StateSize

BLOCK_SIZE = 4


def admit(memory: RowMemory, tokens: list[int]) -> Sequence:
    """A row of `tokens` that owns its blocks and whose KV is all there."""
    seq = make_sequence(0, tokens)
    prefix = memory.cache.lookup(seq)
    prefix, count = memory.fit(seq, prefix, seq.num_tokens - prefix.num_tokens)
    assert count == seq.num_tokens - prefix.num_tokens
    memory.admit(seq, prefix, count)
    seq.num_computed_tokens = seq.num_tokens
    memory.cache.publish(seq, seq.num_tokens)
    return seq


def num_hits(memory: RowMemory, tokens: list[int]) -> int:
    return memory.cache.num_hits(make_sequence(0, tokens), len(tokens) - 1)


def block_of(*tokens: int) -> list[int]:
    """Tokens for whole blocks, each filled with one value."""
    return [token for token in tokens for _ in range(BLOCK_SIZE)]


def test_an_extra_counts_from_its_position_on() -> None:
    """As the digest of an image does."""
    memory = RowMemory(StateSize(10, BLOCK_SIZE))

    def text(digest: bytes) -> Sequence:
        seq = make_sequence(0, [*block_of(1, 2, 3), 0])
        seq.prompt = Prompt(seq.token_ids, ((BLOCK_SIZE + 1, digest),))
        return seq

    first = text(b"one")
    memory.admit(first, memory.cache.lookup(first), first.num_tokens)
    memory.cache.publish(first, first.num_tokens)
    assert [memory.cache.num_hits(text(digest), 3 * BLOCK_SIZE) for digest in (b"one", b"two")] == [3, 1]
    assert memory.cache.lookup(text(b"two")).num_tokens == BLOCK_SIZE, "nor is the second block copied"


@given(
    texts=st.lists(st.lists(st.sampled_from((0, 1, 256, 1 << 24)), min_size=1, max_size=6), max_size=8),
    text=st.lists(st.sampled_from((0, 1, 256, 1 << 24)), min_size=3, max_size=6),
    least=st.integers(1, 3),
)
def test_the_nearest_start_has_most_tokens_in_common(texts: list[list[int]], text: list[int], least: int) -> None:
    starts = BlockStarts(least)
    for tokens in texts:
        starts.add(block_start(bytes(KEY_SIZE), tokens))
    lengths = [len([*takewhile(lambda pair: pair[0] == pair[1], zip(tokens, text, strict=False))]) for tokens in texts]
    most = max((length for length in lengths if length >= least), default=0)
    found, common = starts.nearest(block_start(bytes(KEY_SIZE), text))
    assert common == most and starts.nearest(block_start(bytes([1] * KEY_SIZE), text)) == (b"", 0)
    assert found in [block_start(bytes(KEY_SIZE), tokens) for tokens in texts] if most else found == b""


def test_a_window_that_moves_on_leaves_hits_behind() -> None:
    """A prefix is found where the full layers have all of it and the others what their window reaches."""
    memory = RowMemory(StateSize(60, BLOCK_SIZE, (PageGroup(), PageGroup(window=6, num_tables=2))), table_width=20)
    seq = admit(memory, [*range(40)])
    assert seq.memory.num_held_blocks == 30 and memory.num_free_blocks == 30
    assert memory.prepare(seq, 0) == 0
    assert [page is not None for page in seq.memory.pages[1]] == [False] * 8 + [True] * 2
    memory.check_integrity([seq])
    assert num_hits(memory, [*range(40), 0]) == 10
    assert num_hits(memory, [*range(30), 0]) == 7, "pages of former windows are there while nobody needs them"
    other = admit(memory, [100] * 60)  # takes what is free and more
    assert num_hits(memory, [*range(30), 0]) < 7
    assert num_hits(memory, [*range(40), 0]) == 10
    for row in (seq, other):
        memory.release(row)
    memory.check_integrity([])
    assert memory.num_free_blocks == 60


def test_a_kept_state_is_no_hit_where_the_window_before_it_has_gone() -> None:
    """The prefix that all windows reach has no state, and a shorter one that has it has lost pages of its window."""
    groups = PageGroup(), PageGroup(6)
    engine = Simulation(num_blocks=15, groups=groups, num_lines=3, depth=1, max_num_seqs=2, max_num_batched_tokens=8)
    for prompt, max_tokens in (([1] * 16 + [3] * 2, 3), ([1] * 12 + [3] * 2, 5), ([1] * 16 + [3] * 3, 3)):
        engine.add(prompt, max_tokens)
        engine.step()
    engine.run_to_end()


@pytest.mark.parametrize("tokens_per_step", [1, 2, 4])
def test_a_preempted_row_goes_on_from_its_last_state(tokens_per_step: int) -> None:
    """After its last whole block; the one before, where it has one token behind that. With drafts, too."""
    chosen, lengths = random.Random(1), set[int]()
    gain = (lambda most: chosen.randint(1, most)) if tokens_per_step > 1 else None
    for count in range(2, 40):
        options: dict[str, Any] = {"max_num_seqs": 2, "tokens_per_step": tokens_per_step, "gain": gain}
        engine = Simulation(num_blocks=20, block_size=16, num_lines=4, depth=2, **options)
        seq = engine.add([1] * (3 + count % 16), 100).seq
        for _ in range(count):
            engine.step()
        engine.drain()
        lengths.add(seq.num_tokens)
        engine.scheduler._preempt_newest()
        engine.step()
        assert seq.num_cached_tokens == (seq.num_tokens - 2) // 16 * 16
        engine.run_to_end()
    assert len(lengths) > 20


def test_what_fits_is_admitted_where_a_copy_is_given_up() -> None:
    """Without what it would copy a prefix ends earlier, and its windows reach other pages, which are not free then."""
    text = [*range(5, 17)]
    for window, num_blocks, end, begin in product((2, 3, 5, 6), range(6, 16), range(9, 13), range(5, 13)):
        size = StateSize(num_blocks, BLOCK_SIZE, (PageGroup(), PageGroup(window, num_tables=2)))
        memory = RowMemory(size, table_width=20)
        for number, tokens in enumerate(([*text[:end], 1], [*text[:begin], 2, 3])):
            seq = make_sequence(number, tokens)
            prefix = memory.cache.lookup(seq)
            assert prefix is not None
            prefix, count = memory.fit(seq, prefix, len(tokens) - prefix.num_tokens)
            if count:
                memory.admit(seq, prefix, count)
                seq.num_computed_tokens = prefix.num_tokens + count
                memory.cache.publish(seq, seq.num_computed_tokens)
                memory.release(seq)
                memory.check_integrity([])


class RowMemoryMachine(RuleBasedStateMachine):
    """Against a model that knows texts only: which prefixes are hits, and which of them goes next."""

    @initialize(num_blocks=st.integers(1, 6), is_caching=st.sampled_from((True, True, False)))
    def start(self, num_blocks: int, is_caching: bool) -> None:
        self.is_caching = is_caching
        self.memory = RowMemory(StateSize(num_blocks, BLOCK_SIZE), enable_prefix_caching=is_caching)
        self.rows: list[Sequence] = []
        self.texts: dict[int, tuple[int, ...]] = {}  # block -> the text that ends with it, where it is a hit
        self.free_hits: OrderedDict[tuple[int, ...], None] = OrderedDict()  # hits that nobody owns, next to go first
        self.seen: set[tuple[int, ...]] = set()
        self.waiting: dict[tuple[int, ...], Sequence] = {}

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
        cache = self.memory.cache
        prefix = cache.prefix_of(seq, cache.num_hits(seq, seq.num_tokens - 1))
        hits = [page.blocks[0] for page in prefix.pages[0]]
        known = set(self.texts.values())
        expected = [p for p in self.prefixes(seq.token_ids) if len(p) < len(seq.token_ids)]
        longest = next((i for i, prefix in enumerate(expected) if prefix not in known), len(expected))
        assert [self.texts[block] for block in hits] == expected[:longest]
        num_keys = len(seq.prefix.keys)
        assert num_keys >= len(hits) and seq.prefix.keys == prefix_keys(seq.token_ids, BLOCK_SIZE)[:num_keys]
        num_fresh = self.memory.num_blocks_for(seq.num_tokens) - len(hits)
        revived = [text for text in expected[:longest] if text in self.free_hits]
        free = self.memory.num_free_blocks
        fits = self.memory.fit(seq, prefix, 1)[1] == 1
        assert fits == (num_fresh <= free - len(revived))
        if fits:
            num_empty = free - len(self.free_hits)
            for text in revived:
                del self.free_hits[text]
            self.memory.admit(seq, prefix, 1)
            assert blocks_of(seq)[: len(hits)] == hits
            assert len(blocks_of(seq)) == 1 + (seq.num_tokens - 1) // BLOCK_SIZE
            self.took(blocks_of(seq)[len(hits) :], num_empty)
            self.rows.append(seq)
            if "written" in then:
                self.publish_first(seq, seq.num_tokens)
            if "ends" in then:
                self.release_row(len(self.rows) - 1)

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """A row that waits gets what one gets that asks for the first time."""
        tokens = data.draw(st.sampled_from(sorted(self.seen)))
        seq = self.waiting.setdefault(tokens, make_sequence(0, list(tokens)))
        found = self.memory.cache.num_hits(seq, len(tokens) - 1)
        assert found == num_hits(self.memory, list(tokens))
        pages = self.memory.cache.prefix_of(seq, found).pages[0]
        assert [page.key for page in pages] == seq.prefix.keys[:found]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.rows))
        self.publish_first(seq, data.draw(st.integers(0, seq.num_tokens)))

    def publish_first(self, seq: Sequence, written: int) -> None:
        known = seq.prefix.num_published  # what has been forgotten since stays so
        self.memory.cache.publish(seq, written)
        prefixes = self.prefixes(seq.token_ids[:written]) if self.is_caching else []
        for block, prefix in list(zip(blocks_of(seq), prefixes, strict=False))[known:]:
            if prefix not in self.texts.values():
                assert block not in self.texts
                self.texts[block] = prefix

    @precondition(lambda self: self.rows and self.memory.num_free_blocks)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.rows))
        num_empty = self.memory.num_free_blocks - len(self.free_hits)
        seq.num_computed_tokens = seq.memory.num_reserved_tokens
        assert self.memory.can_grow(seq, seq.num_computed_tokens + 1)
        [_, index, block] = self.memory.reserve(seq, 1)
        assert blocks_of(seq)[index:] == [block]
        self.took([block], num_empty)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_row(data.draw(st.integers(0, len(self.rows) - 1)))

    def release_row(self, index: int) -> None:
        seq = self.rows.pop(index)
        owned = blocks_of(seq)
        self.memory.release(seq)
        still = {block for row in self.rows for block in blocks_of(row)}
        for block in reversed(owned):
            if block not in still and block in self.texts:
                self.free_hits[self.texts[block]] = None

    @rule()
    def forget(self) -> None:
        """Rows keep their blocks."""
        self.memory.forget_cached()
        self.texts.clear()
        self.free_hits.clear()

    @invariant()
    def check(self) -> None:
        self.memory.check_integrity(self.rows)
        for tokens in self.seen:
            expected = [p for p in self.prefixes(list(tokens)) if len(p) < len(tokens)]
            known = set(self.texts.values())
            longest = next((i for i, prefix in enumerate(expected) if prefix not in known), len(expected))
            assert num_hits(self.memory, list(tokens)) == longest

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.check()
            for seq in self.rows:
                self.memory.release(seq)
            self.memory.check_integrity([])
            assert self.memory.num_free_blocks == self.memory.num_blocks


TestAgainstModel = RowMemoryMachine.TestCase
