"""The scheduler under arbitrary traffic: no deadlock, no lost block, every limit kept, every output exact.

The properties themselves are asserted by Simulation at each step; the machine here only thinks up what could happen.
"""

import random
from typing import Any
from unittest import TestCase

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulation import Request, Simulation, Watcher

from nanovllm.engine.sequence import SequenceStatus
from nanovllm.wire.state import PageGroup

BLOCK_SIZE = 4
SHARED_PREFIXES = [[], [1] * 8, [1] * 16, [1] * 5, [2, 3] * 6, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]]

prompts = st.builds(
    lambda prefix, tail: (prefix + tail) or [0],
    st.sampled_from(SHARED_PREFIXES),
    st.lists(st.integers(0, 3), max_size=9),
)
options = st.fixed_dictionaries(
    {
        "max_num_seqs": st.sampled_from([1, 2, 3, 5, 8]),
        "max_num_batched_tokens": st.sampled_from([1, 2, 3, 4, 7, 12, 64]),
        "max_num_partial_prefills": st.integers(1, 3),
        "max_long_partial_prefills": st.integers(1, 2),
        "long_prefill_token_threshold": st.sampled_from([None, 0, 1, 3, 6, 10]),
        "max_num_prefill_tokens_with_decodes": st.sampled_from([None, 1, 3, 8]),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "disable": st.sampled_from([(), ("lookahead",)]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    simulation: Simulation
    highest_num_blocks = 14
    tokens_per_step = st.just(1)
    groups = st.just((PageGroup(),))
    num_lines = st.just(0)

    @initialize(data=st.data(), chosen=options)
    def start(self, data: Any, chosen: dict[str, Any]) -> None:
        several = data.draw(self.tokens_per_step, "tokens_per_step")
        choose = random.Random(data.draw(st.integers(0, 99), "gains"))
        groups = data.draw(self.groups, "groups")
        least = sum(group.num_tables for group in groups)
        self.simulation = Simulation(
            num_blocks=data.draw(st.integers(least, least * self.highest_num_blocks), "num_blocks"),
            groups=groups,
            num_lines=data.draw(self.num_lines, "num_lines"),
            block_size=BLOCK_SIZE,
            depth=data.draw(st.integers(1, 2), "depth"),
            tokens_per_step=several,
            gain=(lambda most: choose.randint(1, most)) if several > 1 else None,
            **chosen,
        )

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 14),
        stop=st.sampled_from([frozenset(), frozenset(), frozenset({0, 1, 2})]),
        seed=st.integers(-(2**63), 2**63 - 1) | st.just(0),
        watcher=st.none() | st.builds(Watcher, st.tuples(st.integers(0, 15), st.integers(0, 15)), st.booleans()),
        salt=st.sampled_from([None, None, "a"]),
    )
    def add(
        self, prompt: list[int], max_tokens: int, stop: frozenset[int], seed: int, watcher: Watcher | None = None,
        salt: str | None = None,
    ) -> None:  # fmt: skip
        longest = self.simulation.scheduler.capacity_tokens
        self.simulation.add(prompt[:longest], max_tokens, stop, seed=seed, watcher=watcher, salt=salt)

    @rule(prompt=prompts, count=st.integers(2, 5))
    def add_equal_ones(self, prompt: list[int], count: int) -> None:
        for _ in range(count):
            self.add(prompt, 6, frozenset(), 0)

    @precondition(lambda self: len(self.simulation.pipeline) < self.simulation.depth)
    @rule()
    def launch(self) -> None:
        self.simulation.launch()

    @precondition(lambda self: self.simulation.pipeline)
    @rule()
    def collect(self) -> None:
        self.simulation.collect()

    @rule(count=st.integers(1, 6))
    def several_steps(self, count: int) -> None:
        for _ in range(count):
            self.simulation.step()

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        live = [r for r in self.simulation.requests.values() if r.seq.status is not SequenceStatus.FINISHED]
        candidates = live or list(self.simulation.requests.values())  # aborting a finished one changes nothing
        request: Request = data.draw(st.sampled_from(candidates))
        self.simulation.abort(request)

    @rule()
    def replace_weights(self) -> None:
        self.simulation.replace_weights()

    @rule(keeps=st.booleans())
    def forget_cached(self, keeps: bool) -> None:
        scheduler = self.simulation.scheduler
        (scheduler.keep_all if keeps else scheduler.reset_prefix_cache)()
        self.simulation.check()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.run_to_end()


class RoomySchedulerMachine(SchedulerMachine):
    """Memory for several requests, so that the limits on rows and tokens are what is met."""

    highest_num_blocks = 60


class SeveralTokensMachine(SchedulerMachine):
    """Rows that decode gain 1 to k tokens in a step, as a device pleases: with every k the same outputs."""

    highest_num_blocks = 20
    tokens_per_step = st.integers(2, 9)


class WindowsMachine(SchedulerMachine):
    """Layers that need the last tokens alone: rows leave blocks behind, others take them, and hits end in windows."""

    highest_num_blocks = 12
    groups = st.sampled_from(
        [
            (PageGroup(), PageGroup(6)),
            (PageGroup(), PageGroup(4, num_tables=3)),
            (PageGroup(num_tables=2), PageGroup(2), PageGroup(9, num_tables=2)),
            (PageGroup(5),),
            (PageGroup(3, num_tables=2), PageGroup(11)),
        ]
    )
    tokens_per_step = st.sampled_from([1, 1, 1, 4])


class LinesMachine(SchedulerMachine):
    """Layers that remember a state of fixed size: in few lines and many, kept for others, waited for, taken over; by
    rows that gain several tokens in a step, too."""

    highest_num_blocks = 40
    groups = st.sampled_from([(PageGroup(),), (PageGroup(),), (PageGroup(), PageGroup(6))])
    num_lines = st.sampled_from([1, 2, 3, 5, 8, 20])
    tokens_per_step = st.sampled_from([1, 1, 2, 4, 9])


def examples_of(machine: type[SchedulerMachine]) -> type[TestCase]:
    """Half of the usual number: five machines draw of the same rules."""
    found: type[TestCase] = machine.TestCase
    found.settings = settings(max_examples=settings.default.max_examples // 2)
    return found


TestLines = examples_of(LinesMachine)
TestTinyMemory = examples_of(SchedulerMachine)
TestSeveralTokens = examples_of(SeveralTokensMachine)
TestWindows = examples_of(WindowsMachine)
TestRoomyMemory = examples_of(RoomySchedulerMachine)
