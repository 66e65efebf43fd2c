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

from collections import deque

import numpy as np

from nanovllm.engine.prefix_cache import CachedPrefix
from nanovllm.engine.row_memory import RowMemory
from nanovllm.engine.sequence import Sequence

_REMEMBERED_OUTPUTS = 256
_STEPS_IN_FLIGHT = 2
"""Steps that others take until an ended row's blocks are free: its last token has to arrive first."""


class Lookahead:
    """Forecast of the memory that rows will need, from the lengths of past outputs."""

    def __init__(self, memory: RowMemory, enabled: bool, tokens_per_step: int = 1) -> None:
        """enabled: False: every row fits. tokens_per_step: most tokens that a row gains in one step."""
        self._memory, self._in_flight, self._enabled = memory, _STEPS_IN_FLIGHT * tokens_per_step, enabled
        self._forecast: Forecast | None = None
        """Forecast of the step that is being scheduled, from the first row on that needs one."""
        self._most_blocks = 0
        """Blocks that all running rows would hold if each reached its maximum length and none ended before."""
        self._past: deque[int] = deque(maxlen=_REMEMBERED_OUTPUTS)
        self._lengths: np.ndarray | None = None
        """Lengths of _past, ascending; None: not sorted since the last output ended."""
        self._sums = np.zeros(1, np.int64)
        """Sums of _lengths from each index on."""

    def _most_blocks_of(self, seq: Sequence) -> int:
        return self._memory.row_blocks(seq.max_total_tokens - 1)  # the last token's KV is never needed

    def note_admitted(self, seq: Sequence) -> None:
        self._most_blocks += self._most_blocks_of(seq)

    def note_released(self, seq: Sequence) -> None:
        self._most_blocks -= self._most_blocks_of(seq)

    def begin_step(self) -> None:
        """Forgets the forecast of the step before."""
        self._forecast = None

    def fits(self, seq: Sequence, prefix: CachedPrefix, running: list[Sequence]) -> bool:
        """Whether a row that begins with `prefix` is expected to keep its blocks beside those that run."""
        # The first is the cheap check where memory is no concern.
        if not self._enabled or self._most_blocks + self._most_blocks_of(seq) <= self._memory.num_blocks:
            return True
        self._forecast, memory = self._forecast or self._forecast_of(running), self._memory
        more_blocks = memory.window_blocks(seq.max_total_tokens) - memory.num_owned_blocks(prefix)
        held = memory.num_full_tables * seq.num_tokens + more_blocks * memory.block_size
        return self._forecast.add_if_it_fits(held, int(self.num_tokens_to_come([seq])[0]))

    def note_end(self, seq: Sequence) -> None:
        """Remembers the length of an output that was not aborted."""
        self._past.append(seq.num_output_tokens)
        self._lengths = None

    def num_tokens_to_come(self, seqs: list[Sequence]) -> np.ndarray:
        """int64 [seqs]: tokens whose KV each will still add.

        For a row that ends by its length alone: all that are left. For others: as many as longer past outputs had on
        average, and half a block at least, since the first outputs to end are short."""
        total = np.array([seq.num_tokens + seq.num_inflight_tokens for seq in seqs], np.int64)
        most = np.maximum(0, np.array([seq.max_total_tokens for seq in seqs], np.int64) - 1 - total)
        gained = total - np.array([seq.num_prompt_tokens for seq in seqs], np.int64)
        if self._lengths is None:
            self._lengths = np.sort(np.array(self._past, np.int64))
            self._sums = np.append(np.cumsum(self._lengths[::-1])[::-1], 0)
        first_longer = self._lengths.searchsorted(gained, side="right")
        num_longer = self._lengths.size - first_longer
        expected = np.where(num_longer, self._sums[first_longer] // np.maximum(1, num_longer) - gained, 0)
        expected = np.maximum(expected, self._memory.block_size // 2)
        return np.where([seq.may_stop for seq in seqs], np.minimum(most, expected), most)

    def _forecast_of(self, running: list[Sequence]) -> "Forecast":
        """Forecast for the running rows."""
        memory, size = self._memory, self._memory.block_size
        total = np.array([seq.num_tokens + seq.num_inflight_tokens for seq in running], np.int64)
        # Whole blocks of a cached prefix belong to no single row: they may outlive the row that wrote them.
        cached_blocks = np.array([seq.num_cached_tokens for seq in running], np.int64) // size
        own_blocks = sum([seq.memory.num_held_blocks for seq in running])
        own_blocks -= memory.num_full_tables * int(cached_blocks.sum())
        shared_blocks = max(0, memory.num_blocks - memory.num_free_blocks - own_blocks)
        held = memory.num_full_tables * (total - cached_blocks * size)
        if memory.num_tables > memory.num_full_tables:
            held += size * np.array([memory.window_blocks(seq.max_total_tokens) for seq in running], np.int64)
        return Forecast(
            memory.num_blocks - shared_blocks, size, held, self.num_tokens_to_come(running), memory.num_full_tables,
            self._in_flight,
        )  # fmt: skip

    def check_integrity(self, running: list[Sequence]) -> None:
        assert self._most_blocks == sum(map(self._most_blocks_of, running))


class Forecast:
    """Tokens that are held when the blocks of a row are about to become free: the moments that matter.

    Half of a row's last block is empty on average, and counts as held; the steps until an ended row's blocks are free
    count as tokens to come. Made once a step in O(R log R) for R rows; one more row costs O(R).
    """

    def __init__(
        self, num_blocks: int, block_size: int, held: np.ndarray, to_come: np.ndarray, num_tables: int = 1,
        in_flight: int = _STEPS_IN_FLIGHT,
    ) -> None:  # fmt: skip
        """held: int64 [R], tokens that each row holds by itself, counted once for each table. to_come: int64 [R], those
        that it will add to each of `num_tables`. in_flight: tokens that others add until an ended row's are free."""
        self._growth, self._in_flight = num_tables, in_flight
        self._num_tokens, self._empty = num_blocks * block_size, block_size // 2
        order = np.argsort(-to_come)
        self._held, self._to_come = held[order] + self._empty, to_come[order] + in_flight
        last = np.searchsorted(-self._to_come, -self._to_come, side="right")  # rows that end no earlier are before it
        self._used = np.append(0, np.cumsum(self._held))[last] + last * self._to_come * num_tables
        """int64 [R]: tokens held when the blocks of row k become free. Rows that ended before have none."""

    def add_if_it_fits(self, held: int, to_come: int) -> bool:
        """Adds one more row if all rows then have room until they end; returns whether it did."""
        held, to_come = held + self._empty, to_come + self._in_flight
        others = self._held[self._to_come >= to_come]
        at_its_end = int(others.sum()) + held + (len(others) + 1) * to_come * self._growth
        more = np.where(self._to_come <= to_come, held + self._to_come * self._growth, 0)
        used = np.append(self._used + more, at_its_end)
        if int(used.max()) > self._num_tokens:
            return False
        self._held, self._to_come = np.append(self._held, held), np.append(self._to_come, to_come)
        self._used = used
        return True
