"""Adapters of several engines as one, in whatever order engines are lost, return and answer: a name means what was
loaded last, and none comes back by itself."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from recorded_engines import INFO, Engines, answer

from nanovllm.engine.engine_state import EngineState, LoadedAdapter
from nanovllm.errors import ReplicaError
from nanovllm.host import wire
from nanovllm.host.pending_call import PendingCall

NAMES, PATHS = ("a", "b"), ("/p", "/q")


class AdapterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engines = Engines(3)
        self.fleet = self.engines.fleet
        self.digests: dict[str, str | None] = dict(zip(PATHS, PATHS, strict=True))
        """Digest of what is in each folder; None: it has gone."""
        self.states = [EngineState() for _ in range(3)]
        self.queues: list[list[wire.Call]] = [[] for _ in range(3)]
        """Calls that engines have not run, in order."""
        self.ready = {0, 1, 2}
        self.asked: list[tuple[PendingCall, str, bool]] = []
        """Calls of users that have not ended: with their names, and whether folders and calls leave them a doubt."""
        self.wanted: dict[str, str | None] = dict.fromkeys(NAMES)
        """Digest that a name must have once all is quiet; "?": such or none, as its folder was changed."""
        self.loaded: set[str] = set()
        """Names that a user has loaded since the fleet had none."""

    def call(self, call: str, name: str, **options: Any) -> None:
        others, is_whole = [other for _, other, _ in self.asked], all(self.digests[path] == path for path in PATHS)
        self.asked = [(pending, other, sure and other != name) for pending, other, sure in self.asked]
        is_sure = name not in others and is_whole and {*self.fleet.numbers} > {*self.fleet._starting}
        self.asked.append((self.fleet.call(call, {"lora_name": name, **options}), name, is_sure))

    @rule(name=st.sampled_from(NAMES), path=st.sampled_from(PATHS))
    def load(self, name: str, path: str) -> None:
        self.call("load_adapter", name, lora_path=path, load_inplace=True)

    @precondition(lambda self: self.fleet.state.adapters)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        self.call("remove_adapter", data.draw(st.sampled_from(sorted(self.fleet.state.adapters))))

    @rule()
    def info(self) -> None:
        self.fleet.call("info", {})

    @rule(path=st.sampled_from(PATHS), digest=st.sampled_from((None, "other", "")))
    def change(self, path: str, digest: str | None) -> None:
        self.digests[path] = path if digest == "" else digest
        self.wanted = {name: "?" if one else None for name, one in self.wanted.items()}
        self.asked = [(pending, name, False) for pending, name, _ in self.asked]

    @precondition(lambda self: any(self.queues[number] for number in self.ready))
    @rule(data=st.data())
    def run(self, data: Any) -> None:
        number = data.draw(st.sampled_from([each for each in sorted(self.ready) if self.queues[each]]))
        call, own = self.queues[number].pop(0), self.states[number]
        name, error, value = call.options.get("lora_name"), "", None
        if call.name == "load_adapter":
            path, digest = call.options["lora_path"], self.digests[call.options["lora_path"]]
            value = {"digest": digest}
            if digest is None or call.options.get("digest") not in (None, digest):
                error = "its files have changed meanwhile"
            else:
                own.adapters = {**own.adapters, name: LoadedAdapter(digest, path)}
        elif call.name == "remove_adapter" and name not in own.adapters:
            error = "no adapter of this name is loaded"
        elif call.name == "remove_adapter":
            own.adapters = {key: one for key, one in own.adapters.items() if key != name}
        kind = "ValueError" if error else None
        state = EngineState(adapters=own.adapters)
        self.fleet.take(number, answer(call.number, value, state, kind=kind, message=error))

    @precondition(lambda self: len(self.ready) > 1)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        self.engines.time += 1e6
        number = data.draw(st.sampled_from(sorted(self.ready)))
        self.ready.discard(number)
        self.queues[number], self.states[number] = [], EngineState()
        self.fleet.lose(number, "died")

    @precondition(lambda self: self.engines.started)
    @rule()
    def start(self) -> None:
        number = self.engines.started.pop()
        self.ready.add(number)
        self.fleet.take(number, wire.Ready(INFO))

    @invariant()
    def calls_end_right(self) -> None:
        for number, frame in self.engines.take_sent():
            assert number in self.fleet.numbers
            self.queues[number].append(frame)
        assert not self.engines.given_up
        going = []
        for pending, name, is_sure in self.asked:
            if pending.waiting:
                going.append((pending, name, is_sure))
                continue
            try:
                pending.result()
            except (ValueError, RuntimeError) as error:
                assert not is_sure or isinstance(error, ReplicaError), error
                self.wanted[name] = "?"
            else:
                loads = pending.name == "load_adapter"
                digest = next(iter(pending.answers.values())).value["digest"] if loads else None
                self.wanted[name] = digest if is_sure else "?"
        self.asked = going
        self.loaded |= {name for pending, name, _ in going if pending.name == "load_adapter"}

    @invariant()
    def no_name_comes_back(self) -> None:
        there = {*self.fleet.state.adapters}
        assert there <= self.loaded | {name for name in NAMES if self.wanted[name]}, there
        going = {name for pending, name, _ in self.asked if pending.name == "load_adapter"}
        self.loaded = there | going

    def teardown(self) -> None:
        for _ in range(400):
            self.calls_end_right()
            self.no_name_comes_back()
            if self.engines.started:
                self.start()
            elif any(self.queues):
                first = next(number for number, queue in enumerate(self.queues) if queue)
                self.run(_First(first))
        self.calls_end_right()
        assert not any(self.queues) and not self.asked and not self.fleet._starting and len(self.ready) == 3
        found = self.fleet.state.adapters
        assert all(state.adapters.items() >= found.items() for state in self.states), (found, self.states)
        certain = {name for name, wanted in self.wanted.items() if wanted != "?"}
        assert all(state.adapters.keys() & certain <= found.keys() for state in self.states), (found, self.states)
        for name, wanted in self.wanted.items():
            assert wanted == "?" or (found[name].digest if name in found else None) == wanted, (name, wanted, found)


class _First:
    def __init__(self, number: int) -> None:
        self.number = number

    def draw(self, strategy: Any) -> int:
        return self.number


TestAdapterMachine = AdapterMachine.TestCase
TestAdapterMachine.settings = settings(deadline=None, stateful_step_count=20)


def lost_with_adapters(*names: str, engines: Engines) -> list[tuple[int, wire.Call]]:
    """Engine 1 is lost and returns; the calls that it has missed."""
    engines.complete("load_adapter", EngineState(adapters={name: LoadedAdapter(name, f"/{name}") for name in names}),
                     lora_name=names[-1], lora_path=f"/{names[-1]}")  # fmt: skip
    engines.fleet.lose(1, "died")
    engines.fleet.take(1, wire.Ready(INFO))
    return engines.take_sent()


def refuse(engines: Engines, call: wire.Call) -> None:
    engines.fleet.take(1, answer(call.number, None, kind="ValueError", message="gone"))


def test_a_name_that_was_taken_back_does_not_return_before_others_have_answered() -> None:
    engines = Engines(2)
    calls = lost_with_adapters("a", "b", "c", engines=engines)
    for _, call in calls[:2]:
        refuse(engines, call)
    assert [*engines.fleet.state.adapters] == ["c"]
    third = EngineState(adapters={"c": LoadedAdapter("c", "/c")})
    engines.fleet.take(1, answer(calls[2][1].number, {"digest": "c"}, third))
    assert [*engines.fleet.state.adapters] == ["c"]
    removals = engines.take_sent()
    assert [(engine, call.name, call.options["lora_name"]) for engine, call in removals] == [
        (0, "remove_adapter", "a"), (0, "remove_adapter", "b")]  # fmt: skip
    assert not engines.fleet._starting


def test_a_users_new_adapter_of_the_name_stays() -> None:
    """Whether it has been loaded when an engine cannot load the one before, or is being loaded."""
    for has_loaded in (False, True):
        engines = Engines(2)
        [(_, call)] = lost_with_adapters("a", engines=engines)
        number = engines.call("load_adapter", lora_name="a", lora_path="/new", load_inplace=True)
        new = EngineState(adapters={"a": LoadedAdapter("new", "/new")})
        if has_loaded:
            engines.fleet.take(0, answer(number, {"digest": "new"}, new))
        refuse(engines, call)
        assert not engines.take_sent()
        for engine in range(has_loaded, 2):
            engines.fleet.take(engine, answer(number, {"digest": "new"}, new))
        assert engines.fleet.state.adapters == new.adapters and not engines.take_sent()


def test_a_name_can_be_removed_while_an_engine_loads_it_again() -> None:
    """It would say that it has none; it removes what it has loaded by then."""
    engines = Engines(2)
    [(_, load)] = lost_with_adapters("a", engines=engines)
    pending = engines.fleet.call("remove_adapter", {"lora_name": "a"})
    [(engine, call)] = engines.take_sent()
    assert engine == 0
    engines.fleet.take(0, answer(call.number, {"status": "removed"}))
    assert pending.result() == {"status": "removed"} and not engines.fleet.state.adapters
    loaded = EngineState(adapters={"a": LoadedAdapter("a", "/a")})
    engines.fleet.take(1, answer(load.number, {"digest": "a"}, loaded))
    [(engine, call)] = engines.take_sent()
    assert (engine, call.name, call.options["lora_name"]) == (1, "remove_adapter", "a")
    engines.fleet.take(1, answer(call.number, {}))
    assert not engines.fleet._starting


def test_an_engine_that_returns_does_not_undo_a_call_that_others_still_run() -> None:
    """It has paused at once, and another one ends its requests before."""
    engines = Engines(3)
    state = EngineState(adapters={"a": LoadedAdapter("a", "/a")})
    engines.complete("load_adapter", state, lora_name="a", lora_path="/a")
    for number in (1, 2):
        engines.fleet.lose(number, "died")
    for number in (1, 2):
        engines.fleet.take(number, wire.Ready(INFO))
    loads, paused = dict(engines.take_sent()), EngineState(pause_mode="wait", adapters=state.adapters)
    pause = engines.call("pause", mode="wait")
    for number in (1, 2):
        engines.fleet.take(number, answer(loads[number].number, {"digest": "a"}, state))
        engines.fleet.take(number, answer(pause, {}, paused))
    assert not engines.take_sent() and {*engines.fleet._starting} == {1, 2}
    engines.fleet.take(0, answer(pause, {}, paused))
    assert not engines.take_sent() and not engines.fleet._starting and engines.fleet.state.is_paused


def test_a_name_stays_while_it_gets_another_adapter() -> None:
    """Though one engine has that already when another call ends."""
    engines = Engines(2)
    before, after = (EngineState(adapters={"a": LoadedAdapter(digest, "/a")}) for digest in ("before", "after"))
    engines.complete("load_adapter", before, lora_name="a", lora_path="/a")
    info, load = engines.call("info"), engines.call("load_adapter", lora_name="a", lora_path="/a", load_inplace=True)
    engines.fleet.take(0, answer(info, {}, before))
    engines.fleet.take(0, answer(load, {"digest": "after"}, after))
    engines.fleet.take(1, answer(info, {}, before))
    assert engines.fleet.state.adapters == before.adapters
    engines.fleet.take(1, answer(load, {"digest": "after"}, after))
    assert engines.fleet.state.adapters == after.adapters
