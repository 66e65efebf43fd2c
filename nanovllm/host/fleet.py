"""Fleet: one or several engines as one. Runs calls on all engines, and replaces lost ones. Pure: no socket or thread;
frames go in, and frames come out. Requests are in fleet_requests.py."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nanovllm.engine.calls import CALLS, CallSpec
from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.step import Step
from nanovllm.host import wire
from nanovllm.host.fleet_requests import FleetRequests, Send
from nanovllm.host.pending_call import OnDone, PendingCall

logger = logging.getLogger(__name__)

MOST_RESTARTS = 3
"""Times that an engine is restarted in RESTART_SECONDS; if it is lost once more, the others continue without it."""
RESTART_SECONDS = 3600.0


class Fleet:
    """Engines that were all ready when the fleet was made."""

    def __init__(
        self, infos: Sequence[dict[str, Any]], send: Send, restart: Callable[[int], None] | None = None,
        give_up: Callable[[int, str], None] = lambda number, reason: None, now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`infos`: of each engine (program.describe). `restart`: starts another engine in the place of a lost one, or
        raises an error; None: there is one engine, and its requests end with it. `give_up`: (engine, reason) kills one,
        which is then lost. `now`: seconds; replaced by tests."""
        self._send, self._restart, self._give_up, self._now = send, restart, give_up, now
        self.requests = FleetRequests(infos, send, keeps_tokens=restart is not None)
        self._states = [EngineState() for _ in infos]
        """State of each engine as of its last answer."""
        self.state = EngineState()
        """State of all engines together; once `resume` has been asked for it is not that of a pause before it."""
        self.is_resuming = False
        """Whether a resume was asked for that has not begun. Set from any thread."""
        self.ended: str | None = None
        """Reason why no engine is left; None if there is one."""
        self._reachable = set(range(len(infos)))
        """Engines that frames can be sent to, including those that are starting."""
        self._calls: dict[int, PendingCall] = {}
        self._num_calls = 0
        self._losses: list[list[float]] = [[] for _ in infos]
        """Times at which each engine was lost and restarted."""
        self._starting: dict[int, dict[str, Any] | None] = {}
        """Restarted engines that do not have the state of the others yet; their infos once they are ready."""
        self._stale: set[int] = set()
        """Restarted engines with the checkpoint's weights while others have newer ones. They get no requests until all
        weights have been replaced once more."""
        self._to_restart: list[int] = []
        """Lost engines to start again, between two calls and once the others are awake with complete weights."""

    @property
    def numbers(self) -> list[int]:
        """Numbers of the engines that are running or starting."""
        return sorted(self._reachable)

    @property
    def num_restarts(self) -> int:
        """Number of times that engines were restarted."""
        return sum(map(len, self._losses))

    def take(self, number: int, frame: wire.Up) -> None:
        """Handles a frame of an engine."""
        if isinstance(frame, Step):
            self.requests.take_step(number, frame)
        elif isinstance(frame, wire.Answer):
            self._take_answer(number, frame)
        elif isinstance(frame, wire.Refused):
            self.requests.refuse(number, frame)
        elif isinstance(frame, wire.Bucket):
            if (pending := self._calls.get(frame.number)) is not None:
                self._relay(pending, frame)
        elif isinstance(frame, wire.Ready):
            self._starting[number] = frame.info
            self._catch_up(number)

    # -- calls --------------------------------------------------------------------------------------------------

    def call(
        self, name: str, options: dict[str, Any], takes_weights: bool = False, on_done: OnDone = lambda call: None
    ) -> PendingCall:
        """Begins a call of engine/calls.py on all engines. `takes_weights`: its weights follow by `send_bucket`.
        `on_done`: called when all that run it have answered or are lost; not where none runs it."""
        spec = CALLS[name]
        numbers = self._wanted(spec, options)
        if spec.counts_version and options.get("weight_version") is None and self._restart is not None:
            options = {**options, "weight_version": self.state.weight_version + 1}
        pending = self._begin(name, options, numbers, on_done, takes_weights)
        if name == "resume":
            self.is_resuming, self.state.pause_mode = False, None
        if spec.in_flight(options)[1] == "abort":
            self.requests.abort_waiting()
        return pending

    def _begin(
        self, name: str, options: dict[str, Any], numbers: list[int], on_done: OnDone, takes_weights: bool = False
    ) -> PendingCall:
        spec, self._num_calls = CALLS[name], self._num_calls + 1
        if spec.drops_adapters:
            options = {**options, "keeps": self.requests.adapters()}
        pending = PendingCall(self._num_calls, name, options, numbers, on_done)
        relayed = spec.relayed_as(options) if len(numbers) > 1 else None
        call = others = wire.Call(pending.number, name, options, takes_weights, relays=relayed is not None)
        if relayed is not None:
            rest = {key: value for key, value in options.items() if key != "update_info"}
            pending.relay_to, others = {*numbers[1:]}, wire.Call(pending.number, relayed, rest, takes_weights=True)
        if numbers:
            self._calls[pending.number] = pending
        for number in numbers:
            self._send(number, [call if number == numbers[0] else others])
        return pending

    def _wanted(self, spec: CallSpec, options: dict[str, Any]) -> list[int]:
        """Engines that run a call."""
        numbers = [number for number in self.numbers if not (spec.compares and number in self._stale)]
        if spec.by_caught_up:
            numbers = [number for number in numbers if number not in self._starting] or numbers
        due = [number for number in numbers if spec.is_due(self._states[number], options)]
        return (due or numbers)[: 1 if spec.by_first else None]

    def send_bucket(self, pending: PendingCall, data: bytes | None, error: str | None = None) -> None:
        """Sends weights of a call to its engines; see wire.Bucket."""
        for number in sorted(pending.waiting):
            self._send(number, [wire.Bucket(pending.number, data, error)])

    def _relay(self, pending: PendingCall, bucket: wire.Bucket) -> None:
        for number in sorted(pending.relay_to & pending.waiting):
            self._send(number, [bucket])

    def _take_answer(self, number: int, answer: wire.Answer) -> None:
        self._states[number] = answer.state
        self.requests.note_version(number, answer.state.weight_version)
        self.requests.router.note_adapters(number, answer.state.held_adapters())
        if (pending := self._calls.get(answer.number)) is not None:
            if answer.kind is None and pending.spec.replaces_weights(pending.options):
                self._stale.discard(number)
            self._settle_call(pending, number, answer)

    def _settle_call(self, pending: PendingCall, number: int, answer: wire.Answer | None) -> None:
        if not pending.settle(number, answer):
            return
        del self._calls[pending.number]
        self._sum_states(() if self._reachable else [each.state for each in pending.answers.values()])
        self._note_loaded(pending)
        if pending.spec.empties_cache:
            self.requests.router.forget_cached()
        pending.on_done(pending)
        for started in list(self._starting):
            self._catch_up(started)
        self._start_lost()

    def _sum_states(self, last_states: Sequence[EngineState] = ()) -> None:
        """Updates `state` from all engines that have caught up. `last_states`: answered states, if no engine is
        left."""
        states = [self._states[number] for number in self.numbers if number not in self._starting]
        loading = self._names(lambda call: call.is_users_load)
        before = {name: one for name, one in self.state.adapters.items() if name in loading}
        if states or last_states:
            self.state.sum_up(states or last_states)
        going, there = self._names(lambda call: call.name == "remove_adapter"), before | self.state.adapters
        self.state.adapters = {name: one for name, one in there.items() if name not in going}
        if self.is_resuming or any(pending.name == "resume" for pending in self._calls.values()):
            self.state.pause_mode = None  # that which some engines report is over

    def _names(self, of: Callable[[PendingCall], bool]) -> set[str]:
        """Names of the adapters of such calls that have not ended."""
        return {call.options["lora_name"] for call in self._calls.values() if of(call)}

    def _note_loaded(self, pending: PendingCall) -> None:
        """Notes the adapter of a user's load that ended where all engines that had caught up were lost meanwhile."""
        if pending.is_users_load and all(number in self._starting for number in self.numbers):
            name: str = pending.options["lora_name"]
            for held in (each.state.adapters for each in pending.answers.values() if each.kind is None):
                self.state.adapters = {**self.state.adapters, name: held[name]}

    # -- engines that are lost ----------------------------------------------------------------------------------

    def lose(self, number: int, reason: str) -> None:
        """Handles the loss of an engine: its requests continue on others, before those that wait."""
        self._reachable.discard(number)
        self._states[number] = EngineState()
        self._starting.pop(number, None)
        self._stale.discard(number)
        losses, now = self._losses[number], self._now()
        if self._restart is None:
            self.ended = reason
        elif sum(now - before < RESTART_SECONDS for before in losses) < MOST_RESTARTS:
            losses.append(now)
            when = ", and computes once all weights have been replaced again" if self.state.weights_replaced else ""
            logger.warning("replica %d was lost and is being restarted%s: %s", number, when, reason)
            self._to_restart.append(number)
        else:
            logger.warning("replica %d was lost; the others continue without it: %s", number, reason)
        self.requests.leave(number, reason)
        for pending in list(self._calls.values()):
            if number in pending.waiting - pending.relay_to:  # perhaps it received weights for the others
                why = f"replica {number}, which received them, was lost: {reason}"
                self._relay(pending, wire.Bucket(pending.number, None, why))
            self._settle_call(pending, number, None)
        self._start_lost()
        if not self._reachable - self._stale:
            self.ended = self.ended or f"no replica is left: replica {number}: {reason}"
        self.requests.bind()

    def _start_lost(self) -> None:
        """Restarts lost engines, unless a call or an update that they would miss is running, or memory sleeps."""
        waits = self._calls or self.state.asleep or self.state.lacks_weights
        while self._to_restart and self._restart and not waits:
            number = self._to_restart.pop()
            try:
                self._restart(number)
                self._reachable.add(number)
                self._starting[number] = None
                if self.state.weights_replaced:
                    self._stale.add(number)
            except Exception as error:  # for example, there is no memory for a process
                logger.warning("replica %d cannot be restarted; the others continue without it: %s", number, error)

    def _catch_up(self, number: int) -> None:
        """Makes the calls that a restarted engine has missed, then lets it have requests. Does nothing until it is
        ready, has the weights, and runs no call, nor has run one before others."""
        info, calls = self._starting[number], self._calls.values()
        if info is None or number in self._stale or any(number in each.waiting | each.answers.keys() for each in calls):
            return
        own, others = self._states[number], self.state
        missed = [(name, options) for name, spec in CALLS.items() for options in spec.missed(own, others)]
        if not missed:
            del self._starting[number]
            self.requests.join(number, info, own.held_adapters())
            self._sum_states()
            self.requests.bind()
        for name, options in missed:
            self._begin(name, options, [number], partial(self._note_caught_up, number))

    def _note_caught_up(self, number: int, pending: PendingCall) -> None:
        """Handles the end of a call that an engine had missed; an engine on which it failed is given up. An adapter
        that it cannot load again, as its folder has gone or changed, loses its name everywhere instead."""
        if number in self._starting:
            try:
                pending.result()
            except Exception as error:
                if pending.name == "load_adapter" and isinstance(error, ValueError):
                    self._unload(pending, f"replica {number}, which was lost, could not load it: {error}")
                    return
                self._starting[number] = None
                self._give_up(number, f"could not catch up with the others: {pending.name}: {error}")

    def _unload(self, failed: PendingCall, reason: str) -> None:
        """Lets no more requests have the adapter of a load that an engine had missed; those that have it end with it
        where it is held. Does nothing where the name has another by now, or will have."""
        name = failed.options["lora_name"]
        found = self.state.adapters.get(name)
        is_loading = name in self._names(lambda call: call.is_users_load)
        if found is None or found.digest != failed.options["digest"] or is_loading:
            return
        logger.warning("adapter %r is unloaded: %s", name, reason)
        self.state.adapters = {other: one for other, one in self.state.adapters.items() if other != name}
        if others := [number for number in self.numbers if number not in self._starting]:
            self._begin("remove_adapter", {"lora_name": name}, others, lambda pending: None)
