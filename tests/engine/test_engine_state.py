"""One state of an engine: calls change it, its loop and its book go by it, answers carry copies of it."""

from collections import deque
from typing import Any

from fake_executor import fake_engine

from nanovllm.engine.prompt import Prompt
from nanovllm.engine.step import Step
from nanovllm.host import wire
from nanovllm.host.engine_host import EngineHost


class Driver:
    """Sends frames one by one, each as soon as the host looks for some, until a request has ended."""

    def __init__(self, frames: list[wire.Down]) -> None:
        self.frames, self.said = deque(frames), list[Any]()
        self.looks = 0

    def next(self, seconds: float) -> wire.Down | None:
        self.looks += 1
        if self.looks > 100 or any(isinstance(frame, Step) and frame.done for frame in self.said):
            raise EOFError
        return self.frames.popleft() if self.looks % 2 and self.frames else None

    def wake(self) -> None: ...


def test_a_host_rests_until_nothing_keeps_it_from_computing() -> None:
    calls = [("pause", {"mode": "keep"}), ("begin_update", {}), ("resume", {}), ("finish_update", {})]
    pause, *others = [wire.Call(number, *call) for number, call in enumerate(calls)]
    driver = Driver([pause, wire.Add.of(0, Prompt([1, 2, 3]), {"max_tokens": 2, "ignore_eos": True}), *others])
    EngineHost(fake_engine(num_kvcache_blocks=8, max_num_seqs=4), driver.said.append, driver).run()
    states = [frame.state for frame in driver.said if isinstance(frame, wire.Answer)]
    assert [(state.is_paused, state.lacks_weights, state.weight_version) for state in states] == [
        (True, False, 0), (True, True, 0), (False, True, 0), (False, False, 1),
    ]  # fmt: skip
    last = max(index for index, frame in enumerate(driver.said) if isinstance(frame, wire.Answer))
    first = next(index for index, frame in enumerate(driver.said) if isinstance(frame, Step) and frame.rows)
    assert first > last, "nothing was computed before the weights were there"
    [end] = [end for frame in driver.said if isinstance(frame, Step) for end in frame.finishes]
    assert end.weight_versions == [(1, 0, 2)]
