"""Prefix cache: blocks shared by content, copied where a text leaves another inside a block, and waited for where a row
computes them in this very step.

A page that nobody owns keeps its key until its blocks are reused, so that a later text with the same prefix finds it.
Layers with a window need the last tokens of a text alone: a prefix of n tokens is a hit where all pages of the other
layers are there, and those that the window at n reaches. Where layers have memory of fixed size, their state after n
tokens must have been kept too (lines.py): a row leaves it after the last whole block of its prompt, and where a look-up
found pages and no state. There nothing is copied inside a block.
"""

from collections import Counter, deque
from collections.abc import Iterable
from itertools import chain, islice
from typing import NamedTuple

from nanovllm.engine.block_pool import Page
from nanovllm.engine.block_starts import BlockStarts, block_start
from nanovllm.engine.lines import LinePool
from nanovllm.engine.prefix_keys import before_block, extend_keys
from nanovllm.engine.sequence import Sequence
from nanovllm.wire.state import PageGroup

_LEAST_COPIED = 16
"""Tokens for which a copy is made, at least: fewer are computed sooner. In small blocks it is half a block."""

_ALL_BLOCKS = 1 << 32

_MOST_GONE = 4096
"""Pages whose keys went that are remembered: a row that was looked up before them is looked up anew."""


class CachedPrefix(NamedTuple):
    """Cached beginning of a row."""

    num_blocks: int
    """Number of whole blocks, which are shared."""
    source: tuple[Page, ...]
    """Pages, by group, whose first tokens continue the shared blocks and are copied; empty: nothing is copied."""
    num_tokens: int
    """Number of tokens, shared and copied ones together."""
    pages: list[list[Page]]
    """Pages of the shared blocks, by group; in groups with a window only the last ones, which it reaches."""


def most_cached_tokens(seq: Sequence) -> int:
    """Maximum tokens of a row that may come from the cache: all but the last, which is computed to sample, and none
    from the first one on whose log-probability is wanted, since that comes from computing it."""
    if seq.sampling is not None and seq.sampling.num_prompt_logprobs_missing:
        return seq.sampling.prompt_logprob_start - 1
    return seq.num_tokens - 1


class PrefixCache:
    """Finds pages by the text that they hold."""

    def __init__(
        self, block_size: int, groups: tuple[PageGroup, ...], enabled: bool = True, lines: LinePool | None = None,
        recomputes: bool = False,
    ) -> None:  # fmt: skip
        """enabled: False: nothing is found or kept. lines: where layers have memory of fixed size. recomputes: the last
        token of a hit is computed again, in a copy of its block; but where layers have such memory, for it is there
        after whole blocks alone."""
        self._lines, self._recomputes = lines, recomputes and lines is None
        self.num_state_misses = 0
        """Prompt tokens, of each prompt when it first begins, that were cached but had no state after them."""
        self._to_keep: set[bytes] = set()
        """Keys of the blocks after which prompts that run keep a state: rows that can begin with one wait for it."""
        self.block_size, self.groups, self.enabled = block_size, groups, enabled
        self.full = [index for index, group in enumerate(groups) if group.window is None]
        self.windows = [index for index, group in enumerate(groups) if group.window is not None]
        """Indices of the groups without a window, and of those with one."""
        self._pages: list[dict[bytes, Page]] = [{} for _ in groups]
        """Cached or owned pages by key, for each group."""
        self._generation = 0
        """Number of pages that have lost their keys so far."""
        self._gone: deque[Page] = deque(maxlen=_MOST_GONE)
        """The last pages that have lost their keys."""
        self._least_copied = min(_LEAST_COPIED, -(-block_size // 2))
        self._starts = BlockStarts(self._least_copied)
        self._pages_of_start: dict[bytes, tuple[Page, ...]] = {}
        """Pages, by group, of each start; of several equal starts the newest."""
        self._computing = BlockStarts(self._least_copied)
        """Block starts that rows of the step being scheduled compute."""
        self._begun: list[Sequence] = []
        """Rows of that step whose starts are not in _computing yet: these are made when another row is looked up."""

    # -- finding ------------------------------------------------------------------------------------------------

    def begin_step(self, prompts: Iterable[Sequence]) -> None:
        """Begins the look-ups of a step. prompts: running rows of which it computes known tokens."""
        self._computing.clear()
        self._begun = [*prompts]
        self._to_keep = {key for seq in self._begun for key in self._keys_to_keep(seq)}

    def note_computing(self, seq: Sequence) -> None:
        """Notes that `seq` computes its next block in this step, which others may share later."""
        self._begun.append(seq)
        self._to_keep.update(self._keys_to_keep(seq))

    def lengths_to_keep(self, seq: Sequence) -> tuple[int, ...]:
        """Numbers of a prompt's leading blocks after which its state is worth keeping, the worthiest first: those that
        others have in common with it, and all."""
        if self._lines is None or not self.enabled or not seq.prefix.keeps_states:
            return ()
        return seq.prefix.num_cached, (seq.num_tokens - 1) // self.block_size

    def key_of(self, seq: Sequence, num_blocks: int) -> bytes:
        """Key of a row's first blocks, so many."""
        self._extend_keys(seq, num_blocks)
        return seq.prefix.keys[num_blocks - 1]

    def _keys_to_keep(self, seq: Sequence) -> list[bytes]:
        computed = seq.num_computed_tokens // self.block_size
        return [self.key_of(seq, number) for number in self.lengths_to_keep(seq) if number > computed]

    def _computed_now(self, start: bytes) -> int:
        """Number of leading tokens of a block start that a row of this step computes."""
        for seq in self._begun:
            if (begun := self._start_of(seq, seq.prefix.num_published, seq.num_tokens)) is not None:
                self._computing.add(begun)
        self._begun.clear()
        return self._computing.nearest(start)[1]

    def lookup(self, seq: Sequence) -> CachedPrefix | None:
        """Finds the cached prefix of a waiting row. None: the row should wait a step, since a row of this step computes
        a whole block that it would share, or half of all that it would compute."""
        most, size = most_cached_tokens(seq), self.block_size
        num_blocks = self.num_hits(seq, most)
        if self._to_keep:
            self._extend_keys(seq, most // size)
            if not self._to_keep.isdisjoint(seq.prefix.keys[num_blocks : most // size]):
                return None
        start = self._start_of(seq, num_blocks, most)
        if start is None:
            return self._cut(seq, self.prefix_of(seq, num_blocks))
        found, num_copied = self._starts.nearest(start)
        common = self._computed_now(start)
        spared, left = common - num_copied, seq.num_tokens - num_blocks * size - num_copied
        if spared > 0 and (common == size or 2 * spared >= left):
            return None
        return self._cut(seq, self.prefix_of(seq, num_blocks, num_copied, self._pages_of_start.get(found, ())))

    def _cut(self, seq: Sequence, prefix: CachedPrefix) -> CachedPrefix:
        """The prefix without its last token, where that is computed again: what a model drafts from at a position goes
        by the token behind it, too, which may be another than in the row that computed the block."""
        if not self._recomputes or not prefix.num_tokens:
            return prefix
        num_blocks, num_copied = divmod(prefix.num_tokens - 1, self.block_size)
        if num_blocks == prefix.num_blocks:
            return self.prefix_of(seq, num_blocks, num_copied, prefix.source if num_copied else ())
        return self.prefix_of(seq, num_blocks, num_copied, tuple(found[-1] for found in prefix.pages))

    def prefix_of(
        self, seq: Sequence, num_blocks: int, num_copied: int = 0, source: tuple[Page, ...] = ()
    ) -> CachedPrefix:
        """Cached prefix of a row that was just looked up, of so many blocks and copied tokens."""
        num_tokens, matched = num_blocks * self.block_size + num_copied, iter(seq.prefix.matched)
        shared = [
            next(matched)[:num_blocks]
            if group.window is None
            else [pages[key] for key in seq.prefix.keys[self.first_kept(number, num_tokens) : num_blocks]]
            for number, (group, pages) in enumerate(zip(self.groups, self._pages, strict=True))
        ]
        return CachedPrefix(num_blocks, source, num_tokens, shared)

    def num_hits(self, seq: Sequence, most_tokens: int) -> int:
        """Number of blocks of the longest cached prefix of `seq` within its first `most_tokens`.

        A repeated look-up goes on where the last one ended, or at the first page that was lost since. A text is hashed
        about as far as it is cached."""
        end = limit = most_tokens // self.block_size if self.enabled else 0
        keys, matched, tables = seq.prefix.keys, self._still_matched(seq), [self._pages[group] for group in self.full]
        if not matched:
            self._extend_keys(seq, limit)
        for index in range(len(matched[0]), limit) if matched else ():
            if index == len(keys):
                self._extend_keys(seq, min(limit, 2 * index + 1))
            pages = [page for table in tables if (page := table.get(keys[index])) is not None]
            if len(pages) < len(tables):
                end = index
                break
            for found, page in zip(matched, pages, strict=True):
                found.append(page)
        end = self._within_windows(keys, end)
        if self._lines is not None:
            seq.prefix.num_cached = end
            while end and keys[end - 1] not in self._lines:
                end = self._within_windows(keys, end - 1)
        return end

    def _within_windows(self, keys: list[bytes], end: int) -> int:
        """Most blocks, at most `end`, at whose end each window reaches only cached pages."""
        while (shorter := min((self._window_hits(group, keys, end) for group in self.windows), default=end)) < end:
            end = shorter
        return end

    def _still_matched(self, seq: Sequence) -> list[list[Page]]:
        """Pages that the last look-up of a row found and that are still cached, by group without a window."""
        num_gone, matched = self._generation - seq.prefix.matched_at, seq.prefix.matched
        if not matched or num_gone > len(self._gone):
            seq.prefix.matched = matched = [[] for _ in self.full]
        elif num_gone:
            for page in islice(reversed(self._gone), num_gone):
                if any(page.index < len(found) and found[page.index] is page for found in matched):
                    for found in matched:
                        del found[page.index :]
        seq.prefix.matched_at = self._generation
        return matched

    def _window_hits(self, group: int, keys: list[bytes], end: int) -> int:
        """Most blocks, at most `end`, at whose end this group's window reaches only cached pages."""
        window, pages = self.groups[group].window, self._pages[group]
        assert window is not None
        reached, run = -(-(window - 1 + self._recomputes) // self.block_size), 0
        if not reached:
            return end
        for index in range(end - 1, -1, -1):
            run = run + 1 if keys[index] in pages else 0
            if run == reached:
                return index + run
        return run

    def _start_of(self, seq: Sequence, index: int, num_tokens: int) -> bytes | None:
        """Start (block_starts.py) of a row's block `index`, as far as the row's first `num_tokens` go; None where these
        are too few of the block to be copied."""
        begin, end = index * self.block_size, min((index + 1) * self.block_size, num_tokens)
        if not self.enabled or self._lines is not None or end - begin < self._least_copied:
            return None
        self._extend_keys(seq, index)
        before = before_block(seq.prefix.keys, index, self.block_size, seq.prompt.extras)
        return block_start(before, seq.token_ids[begin:end])

    def _extend_keys(self, seq: Sequence, num_blocks: int) -> None:
        extend_keys(seq.prefix.keys, seq.token_ids, num_blocks, self.block_size, seq.prompt.extras)

    def are_copies(self, seq: Sequence, other: Sequence) -> bool:
        """Whether two rows have the same prefix to look up, so that the answer for `other` serves `seq`."""
        most = most_cached_tokens(seq)
        same_extras = seq.prompt.extras == other.prompt.extras
        if seq.num_tokens != other.num_tokens or most != most_cached_tokens(other) or not same_extras:
            return False
        num_blocks = most // self.block_size
        for row in (seq, other):
            self._extend_keys(row, num_blocks)
        rest = num_blocks * self.block_size
        last = slice(max(0, num_blocks - 1), num_blocks)
        return seq.prefix.keys[last] == other.prefix.keys[last] and seq.token_ids[rest:] == other.token_ids[rest:]

    def first_kept(self, group: int, position: int) -> int:
        """Index of the first block that a query at `position` reaches in a group."""
        window = self.groups[group].window
        return 0 if window is None else max(0, position + 1 - window) // self.block_size

    # -- contents -----------------------------------------------------------------------------------------------

    def begin(self, seq: Sequence, prefix: CachedPrefix) -> None:
        """Notes that a row begins to run with this prefix."""
        seq.prefix.num_published, seq.prefix.matched, seq.prefix.keeps_states = prefix.num_blocks, [], True
        seq.prefix.has_entries = all(page.has_entries for page in chain(*prefix.pages, prefix.source))
        if self._lines is not None:
            if seq.index == 0 and seq.num_prompt_cached_tokens is None:
                found = min(seq.prefix.num_cached * self.block_size, seq.num_prompt_tokens)
                self.num_state_misses += max(0, found - prefix.num_tokens)
            self._lines.admit(seq, seq.prefix.keys[prefix.num_blocks - 1] if prefix.num_blocks else None)

    def withhold(self, seq: Sequence, num_blocks: int = _ALL_BLOCKS) -> None:
        """Leaves the first blocks of a running row (all that it will have) to this row alone."""
        seq.prefix.num_published = max(seq.prefix.num_published, num_blocks)
        seq.prefix.keeps_states = False

    def publish(self, seq: Sequence, num_written_tokens: int) -> None:
        """Makes the full blocks among a row's first `num_written_tokens`, which are written, available to other rows as
        far as their tokens are known. The rest of these tokens may be copied."""
        if not self.enabled:
            return
        size, num_tokens = self.block_size, min(num_written_tokens, seq.num_tokens)
        for index in range(seq.prefix.num_published, num_tokens // size):
            self._extend_keys(seq, index + 1)
            self._note_start(seq, index, num_tokens)
            key = seq.prefix.keys[index]
            for pages, table in zip(self._pages, seq.memory.pages, strict=True):
                page = table[index]
                if page is not None and key not in pages:  # else: computed twice at once; the first stays the hit
                    assert page.key is None and page.num_owners > 0, page
                    page.key, page.index, pages[key] = key, index, page
                    page.has_entries = seq.prefix.has_entries
            seq.prefix.num_published = index + 1
        self._note_start(seq, seq.prefix.num_published, num_tokens)

    def _note_start(self, seq: Sequence, index: int, num_tokens: int) -> None:
        """Registers the start of a row's block `index`, in its first `num_tokens`, unless it is too short to copy."""
        start = self._start_of(seq, index, num_tokens)
        if start is None:
            return
        pages = tuple([page for table in seq.memory.pages if (page := table[index]) is not None])
        if len(pages) < len(seq.memory.pages) or pages[0].start == start:
            return
        for page in pages:
            self._forget_start(page)
        if start in self._pages_of_start:
            for page in self._pages_of_start[start]:
                page.start = b""
        else:
            self._starts.add(start)
        self._pages_of_start[start] = pages
        for page in pages:
            page.start, page.has_entries = start, seq.prefix.has_entries

    def _forget_start(self, page: Page) -> None:
        if page.start:
            self._starts.remove(page.start)
            for each in self._pages_of_start.pop(page.start):
                each.start = b""

    def forget(self, page: Page) -> None:
        """Removes a page whose blocks are about to be reused."""
        if page.key is not None:
            del self._pages[page.group][page.key]
            if self._lines is not None:
                self._lines.forget(page.key)
            page.key = None
            self._generation += 1
            self._gone.append(page)
        self._forget_start(page)

    def forget_all(self) -> None:
        """Empties the cache. Rows keep their blocks."""
        if self._lines is not None:
            self._lines.forget_all()
        for pages in self._pages:
            for page in pages.values():
                page.key = None
            pages.clear()
        for pages_of_start in self._pages_of_start.values():
            for page in pages_of_start:
                page.start = b""
        self._starts.clear()
        self._pages_of_start.clear()
        self._generation += 1
        self._gone.clear()

    def check_integrity(self, known: set[Page]) -> None:
        """Asserts that keys and starts lead to their pages. known: all that are owned or cached."""
        for group, pages in enumerate(self._pages):
            found = {page.key: page for page in known if page.group == group and page.key is not None}
            assert found == pages, (found, pages)
        starts = Counter(page.start for page in known if page.start)
        assert starts == {start: len(pages) for start, pages in self._pages_of_start.items()}
        assert all(page.start == start for start, pages in self._pages_of_start.items() for page in pages)
        assert sorted(self._pages_of_start) == sorted(self._starts)
