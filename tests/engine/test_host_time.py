"""Host time of a step: what waits behind it costs nothing."""

import time
from collections import deque
from statistics import median

import pytest
from simulation import make_sequence

from nanovllm.config import EngineConfig
from nanovllm.engine.schedule import Schedule
from nanovllm.engine.scheduler import Scheduler
from nanovllm.wire.state import StateSize

NUM_ROWS = 256


def schedule_seconds(num_waiting: int) -> float:
    """Median CPU seconds of schedule() where more wait than fit, so that every step looks ahead."""
    config = EngineConfig("model", max_num_seqs=NUM_ROWS, max_num_batched_tokens=16384, enable_prefix_caching=False)
    scheduler = Scheduler(config, StateSize(6 * NUM_ROWS, 128))
    for number in range(NUM_ROWS + num_waiting):
        prompt = [number % 1000] * (100 + 7 * number % 900)
        longest = 300 + number * 11 % 700
        scheduler.add(make_sequence(number, prompt, longest, stop=frozenset({0}), capacity=scheduler.capacity_tokens))
    launched: deque[Schedule] = deque()
    seconds, num_tight = [], 0
    for step in range(250):
        begin = time.thread_time()
        schedule = scheduler.schedule()
        seconds.append(time.thread_time() - begin)
        num_tight += len(scheduler.running) < NUM_ROWS
        if schedule is not None:
            launched.append(schedule)
        while len(launched) > 1 or (launched and schedule is None):
            done = launched.popleft()
            scheduler.apply(done, [0 if (step + row) % 997 == 0 else 17 for row in range(done.num_sample_rows)])
    assert num_tight > 100 and len(scheduler.waiting) > num_waiting // 2, "memory is what they wait for"
    return median(seconds[50:])


def test_a_step_takes_as_long_however_many_wait() -> None:
    """CPU time of this thread; a run may be repeated, as others on the machine take of its caches."""
    assert any(schedule_seconds(8 * NUM_ROWS) < 2 * schedule_seconds(NUM_ROWS) for _ in range(3))


@pytest.mark.parametrize("block_size", [16, 128])
def test_a_long_row_that_waits_is_looked_up_at_once_in_later_steps(block_size: int) -> None:
    """Memory lacks for the rest of a row of which 100,000 tokens are cached, and every step asks whether it fits."""
    prompt = [number % 1000 for number in range(100_000)]
    config = EngineConfig("model", max_num_seqs=64, max_model_len=1 << 18, disable=("lookahead",))
    scheduler = Scheduler(config, StateSize(160_000 // block_size, block_size))

    def step() -> float:
        begin = time.thread_time()
        schedule = scheduler.schedule()
        seconds = time.thread_time() - begin
        assert schedule is not None
        scheduler.apply(schedule, [17] * schedule.num_sample_rows)
        return seconds

    scheduler.add(make_sequence(0, [*prompt, 5], 1))
    while scheduler.has_unfinished():
        step()
    for number in range(1, 9):
        scheduler.add(make_sequence(number, [number] * 3000, 3000))
    while scheduler.waiting or not all(seq.last_token_on_device for seq in scheduler.running):
        step()
    num_left = scheduler.memory.num_free_blocks * block_size - len(prompt)
    scheduler.add(make_sequence(9, [*prompt, *[9] * (num_left + block_size)], 100))
    first, *later = [step() for _ in range(101)]
    assert len(scheduler.waiting) == 1, "it waits"
    assert median(later) < first / 20
