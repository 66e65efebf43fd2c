"""Requests of several engines as one, whatever becomes of the engines: each completion has the tokens that one engine
would have given it, once and in order, and each request ends once."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from recorded_engines import INFO, PROMPT, Engines

from nanovllm.host import wire

Key = tuple[str, int]


def keys(first_row: int, params: dict[str, Any]) -> dict[int, Key]:
    """Row of each completion -> what its tokens are sampled by."""
    seed, rows = params.get("seed"), range(first_row, first_row + params.get("n", 1))
    return {row: ("row", row) if seed is None else ("seed", seed + row - first_row) for row in rows}


def token_of(key: Key, position: int) -> int:
    return hash((key[1], position)) % 1000


def length_of(key: Key) -> int:
    return 1 + key[1] % 7


class Engine:
    """Computes the rows that it is sent."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[Key, int]] = {}
        """Key and number of tokens of each unfinished row."""
        self.requests: dict[int, tuple[set[int], bool]] = {}
        """Unfinished rows of a request, and whether the prompt's log-probabilities are wanted."""
        self.aborted: set[int] = set()

    def take(self, frame: wire.Down) -> None:
        if isinstance(frame, wire.Add):
            rows, known = keys(frame.request_id, frame.params), len(frame.known_ids())
            assert not known or len(rows) == 1
            self.rows |= {row: (key, known) for row, key in rows.items()}
            self.requests[frame.request_id] = {*rows}, "prompt_logprobs" in frame.params
        elif isinstance(frame, wire.Abort) and frame.request_id in self.requests:
            self.aborted |= self.requests[frame.request_id][0]

    def step(self, gains: list[int]) -> wire.Step:
        """Row number i gains gains[i] tokens, or as many as it may have."""
        step = wire.Step([], [])
        for (row, (key, count)), gain in zip(list(self.rows.items()), gains * len(self.rows), strict=False):
            last = length_of(key) - 1
            for position in range(count, min(count + gain, last)):
                step.rows.append(row)
                step.tokens.append(token_of(key, position))
                step.logprobs.append((row, b"%d" % position))
            self.rows[row] = key, min(count + gain, last)
            if row in self.aborted:
                step.finishes.append(wire.Finish(row, None, "abort", None))
            elif count + gain > last:
                step.finishes.append(wire.Finish(row, token_of(key, last), "length", None))
                step.logprobs.append((row, b"%d" % last))
        for end in step.finishes:
            del self.rows[end.row]
        for request_id, (rows, wants_prompt) in list(self.requests.items()):
            if not rows.intersection(self.rows):
                step.done.append(wire.Done(request_id))
                step.prompts += [(request_id, [b"line"])] * wants_prompt
                del self.requests[request_id]
        return step


class FleetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engines = Engines(3)
        self.computing = [Engine() for _ in range(3)]
        self.starting: set[int] = set()
        self.num_rows = 0
        self.params: dict[int, dict[str, Any]] = {}
        self.expected: dict[int, Key] = {}
        self.tokens: dict[int, list[int]] = {}
        self.lines: dict[int, list[bytes]] = {}
        self.ends: dict[int, wire.Finish] = {}
        self.prompts: set[int] = set()
        self.done: list[int] = []
        self.aborted: set[int] = set()
        """Rows that had not ended when their request was aborted."""

    @rule(
        n=st.integers(1, 4), seed=st.none() | st.integers(0, 99), more=st.sampled_from(({}, {"prompt_logprobs": 1}))
    )
    def add(self, n: int, seed: int | None, more: dict[str, Any]) -> None:
        params = {"max_tokens": 9, **more} | ({"n": n} if n > 1 else {}) | ({} if seed is None else {"seed": seed})
        self.params[self.num_rows] = params
        self.expected |= keys(self.num_rows, params)
        self.engines.fleet.requests.add(self.num_rows, PROMPT, params)
        self.engines.fleet.requests.bind()
        self.num_rows += n

    @rule(gains=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def step(self, gains: list[int]) -> None:
        for engine in {0, 1, 2} - self.starting:
            self.engines.fleet.take(engine, self.computing[engine].step(gains))

    @precondition(lambda self: len(self.starting) < 3)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        there = {0, 1, 2} - self.starting
        computing = sorted(engine for engine in there if self.computing[engine].rows)
        engine = data.draw(st.sampled_from(computing or sorted(there)))
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
        self.aborted |= keys(request_id, self.params[request_id]).keys() - self.ends.keys()
        self.engines.fleet.requests.abort(request_id)

    @invariant()
    def outputs_are_right(self) -> None:
        for engine, frame in self.engines.take_sent():
            assert engine not in self.starting
            self.computing[engine].take(frame)
        for step in self.engines.out():
            assert isinstance(step, wire.Step)
            self.prompts |= {request_id for request_id, _ in step.prompts}
            for row, line in step.logprobs:
                self.lines.setdefault(row, []).append(line)
            ends = [(end.row, end.token) for end in step.finishes if end.token is not None]
            for row, token in [*zip(step.rows, step.tokens, strict=True), *ends]:
                assert row not in self.ends
                self.tokens.setdefault(row, []).append(token)
            for end in step.finishes:
                assert end.row not in self.ends
                self.ends[end.row] = end
            for done in step.done:
                assert all(row in self.ends for row in keys(done.request_id, self.params[done.request_id]))
                self.done.append(done.request_id)
        for row, tokens in self.tokens.items():
            assert tokens == [token_of(self.expected[row], position) for position in range(len(tokens))]
            assert self.lines[row] == [b"%d" % position for position in range(len(tokens))]
            if row in self.ends and self.ends[row].reason == "length":
                assert len(tokens) == length_of(self.expected[row])

    def teardown(self) -> None:
        while self.starting:
            self.start()
        for _ in range(40 * len(self.params)):
            self.outputs_are_right()
            if not self.engines.fleet.requests.num_live:
                break
            self.step([1])
        assert sorted(self.done) == sorted(self.params) and not self.engines.fleet.requests.num_live
        assert {self.ends[row].reason for row in self.aborted} <= {"abort"}
        for request_id, params in self.params.items():
            whole = all(self.ends[row].reason == "length" for row in keys(request_id, params))
            assert request_id in self.prompts or "prompt_logprobs" not in params or not whole


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=300, deadline=None)
