"""Router: chooses the replica that computes a request. Pure: no torch, no clock, no processes.

A request joins the queue of the replica where its expected cost is least: the tokens to compute there after prefix
hits, plus a share of what is ahead of it. It is sent only when the replica has room. A replica that has room and no
queue takes the first request of the longest queue if it is likely to finish earlier here, even without its prefix hits;
an idle replica always takes it.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanovllm.wire.state import PageGroup, capacity_tokens, row_blocks

DECODE_COST = 2.0
"""Cost of a token to generate, in prompt tokens. It is higher, because a step has few decoded tokens."""
_LOAD_WEIGHT = 0.5  # share of the load ahead in the cost: requests run beside each other as much as one after another,
# and with 1, small differences of load would move requests away from the prefixes that they share
_SPARE_ROWS = 8  # a replica gets 1 / 8 more rows than it runs at once, so that some wait there when others end
_SPARE_BLOCKS = 1.25  # and requests for this many times the blocks of its KV cache
_MEAN_WEIGHT = 0.02  # of one output in the running mean of output lengths


class HeldPrefixes(OrderedDict[bytes, None]):
    """Block hashes that a replica's prefix cache is expected to hold; the least recently used are dropped first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self._num_blocks = num_blocks

    def num_hits(self, hashes: list[bytes]) -> int:
        """Number of leading blocks of a prompt that are cached."""
        return next((number for number, digest in enumerate(hashes) if digest not in self), len(hashes))

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Notes that the blocks of a request were used."""
        for digest in reversed(list(hashes)):  # a prompt's tail is evicted first, as in RowMemory.release
            self[digest] = None
            self.move_to_end(digest)
        while len(self) > self._num_blocks:
            self.popitem(last=False)


@dataclass(eq=False)
class Load:
    """Size and cost of a request."""

    request_id: int
    hashes: list[bytes]
    """Keys of the prompt's full blocks (engine/prefix_keys.py)."""
    num_prompt_tokens: int
    max_output_tokens: int
    num_rows: int = 1
    adapter: str | None = None
    cost: float = 0.0
    """Expected addition to its replica's load, set when it joins a queue."""
    num_blocks: int = 0
    """KV blocks that its rows are expected to hold when they end."""


@dataclass
class _Replica:
    held: HeldPrefixes = field(default_factory=lambda: HeldPrefixes(0))
    most_blocks: int = 0
    is_there: bool = False
    lacks: set[str] = field(default_factory=set)
    """Adapters of requests that it cannot compute."""
    queue: deque[Load] = field(default_factory=deque)
    bound: dict[int, Load] = field(default_factory=dict)
    num_rows: int = 0
    num_blocks: int = 0
    load: float = 0.0
    """Cost of all requests bound and queued."""


class Router:
    """Queues of requests, one for each replica."""

    def __init__(
        self, num_replicas: int, block_size: int, max_num_seqs: int, groups: tuple[PageGroup, ...] = (PageGroup(),)
    ) -> None:
        """`max_num_seqs`, `groups` of layers: those of each replica. Replicas have to `join` first."""
        self._block_size, self._groups = block_size, groups
        self._most_rows = max_num_seqs + max(2, max_num_seqs // _SPARE_ROWS)
        self._replicas = [_Replica() for _ in range(num_replicas)]
        self._homeless = _Replica()
        """Stands for a replica while none is there that can compute some requests, which wait in its queue."""
        self._mean_output: float | None = None

    @property
    def numbers(self) -> list[int]:
        """Replicas that are there."""
        return [number for number, replica in enumerate(self._replicas) if replica.is_there]

    @property
    def num_waiting(self) -> int:
        """Number of requests that are not bound to a replica."""
        return sum(len(replica.queue) for replica in (self._homeless, *self._replicas))

    def join(self, number: int, num_blocks: int, lacks: Iterable[str] = ()) -> None:
        """Adds a replica with an empty cache of `num_blocks` blocks, and without the adapters that it `lacks`."""
        longest = capacity_tokens(self._groups, num_blocks, self._block_size) // self._block_size
        most = int(_SPARE_BLOCKS * num_blocks)
        self._replicas[number] = _Replica(HeldPrefixes(min(longest, num_blocks)), most, True, {*lacks})
        homeless, self._homeless = self._homeless, _Replica()
        for load in homeless.queue:
            self.add(load)

    def leave(self, number: int) -> list[int]:
        """Removes a replica. Its queue moves to the others. Returns the requests that were bound to it."""
        replica = self._replicas[number]
        bound, queued = list(replica.bound), replica.queue
        self._replicas[number] = _Replica()
        for load in queued:
            self.add(load)
        return bound

    def add(self, load: Load, first: bool = False) -> None:
        """Queues a request; `first`: in front of all others there, because it had begun."""
        load.num_blocks = self._expected_blocks(load)
        there = [replica for replica in self._replicas if replica.is_there and load.adapter not in replica.lacks]
        costs = [(self._cost(replica, load), replica) for replica in there or [self._homeless]]
        load.cost, best = min(costs, key=lambda one: one[0] + _LOAD_WEIGHT * one[1].load)
        best.load += load.cost
        (best.queue.appendleft if first else best.queue.append)(load)
        best.held.touch(load.hashes)

    def _expected_output(self, load: Load) -> int:
        """Expected tokens of each of its completions: the mean of outputs so far, at most its own limit."""
        most = load.max_output_tokens
        return most if self._mean_output is None else min(most, int(self._mean_output) + 1)

    def _expected_blocks(self, load: Load) -> int:
        """Expected blocks when its completions end; they share those of the prompt."""
        output = self._expected_output(load)
        whole = row_blocks(self._groups, load.num_prompt_tokens + output, self._block_size)
        return whole + (load.num_rows - 1) * row_blocks(self._groups, output, self._block_size)

    def _cost(self, replica: _Replica, load: Load) -> float:
        hits = replica.held.num_hits(load.hashes) * self._block_size
        return max(1, load.num_prompt_tokens - hits) + DECODE_COST * load.num_rows * self._expected_output(load)

    def bind(self) -> list[tuple[int, int]]:
        """Binds requests to replicas with room; returns (replica, request) in the order in which to send them."""
        bound: list[tuple[int, int]] = []
        if not any(replica.queue for replica in self._replicas):
            return bound
        for number, replica in enumerate(self._replicas):
            while replica.is_there and (victim := self._queue_for(replica)) is not None:
                load = victim.queue[0]
                if not self._has_room(replica, load):
                    break
                victim.queue.popleft()
                if victim is not replica:
                    victim.load -= load.cost
                    load.cost = self._cost(replica, load)
                    replica.load += load.cost
                    replica.held.touch(load.hashes)
                replica.bound[load.request_id] = load
                replica.num_rows += load.num_rows
                replica.num_blocks += load.num_blocks
                bound.append((number, load.request_id))
        return bound

    def _queue_for(self, replica: _Replica) -> _Replica | None:
        """Replica whose first request this one should take: itself if it has a queue, else the most loaded one without
        room, if that helps."""
        if replica.queue:
            return replica
        full = [
            other for other in self._replicas
            if other.queue and other.queue[0].adapter not in replica.lacks and not self._has_room(other, other.queue[0])
        ]  # fmt: skip
        victim = max(full, key=lambda other: other.load, default=None)
        if victim is None or not replica.bound:
            return victim
        return victim if replica.load + self._cost(replica, victim.queue[0]) < victim.load else None

    def _has_room(self, replica: _Replica, load: Load) -> bool:
        if not replica.bound:
            return True
        rows, blocks = replica.num_rows + load.num_rows, replica.num_blocks + load.num_blocks
        return rows <= self._most_rows and blocks <= replica.most_blocks

    def finish(self, number: int, request_id: int, num_output_tokens: int, hashes: Iterable[bytes] = ()) -> None:
        """Notes the end of a bound request. `hashes`: of the blocks that it leaves in the replica's cache."""
        replica = self._replicas[number]
        load = replica.bound.pop(request_id)
        replica.load -= load.cost
        replica.num_rows -= load.num_rows
        replica.num_blocks -= load.num_blocks
        replica.held.touch(hashes)
        mean, output = self._mean_output, num_output_tokens / load.num_rows
        self._mean_output = output if mean is None else mean + _MEAN_WEIGHT * (output - mean)

    def withdraw(self, request_id: int) -> None:
        """Removes a request that is not bound to a replica."""
        for replica in (self._homeless, *self._replicas):
            for load in replica.queue:
                if load.request_id == request_id:
                    replica.queue.remove(load)
                    replica.load -= load.cost
                    return

    def note_adapters(self, number: int, held: Iterable[str]) -> None:
        """Notes that a replica has these adapters."""
        self._replicas[number].lacks.difference_update(held)

    def stranded(self) -> list[int]:
        """Requests that no replica can compute, where there is any."""
        return [load.request_id for load in self._homeless.queue] if self.numbers else []

    def forget_cached(self) -> None:
        """Notes that the replicas' prefix caches were emptied."""
        for replica in self._replicas:
            replica.held.clear()
