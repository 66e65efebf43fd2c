"""The memory of rows: which blocks each has for its keys and values, and what fits.

A row has a table of pages for each group of layers. Layers without a window need all of its tokens: a row is admitted
where all its known tokens fit, and gets their pages at once. Layers with a window need its last tokens alone: a row
gets their pages for what it computes next, and gives them back as the window moves on. Pages given back stay in the
prefix cache until their blocks are reused. Layers with memory of fixed size have a line for each row (lines.py).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

from nanovllm.engine.block_pool import BlockPool, Page
from nanovllm.engine.lines import LinePool
from nanovllm.engine.prefix_cache import CachedPrefix, PrefixCache
from nanovllm.engine.sequence import RowPages, Sequence
from nanovllm.wire.state import StateSize, capacity_tokens, row_blocks
from nanovllm.wire.step import NO_LINE


class RowMemory:
    """Owner of every block. Its methods assume that callers have asked what fits."""

    def __init__(
        self, size: StateSize, enable_prefix_caching: bool = True, table_width: int = 0, tokens_per_step: int = 1,
        recomputes: bool = False,
    ) -> None:  # fmt: skip
        """table_width: blocks of one block table on the device; needed where rows have several tables.
        tokens_per_step: most tokens that a row gains in one step. recomputes: see PrefixCache."""
        self._verifies = tokens_per_step > 1
        margin = 2 * (tokens_per_step - 1)  # between least and most computed after a step in flight and one more
        num_blocks, block_size, groups = size.num_blocks, size.block_size, size.groups
        self._held = tuple(group.widened(margin) for group in groups)
        """Groups as rows hold them while they decode, their windows widened by the margin."""
        self.num_blocks, self.block_size, self._table_width = num_blocks, block_size, table_width
        self.lines = LinePool(size.num_lines) if size.num_lines else None
        self.cache = PrefixCache(block_size, groups, enable_prefix_caching, self.lines, recomputes)
        self.pool = BlockPool(num_blocks, self.cache.forget)
        self._full, self._windows = self.cache.full, self.cache.windows
        self._groups = groups
        self.num_tables = size.num_tables
        self.num_full_tables = sum(groups[index].num_tables for index in self._full)
        """Number of tables that keep all tokens of a row."""
        self.capacity_tokens = capacity_tokens(self._held, num_blocks, block_size)
        """Tokens of the longest row that fits alone."""
        self._first_table = [sum(group.num_tables for group in groups[:index]) for index in range(len(groups))]

    # -- sizes --------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be handed out, those of cached pages among them."""
        return self.pool.num_free_blocks

    @property
    def has_free(self) -> bool:
        """Whether there is room for anything of a row more."""
        return bool(self.num_free_blocks) and (self.lines is None or self.lines.has_free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that one table needs for so many tokens."""
        return -(-num_tokens // self.block_size)

    def window_blocks(self, num_tokens: int) -> int:
        """Maximum blocks that a row of up to `num_tokens` holds for layers with windows while it decodes."""
        return row_blocks((self._held[group] for group in self._windows), num_tokens, self.block_size)

    def row_blocks(self, num_tokens: int) -> int:
        """Maximum blocks that such a row holds while it decodes."""
        return row_blocks(self._held, num_tokens, self.block_size)

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens that all blocks hold together."""
        return min(self.capacity_tokens, self.num_blocks * self.block_size)

    def room_beside(self, num_rows: int) -> int:
        """Number of rows for which there is memory beside the `num_rows` that run, if they are as long as these."""
        return num_rows * self.num_free_blocks // max(1, self.num_blocks - self.num_free_blocks)

    # -- rows ---------------------------------------------------------------------------------------------------

    def fit(self, seq: Sequence, prefix: CachedPrefix, count: int) -> tuple[CachedPrefix, int]:
        """Finds how many tokens, at most `count`, a waiting row can compute first: with its `prefix`, it gets blocks
        for all its tokens in layers without a window, and for the tokens to compute in the others. 0: the row does not
        fit. Returns the prefix too; it copies nothing where the blocks to copy from are needed themselves."""
        if prefix.source and self.num_tables > 1:  # with one table a block may be copied onto itself
            if found := self._fitting(seq, prefix, count, prefix.source):
                return prefix, found
            prefix = self.cache.prefix_of(seq, prefix.num_blocks)
        return prefix, self._fitting(seq, prefix, count)

    def _fitting(self, seq: Sequence, prefix: CachedPrefix, count: int, source: Iterable[Page] = ()) -> int:
        """Finds how many of `count` tokens fit while the prefix and, until it is copied, `source` are kept."""
        shared = prefix.num_blocks
        left = self.num_free_blocks - self.num_full_tables * (self.num_blocks_for(seq.num_tokens) - shared)
        if left < 0:
            return 0
        left -= self.pool.num_cached_blocks(chain(*prefix.pages, source))
        return self._within_windows(prefix.num_tokens, count, shared, left)

    def num_owned_blocks(self, prefix: CachedPrefix) -> int:
        """Number of a prefix's blocks that other rows own, in layers without a window."""
        cached = self.pool.num_cached_blocks(page for group in self._full for page in prefix.pages[group])
        return self.num_full_tables * prefix.num_blocks - cached

    def _within_windows(self, start: int, count: int, num_blocks: int, num_free: int) -> int:
        """Finds for how many of `count` tokens from `start` on `num_free` blocks suffice in the groups with windows,
        whose tables have `num_blocks` blocks each so far."""
        if num_free < 0:
            return 0
        if not self._windows:
            return count
        most = num_blocks + num_free // (self.num_tables - self.num_full_tables)
        return max(0, min(count, most * self.block_size - start))

    def admit(self, seq: Sequence, prefix: CachedPrefix, count: int) -> None:
        """Gives `seq` its prefix, and fresh blocks for its other tokens: all of them in layers without a window, the
        first `count` in the others."""
        assert not seq.memory.pages, seq
        source = prefix.source if self.num_tables > 1 else ()
        self.pool.share(chain(*prefix.pages, source))  # before any block is taken
        for found in prefix.pages:
            seq.memory.pages.append([*[None] * (prefix.num_blocks - len(found)), *found])
        seq.memory.num_held_blocks = sum(len(page.blocks) for page in chain(*prefix.pages))
        for group in self._full:
            self._extend(seq, group, seq.num_tokens)
        for group in self._windows:
            self._extend(seq, group, prefix.num_tokens + count)
        for page, table in zip(prefix.source, seq.memory.pages, strict=False):
            own = table[prefix.num_blocks]
            assert own is not None
            self.pool.copy(page, own)
        for page in source:
            self.pool.give_back(page)
        self.cache.begin(seq, prefix)
        self._note_reserved(seq)

    def _extend(self, seq: Sequence, group: int, num_tokens: int) -> None:
        """Adds pages to a row's table until it holds so many tokens."""
        table, num_tables = seq.memory.pages[group], self._groups[group].num_tables
        more = self.num_blocks_for(num_tokens) - len(table)
        for _ in range(more):
            table.append(self.pool.take(group, num_tables))
        seq.memory.num_held_blocks += max(0, more) * num_tables

    def _note_reserved(self, seq: Sequence) -> None:
        seq.memory.num_reserved_tokens = self.block_size * min(map(len, seq.memory.pages))

    def can_grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Gives back what the windows of a decoding row have left; returns whether it can then have blocks for so many
        tokens in each table."""
        self.leave_behind(seq)
        more = self.num_blocks_for(num_tokens) - seq.memory.num_reserved_tokens // self.block_size
        return self.num_free_blocks >= more * self.num_tables

    def num_updates(self, seq: Sequence, prefix: CachedPrefix, count: int) -> int:
        """Number of block updates that announce a row which is admitted with these arguments."""
        found = self.num_full_tables * self.num_blocks_for(seq.num_tokens)
        end = self.num_blocks_for(prefix.num_tokens + count)
        for group in self._windows:
            found += self._groups[group].num_tables * (end - self.cache.first_kept(group, prefix.num_tokens))
        return found

    def prepare(self, seq: Sequence, count: int) -> int:
        """Gives back what the windows of a running row have left; returns for how many of its next `count` tokens there
        is room then: all of them where no layer has a window, since it has blocks for its known tokens."""
        if not self._windows:
            return count
        start = seq.num_computed_tokens
        self.leave_behind(seq)
        num_blocks = min(len(seq.memory.pages[group]) for group in self._windows)
        return self._within_windows(start, count, num_blocks, self.num_free_blocks)

    def reserve(self, seq: Sequence, count: int) -> list[int]:
        """Gives a running row blocks for its next `count` tokens, for which `prepare` or `can_grow` found room. Returns
        block updates: flat triples slot, index, block."""
        updates: list[int] = []
        for group, table in enumerate(seq.memory.pages):
            first = len(table)
            self._extend(seq, group, seq.num_computed_tokens + count)
            updates += self._updates(seq, group, first)
        self._note_reserved(seq)
        return updates

    def keep_within(self, seq: Sequence, start: int, count: int) -> tuple[int, int]:
        """Line that keeps the state of a prompt which it passes while it computes `count` tokens from `start` on, and
        after how many of these; NO_LINE and 0: none does."""
        assert self.lines is not None
        for number in self.cache.lengths_to_keep(seq):
            at = number * self.block_size - start
            if 0 < at <= count and (line := self.lines.keep(self.cache.key_of(seq, number))) != NO_LINE:
                return line, at
        return NO_LINE, 0

    def save_state(self, seq: Sequence) -> None:
        """Keeps the state of a row that decodes and has filled its blocks, as far as their text is known."""
        number = seq.num_computed_tokens // self.block_size
        is_known = seq.num_computed_tokens <= seq.num_tokens and not self._verifies
        if self.lines is not None and self.cache.lengths_to_keep(seq) and is_known:
            self.lines.save(seq, self.cache.key_of(seq, number))

    def expect_states(self, seqs: Iterable[Sequence]) -> dict[Sequence, tuple[int, int]]:
        """Schedule.keeps of the decodes of a scheduled step, where steps verify drafts: each keeps the state that it
        passed, and has a line for the one after its next whole block, if it may get there and a line is to spare."""
        found = {}
        for seq in seqs if self._verifies else ():
            self._keep_passed(seq)
            memory = seq.memory
            if memory.keep_at < seq.num_tokens - 1:  # where the oldest step in flight begins
                begin = seq.num_least_computed - 1  # of this step, at least
                memory.keep_at = self.num_blocks_for(begin) * self.block_size
            if memory.keep_at < seq.num_computed_tokens and self.cache.lengths_to_keep(seq):
                assert self.lines is not None
                if self.lines.lend(memory):
                    found[seq] = memory.keep_line, memory.keep_at
        return found

    def note_passed(
        self, keeps: Mapping[Sequence, tuple[int, int]], results: Iterable[tuple[Sequence, int]]
    ) -> Iterable[tuple[Sequence, int]]:
        """Notes which decodes of a step, of which these are Schedule.keeps, have got past the block whose state they
        keep. results: the tokens that the step brings, before they are taken in; returns them."""
        if not keeps:
            return results
        results = [*results]
        gained = Counter(seq for seq, _ in results)
        for seq, kept in keeps.items():
            memory = seq.memory
            is_expected = kept == (memory.keep_line, memory.keep_at) and memory.keep_line != NO_LINE
            if is_expected and 0 <= memory.keep_at - (seq.num_tokens - 1) < gained[seq]:
                memory.has_passed = True
        return results

    def _keep_passed(self, seq: Sequence) -> None:
        memory = seq.memory
        is_there = memory.has_passed and memory.keep_line != NO_LINE and memory.keep_at < seq.num_tokens
        if self.lines is not None and is_there and self.cache.lengths_to_keep(seq):
            self.lines.keep_passed(seq, self.cache.key_of(seq, memory.keep_at // self.block_size))

    def leave_behind(self, seq: Sequence) -> None:
        """Gives back the pages of a row that no later query reaches, if it has any."""
        for group in self._windows if seq.memory.pages else ():
            table, end = seq.memory.pages[group], self.cache.first_kept(group, seq.num_least_computed)
            first = next((index for index in range(end, 0, -1) if table[index - 1] is None), 0)
            for index in range(first, end):
                page, table[index] = table[index], None
                assert page is not None
                seq.memory.num_held_blocks -= len(page.blocks)
                self.pool.give_back(page)

    def all_updates(self, seq: Sequence) -> list[int]:
        """Block updates that announce all blocks of a row to the device."""
        return [number for group in range(len(self._groups)) for number in self._updates(seq, group, 0)]

    def _updates(self, seq: Sequence, group: int, first: int) -> list[int]:
        updates: list[int] = []
        for index, page in enumerate(seq.memory.pages[group][first:], first):
            if page is not None:
                for table, block in enumerate(page.blocks, self._first_table[group]):
                    updates += (seq.slot, table * self._table_width + index, block)
        return updates

    def release(self, seq: Sequence) -> None:
        """Takes back all blocks of a row. The last are reused first: the beginning of a prompt is the likelier hit."""
        for table in seq.memory.pages:
            for page in reversed(table):
                if page is not None:
                    self.pool.give_back(page)
        if self.lines is not None:
            self._keep_passed(seq)
            self.lines.release(seq)
        seq.memory = RowPages()

    def forget_cached(self) -> None:
        """Empties the prefix cache. Rows keep their blocks."""
        self.cache.forget_all()
        self.pool.drop_cached()

    def check_integrity(self, owners: Iterable[Sequence]) -> None:
        """Asserts that blocks, pages and the tables of these rows agree."""
        owners = list(owners)
        if self.lines is not None:
            self.lines.check_integrity(owners)
        owned = [page for seq in owners for table in seq.memory.pages for page in table if page is not None]
        self.cache.check_integrity(self.pool.check_integrity(owned))
        for seq in owners:
            held = [page for table in seq.memory.pages for page in table if page is not None]
            assert seq.memory.num_held_blocks == sum(len(page.blocks) for page in held), seq
            for group, table in enumerate(seq.memory.pages):
                kept = self.cache.first_kept(group, seq.num_least_computed)
                assert all(page is not None and page.group == group for page in table[kept:]), seq
