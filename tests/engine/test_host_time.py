"""Host time of a step: what waits behind it costs nothing."""

import time
from collections import deque
from statistics import median

from simulation import make_sequence

from nanovllm.config import EngineConfig
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step_plan import StepPlan
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
    launched: deque[StepPlan] = deque()
    seconds, num_tight = [], 0
    for step in range(250):
        begin = time.thread_time()
        plan = scheduler.schedule()
        seconds.append(time.thread_time() - begin)
        num_tight += len(scheduler.running) < NUM_ROWS
        if plan is not None:
            launched.append(plan)
        while len(launched) > 1 or (launched and plan is None):
            done = launched.popleft()
            scheduler.apply(done, [0 if (step + row) % 997 == 0 else 17 for row in range(done.num_sample_rows)])
    assert num_tight > 100 and len(scheduler.waiting) > num_waiting // 2, "memory is what they wait for"
    return median(seconds[50:])


def test_a_step_takes_as_long_however_many_wait() -> None:
    """CPU time of this thread; a run may be repeated, as others on the machine take of its caches."""
    assert any(schedule_seconds(8 * NUM_ROWS) < 2 * schedule_seconds(NUM_ROWS) for _ in range(3))
