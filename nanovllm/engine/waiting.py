"""Requests that have not begun, or were preempted: those with short prompts, and those with long ones."""

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterator
from operator import attrgetter

from nanovllm.engine.sequence import Sequence

_MOST_HELD = 64
"""Requests that others pass in one step: a bound on the host's time."""


class WaitingQueues:
    """Queues of waiting rows, each in the order of arrival, also of rows that come back."""

    def __init__(self, long_threshold: int) -> None:
        """long_threshold: prompts with more tokens are long; 0: none is."""
        self._long_threshold = long_threshold
        self.short: deque[Sequence] = deque()
        self.long: deque[Sequence] = deque()
        self.num_tokens = 0
        """Number of known tokens of all rows that wait."""
        self.adapters: Counter[str] = Counter()
        """Rows that wait, by the digest of their adapter; those without one are not counted."""
        self.held: list[Sequence] = []
        """Rows that were taken out until the end of a step's admissions, so that others pass."""

    def __len__(self) -> int:
        return len(self.short) + len(self.long)

    def __iter__(self) -> Iterator[Sequence]:
        """Walks over copies, made at once: another thread may ask while a step changes the queues."""
        yield from [*self.short]
        yield from [*self.long]

    def check_integrity(self) -> None:
        """Asserts that the counts are those of the rows that wait."""
        assert self.num_tokens == sum(seq.num_tokens for seq in self)
        assert self.adapters == Counter(adapter for seq in self if (adapter := seq.prompt.adapter))

    def is_long(self, num_remaining_tokens: int) -> bool:
        return 0 < self._long_threshold < num_remaining_tokens

    def _queue_of(self, seq: Sequence) -> deque[Sequence]:
        # By the length that never changes, so that a row is found again where it was put.
        return self.long if self.is_long(seq.num_prompt_tokens) else self.short

    def append(self, seq: Sequence) -> None:
        self._queue_of(seq).append(seq)
        self._count(seq, 1)

    def put_back(self, seq: Sequence) -> None:
        """Puts a row back at its place in the order of arrival."""
        insort(self._queue_of(seq), seq, key=attrgetter("arrival"))
        self._count(seq, 1)

    def remove(self, seq: Sequence) -> None:
        queue = self._queue_of(seq)
        if queue[0] is seq:
            queue.popleft()
        else:
            queue.remove(seq)
        self._count(seq, -1)

    def _count(self, seq: Sequence, more: int) -> None:
        self.num_tokens += more * seq.num_tokens
        if (adapter := seq.prompt.adapter) is not None:
            self.adapters[adapter] += more
            if not self.adapters[adapter]:
                del self.adapters[adapter]

    def hold(self, seq: Sequence) -> bool:
        """Takes `seq` out until put_back_held. Returns False, with nothing changed, where too many are held already."""
        if len(self.held) == _MOST_HELD:
            return False
        self.remove(seq)
        self.held.append(seq)
        return True

    def put_back_held(self) -> None:
        """Puts all held rows back at their places."""
        while self.held:
            self.put_back(self.held.pop())

    def next(self, long_allowed: bool, holds_new: bool, passes: Callable[[Sequence], bool]) -> Sequence | None:
        """Next row by arrival. `long_allowed` False: a short row that waits goes before long ones. `holds_new`: only
        rows that have begun count. `passes`: (row) -> whether it must let others pass."""
        short, long = (_first(queue, holds_new, passes) for queue in (self.short, self.long))
        if short is None or long is None:
            return short or long
        return long if long_allowed and long.arrival < short.arrival else short


def _first(queue: deque[Sequence], holds_new: bool, passes: Callable[[Sequence], bool]) -> Sequence | None:
    return next((seq for seq in queue if (not holds_new or has_begun(seq)) and not passes(seq)), None)


def has_begun(seq: Sequence) -> bool:
    """Whether it was admitted once."""
    return seq.num_prompt_cached_tokens is not None
