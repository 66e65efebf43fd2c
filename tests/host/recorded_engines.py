"""Engines of a fleet that do nothing: what is sent to them is recorded."""

from typing import Any

from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.prompt import Prompt
from nanovllm.host import wire
from nanovllm.host.fleet import Fleet

INFO = {"block_size": 16, "num_kvcache_blocks": 64, "page_groups": [(None, 1)], "max_num_seqs": 4, "max_model_len": 256}
PROMPT = Prompt([*range(20)])


class Engines:
    """Recorder of what a fleet sends, and of the engines that it starts again."""

    def __init__(self, count: int, restarts: bool = True) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.started: list[int] = []
        restart = self.started.append if restarts else None
        self.given_up: list[tuple[int, str]] = []
        self.time = 0.0
        self.fleet = Fleet([INFO] * count, self._send, restart, self._give_up, now=lambda: self.time)

    def _send(self, number: int, frames: list[wire.Down]) -> None:
        self.sent += [(number, frame) for frame in frames]

    def _give_up(self, number: int, reason: str) -> None:
        self.given_up.append((number, reason))

    def take_sent(self) -> list[tuple[int, Any]]:
        sent, self.sent = self.sent, []
        return sent

    def out(self) -> list[wire.Up]:
        out, self.fleet.requests.out = self.fleet.requests.out, []
        return out

    def add(self, request_id: int, **params: Any) -> int:
        """Returns the engine that gets it."""
        self.fleet.requests.add(request_id, PROMPT, {"max_tokens": 8, **params})
        self.fleet.requests.bind()
        [(number, add)] = self.take_sent()
        assert add.request_id == request_id
        return number

    def add_all(self, *request_ids: int) -> list[int]:
        """Returns the engines that get those which need not wait."""
        for request_id in request_ids:
            self.fleet.requests.add(request_id, PROMPT, {})
        self.fleet.requests.bind()
        return [engine for engine, _ in self.take_sent()]

    def call(self, name: str, **options: Any) -> int:
        """Begins a call on all; returns its number."""
        self.fleet.call(name, options)
        calls = self.take_sent()
        assert {frame.name for _, frame in calls} == {name} and [engine for engine, _ in calls] == self.fleet.numbers
        return int(calls[0][1].number)

    def complete(self, name: str, state: EngineState, **options: Any) -> None:
        """A call to all, which each answers with this state."""
        number = self.call(name, **options)
        for engine in self.fleet.numbers:
            self.fleet.take(engine, answer(number, {}, state))


def answer(number: int, value: Any, state: EngineState | None = None, **more: Any) -> wire.Answer:
    return wire.Answer(number, value, state or EngineState(), **more)
