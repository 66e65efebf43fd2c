"""Whether one more request fits into memory until the rows that run have ended.

A row that is admitted because its tokens fit now may lose its blocks when all have grown, and what was computed for it
is lost. So the rows are followed into the future: until the k-th longest of them ends, k rows gain as many tokens as it
has to come, and then its blocks are free. What the worst of these moments needs must fit. After the Past-Future
scheduler (Gong et al., arXiv 2507.10150); rows whose end is not known are taken to become as long as past outputs that
were longer than they are now.

    rows A, B and C hold a, b and c tokens, with 2, 4 and 6 to come:     until A ends   a + b + c + 3 * 2
                                                                        until B ends       b + c + 2 * 4
                                                                        until C ends           c + 1 * 6
"""

from bisect import bisect_right
from collections import deque
from itertools import accumulate

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

_REMEMBERED_OUTPUTS = 256
_STEPS_IN_FLIGHT = 2
"""Steps that others take until an ended row's blocks are free: its last token has to arrive first."""


class Lookahead:
    """What was seen of the lengths of outputs, and what it says of the future."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._block_manager = block_manager
        self._most_blocks = 0
        """What all that run would hold if each came to its longest and none ended before."""
        self._past: deque[int] = deque(maxlen=_REMEMBERED_OUTPUTS)
        self._lengths: list[int] = []
        """Those of _past, ascending; brought up to date by `future`."""
        self._sums: list[int] = []
        """Of the longest, by how many of them."""

    def _most_blocks_of(self, seq: Sequence) -> int:
        return self._block_manager.num_blocks_for(seq.max_total_tokens - 1)  # the last token's KV is never needed

    def note_admitted(self, seq: Sequence) -> None:
        self._most_blocks += self._most_blocks_of(seq)

    def note_released(self, seq: Sequence) -> None:
        self._most_blocks -= self._most_blocks_of(seq)

    def surely_fits(self, seq: Sequence) -> bool:
        """Without a look at any row: where memory is no concern, none is taken."""
        return self._most_blocks + self._most_blocks_of(seq) <= self._block_manager.num_blocks

    def note_end(self, seq: Sequence) -> None:
        """An output has ended by itself."""
        self._past.append(seq.num_tokens - seq.num_prompt_tokens)

    def num_tokens_to_come(self, seq: Sequence) -> int:
        """Tokens whose KV `seq` will still add: all that it may, where nothing but its length ends it. Else as many as
        past outputs brought that were longer, on average, and half a block at least: the first to end are short."""
        most = max(0, seq.max_total_tokens - 1 - seq.num_total_tokens)
        if not seq.stop_token_ids and not (seq.sampling is not None and seq.sampling.watches):
            return most
        gained = seq.num_total_tokens - seq.num_prompt_tokens
        num_longer = len(self._lengths) - bisect_right(self._lengths, gained)
        expected = self._sums[num_longer] // num_longer - gained if num_longer else 0
        return min(most, max(expected, self._block_manager.block_size // 2))

    def future(self, running: list[Sequence]) -> "Future":
        """That of the rows that hold blocks now."""
        self._lengths = sorted(self._past)
        self._sums = [0, *accumulate(reversed(self._lengths))]
        manager = self._block_manager
        size = manager.block_size
        # Blocks of a cached prefix are nobody's own: they may outlive the row that wrote them.
        own_blocks = sum(len(seq.block_table) - seq.num_cached_tokens // size for seq in running)
        shared_blocks = max(0, manager.num_blocks - manager.num_free_blocks - own_blocks)
        future = Future(manager.num_blocks - shared_blocks, size)
        for seq in running:
            future.add(seq.num_total_tokens - seq.num_cached_tokens, self.num_tokens_to_come(seq))
        return future

    def check_integrity(self, running: list[Sequence]) -> None:
        assert self._most_blocks == sum(map(self._most_blocks_of, running))


class Future:
    """Rows by the tokens that they hold by themselves, and those to come."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self._held: list[int] = []
        self._to_come: list[int] = []
        self._last_blocks = 0

    def add(self, held: int, to_come: int) -> None:
        self._held.append(held)
        self._to_come.append(to_come)
        self._last_blocks += -(-(held + to_come) // self._block_size)

    def fits(self, held: int, to_come: int) -> bool:
        """Whether one more row does, until all have ended."""
        if self._last_blocks - (-(held + to_come) // self._block_size) <= self._num_blocks:
            return True  # even if none ended before the others
        return self.peak_blocks(held, to_come) <= self._num_blocks

    def peak_blocks(self, last_held: int, last_to_come: int) -> int:
        """Most blocks in use at once, with this row among them."""
        to_come = np.array([*self._to_come, last_to_come], dtype=np.int32)
        order = np.argsort(-to_come)
        to_come, held = to_come[order], np.array([*self._held, last_held], dtype=np.int32)[order]
        # [k, j]: of row j when row k's blocks become free. Those with j > k have ended before.
        tokens = held + np.minimum(to_come[:, None] + _STEPS_IN_FLIGHT, to_come)
        return int(np.tril(-(-tokens // self._block_size)).sum(axis=1).max())
