"""What rows share: the beginning of a text that is cached, and one that another row computes in this very step."""

from typing import NamedTuple

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.openings import Openings
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.waiting import WaitingQueues

_MOST_HELD = 64
"""Requests that others pass in one step: a bound on the host's time."""


class CachedPrefix(NamedTuple):
    """What the prefix cache has of a row's beginning."""

    hits: list[int]
    """Whole blocks, to be shared."""
    parent_hash: bytes
    """Hash of the last of them."""
    source: int
    """The block that begins as the row goes on after them, to be copied; -1: none."""
    num_copied: int
    """Tokens that it has in common with the row."""

    def num_tokens(self, block_size: int) -> int:
        return len(self.hits) * block_size + self.num_copied


class StepSharing:
    """One step's admissions: who is served by the cache, and who waits for what is computed now.

    A request waits where that spares it a whole block, or half of what it would compute. It is held apart meanwhile, so
    that others can pass: copies of a prompt begin a step after it, together.
    """

    def __init__(self, block_manager: BlockManager, prompts: list[Sequence]) -> None:
        """prompts: running rows that this step computes tokens of which are known."""
        self._manager = block_manager
        self._computing = Openings()
        self._held: list[Sequence] = []
        for seq in prompts:
            self.note(seq)

    def note(self, seq: Sequence) -> None:
        """`seq` computes the first block that it has not computed, and others may share it later."""
        if not seq.is_stale:
            opening = self._manager.opening(seq, seq.num_hashed_blocks, seq.parent_hash, seq.num_tokens)
            if opening is not None:
                self._computing.add(opening)

    def prefix_for(self, seq: Sequence) -> CachedPrefix | None:
        """What `seq` can begin with; None: it is better to wait."""
        if self._held and _are_copies(seq, self._held[-1]):
            return None
        most, size = most_cached_tokens(seq), self._manager.block_size
        hits, parent_hash = self._manager.match_prefix(seq, most)
        opening = self._manager.opening(seq, len(hits), parent_hash, most)
        source, num_copied = self._manager.match_opening(opening, parent_hash)
        prefix = CachedPrefix(hits, parent_hash, source, num_copied)
        if opening is not None:
            _, common = self._computing.nearest(opening)
            spared = common - num_copied if common >= self._manager.least_copied else 0
            if spared > 0 and (common == size or 2 * spared >= seq.num_tokens - prefix.num_tokens(size)):
                return None
        return prefix

    def hold(self, seq: Sequence, waiting: WaitingQueues) -> bool:
        """Takes `seq` out of its queue until put_back; False where so many are held that it stays."""
        if len(self._held) == _MOST_HELD:
            return False
        waiting.remove(seq)
        self._held.append(seq)
        return True

    def put_back(self, waiting: WaitingQueues) -> None:
        """Those that were held are the first of their queues again."""
        for seq in reversed(self._held):
            waiting.put_back(seq)


def most_cached_tokens(seq: Sequence) -> int:
    """Tokens of a row that may come from the prefix cache: all but the last, whose step is the one that samples, and
    none of those whose log-probabilities are wanted, since these come with computing."""
    if seq.sampling is not None and seq.sampling.num_prompt_logprobs_missing:
        return seq.sampling.prompt_logprob_start - 1
    return seq.num_tokens - 1


def _are_copies(seq: Sequence, other: Sequence) -> bool:
    """Whether one prefix serves both."""
    return (
        seq.token_ids == other.token_ids
        and seq.params.cache_salt == other.params.cache_salt
        and most_cached_tokens(seq) == most_cached_tokens(other)
    )
