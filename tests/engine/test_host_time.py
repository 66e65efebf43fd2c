"""What a steady decode step costs the host. Run alone for figures: scripts/test tests/engine/test_host_time.py -s"""

from simulation import make_sequence
from timing import seconds

from nanovllm.config import EngineConfig
from nanovllm.engine.scheduler import Scheduler

NUM_ROWS = 256
SECONDS_PER_STEP = 0.005
"""A bound that also holds on a busy machine; quiet ones take well below 0.25 ms."""


def test_schedule_pack_and_apply_a_steady_decode_step() -> None:
    """256 rows of ~500 tokens, blocks of 128, one step ahead of its results: as on a GPU."""
    scheduler = Scheduler(EngineConfig("model", max_num_seqs=NUM_ROWS), num_blocks=40_000, block_size=128)
    for request_id in range(NUM_ROWS):
        prompt = [request_id] * (300 + 7 * request_id % 400)
        scheduler.add(make_sequence(request_id, prompt, max_tokens=10_000, capacity=scheduler.capacity_tokens))
    tokens = [17] * NUM_ROWS
    launched = scheduler.schedule()
    while launched.num_decode_rows < NUM_ROWS:
        following = scheduler.schedule()
        scheduler.apply(launched, tokens[: launched.num_sample_rows])
        launched = following

    def step() -> None:
        nonlocal launched
        following = scheduler.schedule()
        following.pack(NUM_ROWS)
        scheduler.apply(launched, tokens[: launched.num_sample_rows])
        launched = following

    times = seconds(step, rounds=400, warmup=20)
    print(f"{times[200] * 1e6:.0f} us a step, {times[396] * 1e6:.0f} in the worst of 100")
    scheduler.check_integrity()
    assert times[200] < SECONDS_PER_STEP
