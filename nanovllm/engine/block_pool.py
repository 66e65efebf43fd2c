"""Blocks of KV memory: who owns which, and which is reused first."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Page:
    """Memory for the keys and values of `block_size` tokens in the layers of one group."""

    group: int
    blocks: tuple[int, ...]
    """One block for each table of the group."""
    num_owners: int = 1
    key: bytes | None = None
    """Key of the page's text, by which the prefix cache finds it; None: the cache does not have it."""
    index: int = 0
    """Index of the page's block in that text."""
    has_entries: bool = True
    """Whether a model that drafts has taken in what the cache knows of the page (RowPrefix.has_entries)."""
    start: bytes = b""
    """Written part of the block (block_starts.py), by which others find and copy it; empty: not registered."""


class BlockPool:
    """Owner of every block. A block is unused, or part of a page; a page has owners, or is cached: its text can be
    found, and it is reused when no unused block is left, least recently used first."""

    def __init__(self, num_blocks: int, forget: Callable[[Page], None]) -> None:
        """`forget`: called with a cached page whose blocks are about to be reused."""
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks
        """Blocks that can be handed out: unused ones and those of cached pages."""
        self.copies: list[int] = []
        """Copies that the next step makes before it computes, in this order: flat pairs of blocks, source and
        destination."""
        self._forget = forget
        self._unused = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[Page, None] = OrderedDict()

    def take(self, group: int, num_blocks: int) -> Page:
        """Hands out a page of `num_blocks` blocks with one owner. At least as many blocks must be free."""
        while len(self._unused) < num_blocks:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
            self._unused += page.blocks
        self.num_free_blocks -= num_blocks
        return Page(group, tuple([self._unused.pop() for _ in range(num_blocks)]))

    def share(self, pages: Iterable[Page]) -> None:
        """Adds an owner to each page."""
        for page in pages:
            if page.num_owners == 0:
                del self._cached[page]
                self.num_free_blocks -= len(page.blocks)
            page.num_owners += 1

    def copy(self, source: Page, target: Page) -> None:
        """Queues the copy of a page's blocks to those of another page for the next step."""
        for pair in zip(source.blocks, target.blocks, strict=True):
            self.copies += pair

    def give_back(self, page: Page) -> None:
        """Removes an owner. A page that nobody owns is cached if its text can be found. Those that can only be copied
        are reused before all others, the latest of them first."""
        page.num_owners -= 1
        if page.num_owners:
            return
        self.num_free_blocks += len(page.blocks)
        if page.key is None and not page.start:
            self._unused += page.blocks
        else:
            self._cached[page] = None
            if page.key is None:
                self._cached.move_to_end(page, last=False)

    def num_cached_blocks(self, pages: Iterable[Page]) -> int:
        """Number of blocks of those of these pages that nobody owns."""
        return sum(len(page.blocks) for page in pages if not page.num_owners)

    def drop_cached(self) -> None:
        """Makes the blocks of all cached pages unused."""
        for page in self._cached:
            self._unused += page.blocks
        self._cached.clear()

    def check_integrity(self, owned: Iterable[Page]) -> set[Page]:
        """Asserts that every block is unused, cached, or owned as often as counted. `owned`: once for each owner.
        Returns all pages."""
        owners = Counter(owned)
        assert all(page.num_owners == count for page, count in owners.items()), owners
        assert all(page.num_owners == 0 for page in self._cached)
        held = [block for page in [*owners, *self._cached] for block in page.blocks]
        assert sorted(held + self._unused) == list(range(self.num_blocks)), (held, self._unused)
        assert self.num_free_blocks == len(self._unused) + sum(len(page.blocks) for page in self._cached)
        return {*owners, *self._cached}
