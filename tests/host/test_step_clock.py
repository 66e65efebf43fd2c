"""The next step is scheduled shortly before the present one ends, never long after."""

from nanovllm.engine.schedule import Schedule
from nanovllm.host.step_clock import StepClock


class Device:
    """Steps that follow each other; time passes only here."""

    def __init__(self) -> None:
        self.time = self.end = 0.0
        self.clock = StepClock(lambda: self.time, self.sleep)
        self.clock.note(None)

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def step(self, seconds: float, rows: int = 20, prompt_tokens: int = 0) -> tuple[float, float]:
        """Launches one more step of so many seconds, and collects the one before; returns how long before its end
        the host had slept for it, and for how long the device had nothing to do."""
        self.clock.wait(lambda: self.time >= self.end)
        early, idle = self.end - self.time, max(0.0, self.time - self.end)
        self.time = max(self.time, self.end)
        self.end = self.time + seconds
        self.clock.note(Schedule(num_decode_rows=rows, host_token_ids=[0] * prompt_tokens))
        return early, idle


def test_waits_until_shortly_before_the_end() -> None:
    device = Device()
    for number in range(50):
        early, idle = device.step(0.005)
        assert not idle and (number < 2 or early < 0.0015)


def test_steps_that_become_shorter_cost_one_short_pause() -> None:
    device = Device()
    for _ in range(10):
        device.step(0.010)
    idle = [device.step(0.005)[1] for _ in range(20)]
    assert sum(idle) <= 0.0002


def test_steps_that_vary_leave_no_pause() -> None:
    device = Device()
    for number in range(100):
        _, idle = device.step(0.005 + 0.0005 * (number % 3))
        assert not idle


def test_steps_with_prompts_are_followed_at_once() -> None:
    device = Device()
    for _ in range(10):
        device.step(0.005)
    device.step(0.020, prompt_tokens=100)
    early, _ = device.step(0.005)
    assert early > 0.0199
    assert device.step(0.005, rows=200)[0] < 0.0015  # of the 20 rows before it
    early, _ = device.step(0.005)
    assert early > 0.0049  # nothing is known of 200 rows
