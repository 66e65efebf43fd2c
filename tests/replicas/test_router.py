"""The router over real schedulers, with steps that compute nothing: hits, balance, no idling."""

import random
from collections.abc import Callable

from nanovllm.config import EngineConfig
from nanovllm.engine.prefix_keys import prefix_keys
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.host.router import Load, Router
from nanovllm.outputs import RequestMetrics
from nanovllm.sampling_params import SamplingParams
from nanovllm.wire.state import PageGroup, StateSize
from nanovllm.wire.step import SlotConstants

BLOCK = 128
Work = list[tuple[list[int], int]]  # prompt, tokens to generate


class Fleet:
    """Replicas that step in turn, and requests that come as others end."""

    def __init__(
        self, count: int, num_blocks: int, max_num_seqs: int, route: Callable[[int], int] | None,
        groups: tuple[PageGroup, ...] = (PageGroup(),),
    ) -> None:  # fmt: skip
        """`route`: request number to replica, in place of the router."""
        config = EngineConfig("model", max_num_seqs=max_num_seqs, max_model_len=1 << 17)
        self.schedulers = [Scheduler(config, StateSize(num_blocks, BLOCK, groups)) for _ in range(count)]
        self.router = Router(count, BLOCK, max_num_seqs, groups)
        for number in range(count):
            self.router.join(number, num_blocks)
        self.route, self.work, self.computed = route, [0] * count, [0] * count
        self.idle_beside_a_queue = self.most_waiting = 0

    def run(self, work: Work, at_once: int) -> None:
        waiting = list(enumerate(work))[::-1]
        live: dict[int, tuple[int, Sequence]] = {}
        while waiting or live or self.router.num_waiting:
            while waiting and len(live) + self.router.num_waiting < at_once:
                number, (prompt, count) = waiting.pop()
                if self.route is not None:
                    live[number] = self._start(self.route(number), number, work)
                else:
                    self.router.add(Load(number, prefix_keys(prompt, BLOCK), len(prompt), count))
            for replica, key in self.router.bind() if self.route is None else ():
                assert isinstance(key, int)
                live[key] = self._start(replica, key, work)
            if self.router.num_waiting:
                self.idle_beside_a_queue += sum(not each.has_unfinished() for each in self.schedulers)
            for replica, scheduler in enumerate(self.schedulers):
                if (schedule := scheduler.schedule()) is None:
                    continue
                self.most_waiting = max(self.most_waiting, len(scheduler.waiting))
                self.work[replica] += schedule.num_tokens
                self.computed[replica] += schedule.num_prefill_tokens
                for seq, _ in scheduler.apply(schedule, [7] * schedule.num_sample_rows):
                    if seq.ending is not None:
                        del live[seq.request_id]
                        if self.route is None:
                            hashes = prefix_keys(seq.token_ids[:-1], BLOCK)
                            self.router.finish(replica, seq.request_id, len(seq.output_token_ids), hashes)

    def _start(self, replica: int, number: int, work: Work) -> tuple[int, Sequence]:
        prompt, count = work[number]
        seq = Sequence(
            number, Prompt(prompt), SamplingParams(max_tokens=count), constants=SlotConstants(0, 0),
            stop_token_ids=frozenset(), max_total_tokens=len(prompt) + count, metrics=RequestMetrics(0.0),
        )  # fmt: skip
        self.schedulers[replica].add(seq)
        return replica, seq

    @property
    def hits(self) -> int:
        return sum(scheduler.num_prompt_cached_tokens for scheduler in self.schedulers)


def shared_prefixes(count: int, num_prefixes: int = 64, length: int = 2048) -> Work:
    """Prompts of a shared beginning and 100 tokens of their own, as popular as chance wills."""
    chance = random.Random(1)
    prefixes = [[chance.randrange(1000) for _ in range(length)] for _ in range(num_prefixes)]
    return [
        (chance.choice(prefixes) + [chance.randrange(1000) for _ in range(100)], chance.randrange(20, 60))
        for _ in range(count)
    ]


def test_shared_prefixes_meet_at_one_replica() -> None:
    """At least 0.9 of the hits of one engine with all the memory, replicas within 15 % of each other; round robin has
    far fewer hits, since no replica holds all prefixes."""
    work, blocks = shared_prefixes(1200), 480
    one = Fleet(1, 4 * blocks, 64, lambda number: 0)
    routed = Fleet(4, blocks, 16, None)
    in_turn = Fleet(4, blocks, 16, lambda number: number % 4)
    for fleet in (one, routed, in_turn):
        fleet.run(work, at_once=64)
    assert routed.hits >= 0.9 * one.hits
    assert in_turn.hits < 0.8 * routed.hits
    mean = sum(routed.work) / 4
    assert all(abs(each - mean) <= 0.15 * mean for each in routed.work), routed.work


def test_none_idles_while_another_has_a_queue() -> None:
    """Also where all prompts are the same, and so have one home."""
    prompt = list(range(4 * BLOCK))
    fleet = Fleet(4, 200, 8, None)
    fleet.run([(prompt, 10 + n % 90) for n in range(200)], at_once=200)
    assert fleet.idle_beside_a_queue == 0
    assert min(fleet.work) > 0.8 * max(fleet.work)


def test_a_replica_gets_the_rows_that_its_blocks_hold_in_all_tables() -> None:
    """Where windows let one long row fit, a short row takes more of the blocks for each of its tokens."""
    groups = (PageGroup(), PageGroup(window=2 * BLOCK, num_tables=5))
    fleet = Fleet(2, 400, 256, None, groups)
    chance = random.Random(1)
    fleet.run([([chance.randrange(1000) for _ in range(80)], 40) for _ in range(600)], at_once=600)
    assert fleet.idle_beside_a_queue == 0
    assert fleet.most_waiting <= 0.3 * 400 / 6, "rows of one block in each of six tables"


def test_sixty_four_replicas() -> None:
    """256 shared prefixes, 94 requests for each replica: most prefixes are computed by one replica, and none computes
    far more or less than the mean."""
    count, prefixes, length = 6000, 256, 8 * BLOCK
    fleet = Fleet(64, 224, 16, None)
    fleet.run(shared_prefixes(count, prefixes, length), at_once=64 * 16)
    assert fleet.hits >= 0.9 * (count - prefixes) * length
    assert fleet.idle_beside_a_queue == 0
    mean = sum(fleet.work) / 64
    assert all(abs(each - mean) <= 0.25 * mean for each in fleet.work), fleet.work
