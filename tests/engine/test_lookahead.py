"""Admission that looks ahead: what it predicts against the future itself, and what it saves."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Simulation

from nanovllm.engine.lookahead import Forecast

BLOCK_SIZE = 4
STOP = frozenset({0})


def peak_by_the_clock(rows: list[tuple[int, int]]) -> int:
    """Maximum tokens held at once by rows of (held, to come), token by token, with half a block for each: a row keeps
    its own, and counts on, for two steps more."""
    return max(
        sum(held + now + BLOCK_SIZE // 2 for held, to_come in rows if to_come + 2 >= now)
        for now in range(max(to_come for _, to_come in rows) + 3)
    )


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=8),
    more=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), min_size=1, max_size=3),
    spare=st.integers(-1, 1),
)
def test_a_row_is_added_where_the_future_has_room(
    rows: list[tuple[int, int]], more: list[tuple[int, int]], spare: int
) -> None:
    """As many blocks as the last row's peak needs, one less or one more."""
    held, to_come = np.array(rows, np.int64).reshape(-1, 2).T
    num_blocks = -(-peak_by_the_clock([*rows, *more]) // BLOCK_SIZE) + spare
    forecast = Forecast(num_blocks, BLOCK_SIZE, held, to_come)
    for row in more:
        fits = peak_by_the_clock([*rows, row]) <= num_blocks * BLOCK_SIZE
        assert forecast.add_if_it_fits(*row) == fits
        rows = [*rows, row] if fits else rows


def crowd(max_tokens: int, stop: frozenset[int], ahead: bool) -> Simulation:
    options = {"max_num_seqs": 16, "enable_prefix_caching": False, "disable": () if ahead else ("lookahead",)}
    simulation = Simulation(num_blocks=30, block_size=BLOCK_SIZE, **options)
    for number in range(60):
        simulation.add([number] * (1 + number * 7 % 13), max_tokens - number * 5 % 11, stop, seed=number)
    return simulation


def test_known_lengths_are_not_preempted() -> None:
    preemptions = {}
    for ahead in (True, False):
        simulation = crowd(24, frozenset(), ahead)
        simulation.run_to_end()
        preemptions[ahead] = simulation.num_preemptions
    assert preemptions[True] == 0 and preemptions[False] > 40


def test_memory_is_used_where_lengths_are_not_known() -> None:
    """Outputs of 16 tokens, of 60 that they may have: few are preempted, as past outputs foretell, and few wait without
    need."""
    preemptions, running = {}, {}
    for ahead in (True, False):
        simulation = crowd(60, STOP, ahead)
        counts = []
        while simulation.scheduler.has_unfinished():
            simulation.step()
            counts.append(len(simulation.scheduler.running))
        simulation.run_to_end()
        preemptions[ahead], running[ahead] = simulation.num_preemptions, sum(counts) / len(counts)
    assert preemptions[True] < 5 and preemptions[False] > 40
    assert running[True] > 0.7 * running[False]


def test_a_prefix_that_many_share_is_counted_once() -> None:
    simulation = Simulation(num_blocks=27, block_size=BLOCK_SIZE, depth=1, max_num_seqs=8)
    shared = [1] * 60
    simulation.add(shared, max_tokens=8)
    simulation.step()
    for number in range(3):
        simulation.add([*shared, number + 5], max_tokens=8)
    for _ in range(3):
        simulation.step()
    assert len(simulation.scheduler.running) == 4, "15 blocks of the prefix, and two of each"
    simulation.run_to_end()
    assert simulation.num_preemptions == 0
