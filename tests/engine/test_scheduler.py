"""Each documented behaviour of the scheduler in a small example; Simulation checks limits and texts throughout."""

import sys
from typing import Any

import pytest
from simulation import Simulation, decoding, make_sequence, rows

from nanovllm.engine.prefix_cache import PrefixCache
from nanovllm.engine.row_memory import RowMemory
from nanovllm.engine.sequence import RowPages, RowPrefix, SequenceStatus
from nanovllm.wire.state import PageGroup

# -- one step after another -----------------------------------------------------------------------------------------


def test_a_request_decodes_one_step_ahead_of_its_results() -> None:
    simulation = Simulation()
    request = simulation.add([1, 2, 3], max_tokens=3)
    assert rows(simulation.launch()) == [(0, 0, 3)]
    assert rows(simulation.launch()) == [(0, 3, 1)], "its input is still on the device"
    assert request.gained == []
    assert len(simulation.collect()) == 1
    assert rows(simulation.launch()) == [(0, 4, 1)]
    simulation.collect()
    assert simulation.launch() is None, "the last token that it may have is on its way"
    simulation.run_to_end()
    assert len(request.gained) == 3 and request.seq.ending.reason == "length"


def test_rows_are_decodes_then_prompts_that_finish_then_chunks() -> None:
    simulation = Simulation(depth=1, max_num_batched_tokens=10)
    decoding(simulation, 1)
    simulation.add([1] * 5)
    simulation.add([2] * 20)
    schedule = simulation.step()
    assert rows(schedule) == [(0, 2, 1), (1, 0, 5), (2, 0, 4)]
    assert (schedule.num_decode_rows, schedule.num_sample_rows, schedule.num_tokens) == (1, 2, 10)
    assert schedule.num_prefill_tokens == 9


# -- budgets and limits ---------------------------------------------------------------------------------------------


def test_a_crowd_with_one_long_prefix_comes_in_over_several_steps() -> None:
    """Its block tables together are longer than what a step announces (the simulation checks the packed size)."""
    simulation = Simulation(num_blocks=40, block_size=4, max_num_seqs=12, depth=1)
    prefix = [5] * (4 * 30)
    simulation.add([*prefix, 1], max_tokens=1)
    simulation.run_to_end()
    requests = [simulation.add([*prefix, n], max_tokens=2) for n in range(8)]
    first = simulation.step()
    assert 1 <= len(first.new_slots) < len(requests)
    simulation.run_to_end()
    assert all(request.seq.num_cached_tokens == len(prefix) for request in requests)


@pytest.mark.parametrize(
    ("cap", "waiting", "ranks", "expected"),
    [
        *((6, 100, 1, 6), (1024, 2000, 1, 1024 - 64), (None, 288, 1, 288), (None, 289, 1, 256 - 32)),
        *((None, 1025, 1, 1024 - 64), (None, 40000, 1, 2048 - 64), (None, 40000, 2, 4096 - 64)),
    ],
)
def test_prompt_tokens_beside_decodes_are_capped(cap: int | None, waiting: int, ranks: int, expected: int) -> None:
    """By default near 1,024, or near the power of two below an eighth of the prompt tokens that wait, at most 2048 or,
    on several ranks, 4096: whole tiles, with the decodes and their padding. Fewer where not much waits, unless they
    are the last; not at a long prompt's end."""
    options = {"max_num_prefill_tokens_with_decodes": cap, "long_prefill_token_threshold": 0}
    simulation = Simulation(depth=1, num_blocks=600, block_size=128, tensor_parallel_size=ranks, **options)
    decoding(simulation, 2)
    simulation.add([1] * waiting)
    schedule = simulation.step()
    assert (schedule.num_decode_rows, schedule.num_prefill_tokens) == (2, expected)
    if waiting == 2000:
        assert simulation.step().num_prefill_tokens == expected
    if waiting == 1025:
        assert simulation.step().num_prefill_tokens == 1025 - expected


FIRST_STEPS: dict[str, tuple[dict[str, int], list[int], list[list[tuple[int, int, int]]]]] = {
    "a prompt longer than the budget comes in chunks": (
        {"max_num_batched_tokens": 8}, [20], [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 4)]]),
    "without decodes prompts get the whole budget": (
        {"max_num_prefill_tokens_with_decodes": 1, "long_prefill_token_threshold": 0}, [100], [[(0, 0, 100)]]),
    "one prompt alone may be half computed": (
        {"max_num_batched_tokens": 16, "max_num_partial_prefills": 1, "long_prefill_token_threshold": 8},
        [30, 7, 7], [[(1, 0, 7), (0, 0, 8)]]),
    "two prompts may": (
        {"max_num_batched_tokens": 16, "max_num_partial_prefills": 2, "long_prefill_token_threshold": 8},
        [30, 7, 7], [[(1, 0, 7), (0, 0, 8), (2, 0, 1)]]),
    "a short prompt overtakes a long one where enough long ones are in progress": (
        {"max_num_batched_tokens": 10, "long_prefill_token_threshold": 4},
        [30, 30, 3, 3], [[(2, 0, 3), (3, 0, 3), (0, 0, 4)]]),
    "long prompts are in progress together where no short one waits": (
        {"max_num_batched_tokens": 40, "long_prefill_token_threshold": 4}, [30, 30], [[(0, 0, 30), (1, 0, 10)]]),
}  # fmt: skip
"""Options, lengths of prompts that come at once, and rows of the first steps."""


@pytest.mark.parametrize("name", FIRST_STEPS)
def test_first_steps(name: str) -> None:
    options, lengths, expected = FIRST_STEPS[name]
    simulation = Simulation(depth=1, **options)
    for value, length in enumerate(lengths):
        simulation.add([value] * length, max_tokens=1)
    assert [rows(simulation.step()) for _ in expected] == expected
    simulation.run_to_end()


def test_a_long_prompt_that_was_queued_first_begins_first_whatever_its_number() -> None:
    """Numbers follow the prompts of a batch, which generate() queues in another order."""
    scheduler = Simulation(max_num_batched_tokens=16, long_prefill_token_threshold=8, max_num_seqs=1).scheduler
    for number, length in ((3, 10), (1, 2), (2, 9), (0, 3)):
        scheduler.add(make_sequence(number, [1] * length, max_tokens=1))
    begun = []
    while (schedule := scheduler.schedule()) is not None:
        begun += [seq.request_id for seq in schedule.new_slots]
        scheduler.apply(schedule, [0] * schedule.num_sample_rows)
    assert begun == [3, 1, 2, 0]


def test_long_prompts_do_not_hold_back_short_ones_where_decodes_cap_the_budget_below_the_threshold() -> None:
    simulation = Simulation(num_blocks=1000, block_size=16, depth=1, max_num_prefill_tokens_with_decodes=16)
    decoding(simulation, 1, max_tokens=10_000)
    simulation.add([1] * 6000)
    for _ in range(3):
        simulation.step()
    short = simulation.add([2] * 30)
    for _ in range(8):
        simulation.step()
    assert short.gained, "a short prompt of two steps' budget waits for a long one of hundreds"


def test_a_short_prompt_in_progress_gets_on_beside_a_long_one() -> None:
    """Also when no further short prompt waits behind it."""
    simulation = Simulation(num_blocks=1000, depth=1, max_num_batched_tokens=16, long_prefill_token_threshold=20)
    simulation.add([1] * 2000)
    simulation.step()
    short = simulation.add([2] * 20, max_tokens=1)
    for _ in range(5):
        simulation.step()
    assert short.gained


# -- prefix cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "is_caching", "cached"),
    [(10, True, 8), (8, True, 7), (10, False, 0)],
    ids=["whole blocks", "all but the last token, where it samples", "switched off"],
)
def test_a_second_request_computes_only_what_is_not_cached(length: int, is_caching: bool, cached: int) -> None:
    simulation = Simulation(block_size=4, enable_prefix_caching=is_caching)
    prompt = [*range(1, length + 1)]
    simulation.add(prompt)
    simulation.run_to_end()
    again = simulation.add(prompt)
    assert rows(simulation.launch()) == [(1, cached, length - cached)]
    assert again.seq.num_prompt_cached_tokens == cached
    simulation.run_to_end()


@pytest.mark.parametrize(("num_output", "cached"), [(10, 12), (9, 8)], ids=["whole blocks", "but for the last token"])
def test_outputs_are_hits_too(num_output: int, cached: int) -> None:
    """But for the last token, which is never computed, and so no block that it fills."""
    simulation = Simulation(block_size=4)
    first = simulation.add([1, 2, 3], max_tokens=num_output)
    simulation.run_to_end()
    followup = simulation.add([1, 2, 3, *first.gained, 0])
    simulation.run_to_end()
    assert followup.seq.num_prompt_cached_tokens == cached


def test_output_that_a_request_comes_with_is_no_hit_of_its_prompt() -> None:
    """As that of a request which another replica had begun: no more tokens of a prompt are cached than it has."""
    simulation = Simulation(block_size=4)
    first = simulation.add([1, 2, 3], max_tokens=10)
    simulation.run_to_end()
    moved = make_sequence(1, [1, 2, 3], max_tokens=10, known_ids=tuple(first.gained[:6]))
    simulation.scheduler.add(moved)
    assert rows(simulation.scheduler.schedule()) == [(1, 8, 1)]
    assert moved.num_prompt_cached_tokens == simulation.scheduler.num_prompt_cached_tokens == 3


def test_a_prompt_is_shared_once_the_step_that_computes_it_is_launched() -> None:
    """Later steps run after it, so its results need not be there; rows of one step cannot share."""
    simulation = Simulation(block_size=4)
    first, second = (simulation.add([1] * 9, max_tokens=2) for _ in range(2))
    assert rows(simulation.launch()) == [(0, 0, 9)]
    third = simulation.add([1] * 9, max_tokens=2)
    simulation.launch()
    assert [r.seq.num_prompt_cached_tokens for r in (first, second, third)] == [0, 8, 8]
    simulation.run_to_end()


# -- equal beginnings are computed once -----------------------------------------------------------------------------


def num_computed(simulation: Simulation) -> int:
    """Steps to the end; returns the prompt tokens that they computed."""
    computed = 0
    while simulation.scheduler.has_unfinished():
        schedule = simulation.step()
        computed += schedule.num_prefill_tokens if schedule is not None else 0
    simulation.run_to_end()
    return computed


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("budget", [4096, 64])
@pytest.mark.parametrize(
    ("block_size", "length", "copies"), [(16, 500, 8), (128, 500, 8), (128, 512, 8), (128, 60, 8), (16, 40, 100)]
)
def test_equal_prompts_are_computed_once(
    depth: int, apart: bool, budget: int, block_size: int, length: int, copies: int
) -> None:
    """At once or a step apart, whole or in chunks, more than a step passes: all but the last few tokens are computed by
    one."""
    simulation = Simulation(num_blocks=400, block_size=block_size, depth=depth, max_num_batched_tokens=budget)
    prompt, computed = [number % 7 for number in range(length)], 0
    for _ in range(copies):
        simulation.add(prompt, max_tokens=3)
        if apart:
            schedule = simulation.step()
            computed += schedule.num_prefill_tokens if schedule is not None else 0
    computed += num_computed(simulation)
    few = length % block_size if 0 < length % block_size <= min(16, block_size // 2) else 1
    assert computed == length + (copies - 1) * few


def test_prompts_that_part_within_a_block_share_up_to_there() -> None:
    """Four answers to one question; the first of them has ended when the others come, or has not."""
    simulation = Simulation(num_blocks=60, block_size=128)
    question = [number % 11 for number in range(1000)]
    for answer in range(4):
        simulation.add([*question, 12, *[answer] * 4], max_tokens=1)
    assert num_computed(simulation) == 1005 + 3 * 4
    simulation.add([*question, 12, *[7] * 4], max_tokens=1)
    assert num_computed(simulation) == 4


def test_groups_of_one_template() -> None:
    """Short prompts that begin alike: what all have in common is computed once, and the rest once for each group."""
    simulation = Simulation(num_blocks=200, block_size=128)
    for number in range(64):
        simulation.add([*range(40), *[50 + number // 8] * 3, *range(20)], max_tokens=2)
    steps = [simulation.launch(), simulation.launch()]
    assert [len(rows(step)) for step in steps] == [1, 7 + 8]
    assert sum(step.num_prefill_tokens for step in steps if step) + num_computed(simulation) == 63 + 7 * 23 + 7 * 8


@pytest.mark.parametrize(("block_size", "num_prompt_tokens"), [(32, 90), (128, 100)])
def test_after_a_reset_nothing_computed_before_is_shared(block_size: int, num_prompt_tokens: int) -> None:
    """Neither whole blocks nor the begun one that the step before the reset wrote."""
    simulation = Simulation(block_size=block_size, max_num_batched_tokens=80, long_prefill_token_threshold=0)
    simulation.add([1] * num_prompt_tokens, max_tokens=20)
    simulation.launch()
    simulation.collect()
    simulation.scheduler.reset_prefix_cache()
    late = simulation.add([1] * num_prompt_tokens)
    simulation.step()
    simulation.step()
    assert late.seq.num_cached_tokens == 0
    simulation.run_to_end()


# -- preemption -----------------------------------------------------------------------------------------------------


def test_a_preempted_request_goes_on_from_its_cached_prefix() -> None:
    simulation = Simulation(num_blocks=6, block_size=4, depth=1, max_num_seqs=2, disable="lookahead")
    simulation.add([1] * 8, max_tokens=9)
    new = simulation.add([2] * 8, max_tokens=16)
    while simulation.num_preemptions == 0:
        simulation.step()
    assert new.seq.status is SequenceStatus.WAITING and new.gained
    while new.seq.status is SequenceStatus.WAITING:
        schedule = simulation.step()
    assert schedule.seqs[-1] is new.seq and schedule.starts[-1] == new.seq.num_cached_tokens == 8
    assert new.seq.num_prompt_cached_tokens == 0, "what preemption finds again is no hit of the prompt"
    simulation.run_to_end()


def test_a_request_has_begun_from_its_first_admission_on() -> None:
    """Also while it waits again: a call that waits for such requests would else not wait for it."""
    simulation = Simulation()
    simulation.add([1, 2])
    assert not simulation.scheduler.has_begun()
    simulation.step()
    simulation.replace_weights()
    assert simulation.scheduler.has_begun() and not simulation.scheduler.running
    simulation.run_to_end()


def test_a_prompt_in_progress_takes_the_memory_that_its_window_lacks_of_a_newer_one() -> None:
    """Else nobody would get on: its blocks for a window come chunk by chunk, and here no row decodes."""
    simulation = Simulation(
        num_blocks=7, block_size=4, groups=(PageGroup(), PageGroup(12)), max_num_batched_tokens=12,
        long_prefill_token_threshold=8, disable="lookahead",
    )  # fmt: skip
    simulation.add([1] * 10, max_tokens=2)
    simulation.add([2], max_tokens=2)
    steps = [rows(simulation.step()) for _ in range(3)]
    assert steps == [[(1, 0, 1), (0, 0, 6)], [(1, 1, 1), (0, 6, 2)], [(0, 8, 1)]]
    assert simulation.num_preemptions == 1
    simulation.run_to_end()


def test_a_step_from_before_a_preemption_makes_no_hits_of_blocks_owned_since() -> None:
    simulation = Simulation(max_num_batched_tokens=12, long_prefill_token_threshold=8)
    prompt = [1] * 20
    simulation.add(prompt)
    assert rows(simulation.launch()) == [(0, 0, 12)]
    simulation.replace_weights()
    simulation.add([2])
    assert rows(simulation.launch()) == [(1, 0, 1), (0, 0, 6)], "the same row again, by less"
    simulation.collect()
    again = simulation.add(prompt)
    assert simulation.scheduler.memory.cache.num_hits(again.seq, 19) == 0
    simulation.run_to_end()


def test_kv_of_former_weights_is_shared_once_it_is_computed_anew() -> None:
    simulation = Simulation(depth=1, block_size=4)
    kept = simulation.add([1] * 9, max_tokens=20)
    simulation.step()
    simulation.scheduler.keep_all()
    simulation.add([1] * 9, max_tokens=1)
    text = make_sequence(2, kept.text_alone(21))
    for expected in (2, 5):  # of the second request; of the first, preempted
        for _ in range(15 if expected == 2 else 2):
            simulation.step()
        assert simulation.scheduler.memory.cache.num_hits(text, 20) == expected
        simulation.replace_weights()


# -- abort ----------------------------------------------------------------------------------------------------------


def test_the_slot_and_blocks_of_an_aborted_request_serve_the_next_at_once() -> None:
    simulation = Simulation(num_blocks=2, block_size=4, max_num_seqs=1)
    first = simulation.add([1] * 5, max_tokens=3)
    second = simulation.add([2] * 5, max_tokens=3)
    simulation.launch()
    simulation.abort(first)
    schedule = simulation.launch()
    assert schedule.seqs == [second.seq], "while the step of the aborted one is still in flight"
    simulation.collect()
    simulation.run_to_end()


# -- who writes what ------------------------------------------------------------------------------------------------


def test_one_part_writes_the_memory_of_a_row_and_one_what_it_may_share(monkeypatch: pytest.MonkeyPatch) -> None:
    writers: dict[type, set[type]] = {RowPages: set(), RowPrefix: set()}

    def assign(part: object, name: str, value: Any) -> None:
        writer = sys._getframe(1).f_locals["self"]
        if writer is not part:  # else it is being made
            writers[type(part)].add(type(writer))
        object.__setattr__(part, name, value)

    for part in writers:
        monkeypatch.setattr(part, "__setattr__", assign)
    simulation = Simulation(num_blocks=16, groups=(PageGroup(), PageGroup(window=6)))
    for last in range(4):
        simulation.add([*range(10), last], max_tokens=12)
    scheduler = simulation.scheduler
    for change in (scheduler.keep_all, scheduler.reset_prefix_cache, scheduler.preempt_all):
        simulation.step()
        change()
    simulation.run_to_end()
    assert writers == {RowPages: {RowMemory}, RowPrefix: {PrefixCache}}
