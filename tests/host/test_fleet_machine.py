"""Requests of several engines as one, whatever becomes of the engines: each completion has the tokens that one engine
would have given it, once and in order, and each request ends once."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from recorded_engines import INFO, PROMPT, Engines

from nanovllm.engine.step import Done, Finish, Step
from nanovllm.host import wire


def tokens_of(first_row: int, params: dict[str, Any]) -> dict[int, list[int]]:
    """Tokens of each completion, by row: one to seven, which its seed alone decides."""
    rows = range(first_row, first_row + params.get("n", 1))
    seeds = {row: 1000 + row if "seed" not in params else params["seed"] + row - first_row for row in rows}
    return {row: [100 * seed + position for position in range(1 + seed % 7)] for row, seed in seeds.items()}


class Engine:
    """Computes the rows that it is sent."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        """Tokens that unfinished rows are still to gain."""
        self.requests: dict[int, tuple[set[int], bool]] = {}
        """Rows of each unfinished request, and whether the prompt's log-probabilities are wanted."""
        self.aborted: set[int] = set()

    def take(self, frame: wire.Down) -> None:
        if isinstance(frame, wire.Add):
            rows, known = tokens_of(frame.request_id, frame.params), frame.known_ids()
            assert not known or [known] == [tokens[: len(known)] for tokens in rows.values()]
            self.rows |= {row: tokens[len(known) :] for row, tokens in rows.items()}
            self.requests[frame.request_id] = {*rows}, "prompt_logprobs" in frame.params
        elif isinstance(frame, wire.Abort) and frame.request_id in self.requests:
            self.aborted |= self.requests[frame.request_id][0]

    def step(self, gain: int) -> Step:
        """Rows gain up to two tokens each, some more than others."""
        step = Step([], [])
        for row, tokens in list(self.rows.items()):
            if row in self.aborted:
                step.finishes.append(Finish(row, None, "abort", None))
                tokens.clear()
            for _ in range((gain + row) % 3):
                if len(tokens) > 1:
                    step.rows.append(row)
                    step.tokens.append(tokens.pop(0))
                elif tokens:
                    step.finishes.append(Finish(row, tokens.pop(), "length", None))
        self.rows = {row: tokens for row, tokens in self.rows.items() if tokens}
        for request_id, (rows, wants_prompt) in list(self.requests.items()):
            if rows.isdisjoint(self.rows):
                step.done.append(Done(request_id))
                step.prompts += [(request_id, [b"line"])] * wants_prompt
                del self.requests[request_id]
        return step


class FleetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engines, self.computing, self.starting = Engines(3), [Engine() for _ in range(3)], set[int]()
        self.params: dict[int, dict[str, Any]] = {}
        self.expected: dict[int, list[int]] = {}
        self.gained: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.prompts: set[int] = set()
        self.done: list[int] = []
        self.aborted: set[int] = set()
        """Rows that had not ended when their request was aborted."""

    @rule(n=st.integers(1, 4), options=st.sampled_from(({}, {"seed": 7}, {"prompt_logprobs": 1})))
    def add(self, n: int, options: dict[str, Any]) -> None:
        number, params = len(self.expected), {"max_tokens": 9, "n": n, **options}
        self.params[number] = params
        self.expected |= tokens_of(number, params)
        self.engines.fleet.requests.add(number, PROMPT, params)
        self.engines.fleet.requests.bind()

    @rule(gain=st.integers(0, 2))
    def step(self, gain: int) -> None:
        for engine in {0, 1, 2} - self.starting:
            self.engines.fleet.take(engine, self.computing[engine].step(gain))

    @precondition(lambda self: len(self.starting) < 3)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        there = sorted({0, 1, 2} - self.starting)
        engine = data.draw(st.sampled_from([each for each in there if self.computing[each].rows] or there))
        self.engines.time += 1e6  # it is restarted however often it is lost
        self.computing[engine] = Engine()
        self.starting.add(engine)
        self.engines.fleet.lose(engine, "died")

    @precondition(lambda self: self.starting)
    @rule()
    def start(self) -> None:
        self.engines.fleet.take(self.starting.pop(), wire.Ready(INFO))

    @precondition(lambda self: len(self.params) > 3)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.params)))
        self.aborted |= tokens_of(request_id, self.params[request_id]).keys() - self.reasons.keys()
        self.engines.fleet.requests.abort(request_id)

    @invariant()
    def outputs_are_right(self) -> None:
        for engine, frame in self.engines.take_sent():
            assert engine not in self.starting
            self.computing[engine].take(frame)
        for step in self.engines.out():
            assert isinstance(step, Step)
            self.prompts |= {request_id for request_id, _ in step.prompts}
            last = [(end.row, end.token) for end in step.finishes if end.token is not None]
            for row, token in [*zip(step.rows, step.tokens, strict=True), *last]:
                self.gained.setdefault(row, []).append(token)
                assert row not in self.reasons and self.gained[row] == self.expected[row][: len(self.gained[row])]
            for end in step.finishes:
                assert end.row not in self.reasons
                self.reasons[end.row] = end.reason
                assert end.reason == "abort" or self.gained[end.row] == self.expected[end.row]
            for done in step.done:
                assert tokens_of(done.request_id, self.params[done.request_id]).keys() <= self.reasons.keys()
                self.done.append(done.request_id)

    def teardown(self) -> None:
        while self.starting:
            self.start()
        for number in range(40 * len(self.params)):
            self.outputs_are_right()
            if self.engines.fleet.requests.num_live:
                self.step(number)
        assert sorted(self.done) == sorted(self.params) and not self.engines.fleet.requests.num_live
        assert {self.reasons[row] for row in self.aborted} <= {"abort"}
        for request_id, params in self.params.items():
            is_whole = all(self.reasons[row] == "length" for row in tokens_of(request_id, params))
            assert not is_whole or (request_id in self.prompts) == ("prompt_logprobs" in params)


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=300, deadline=None)
