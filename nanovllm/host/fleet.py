"""Fleet: one or several engines as one. Assigns requests to engines, moves those of a lost engine to others, and runs
calls on all engines. Pure: no socket, clock or thread; frames go in, and frames come out.

A request can continue on another engine after the tokens it has, because tokens are sampled by seed and position. If it
has several completions or wants a sampling_mask, the other engine computes it from its prompt, and the tokens that it
has already are dropped.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nanovllm.engine.calls import CALLS, CallSpec
from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.engine_stats import EngineStats
from nanovllm.engine.prefix_keys import prefix_keys
from nanovllm.engine.prompt import Prompt
from nanovllm.host import wire
from nanovllm.host.fleet_stats import FleetStats
from nanovllm.host.flight import ENDED, NO_BOUND, Flight, without_repeated
from nanovllm.host.pending_call import PendingCall
from nanovllm.host.router import Load, Router
from nanovllm.wire.state import PageGroup

logger = logging.getLogger(__name__)

MOST_RESTARTS = 3  # of each engine; then the others continue without it
MOST_LOSSES = 3  # of engines in a row while they compute a request, without a new token: it may be what crashes them


class Fleet:
    """Engines that were all ready when the fleet was made."""

    def __init__(
        self, infos: Sequence[dict[str, Any]], send: Callable[[int, list[wire.Down]], None],
        restart: Callable[[int], None] | None = None,
        give_up: Callable[[int, str], None] = lambda number, reason: None,
    ) -> None:  # fmt: skip
        """`infos`: of each engine (program.describe). `send`: (engine, frames). `restart`: starts another engine in the
        place of a lost one, or raises an error; None: there is one engine, and its requests end with it. `give_up`:
        (engine, reason) kills one, which is then lost."""
        self._send, self._restart, self._give_up = send, restart, give_up
        self._block_size, count = infos[0]["block_size"] or 1, len(infos)
        self.max_total = min(info["max_model_len"] for info in infos)
        """Tokens of the longest text that every engine can hold."""
        self._is_alone = count == 1
        self._hashes_wanted = count > 1 and infos[0].get("prefix_caching", True)
        rows = NO_BOUND if self._is_alone else infos[0]["max_num_seqs"]
        groups = tuple(PageGroup(*group) for group in infos[0]["page_groups"])
        self._router = Router(count, self._block_size, rows, groups)
        self._keeps_tokens = restart is not None
        self._states = [EngineState() for _ in infos]
        """State of each engine as of its last answer."""
        self.state = EngineState()
        """State of all engines together."""
        self.ended: str | None = None
        """Reason why no engine is left; None if there is one."""
        self.out: list[wire.Up] = []
        """Results for the owner of the requests, who takes them out."""
        self._reachable = set(range(count))
        """Engines that frames can be sent to, including those that are starting."""
        self._live: dict[int, Flight] = {}
        """Unfinished requests by id."""
        self._rows: dict[int, list[int]] = {}
        """Output tokens of each unfinished completion, by row, if tokens are kept."""
        self._flights: dict[int, Flight] = {}
        """Unfinished requests by row, if tokens are kept."""
        self._skips: dict[int, int] = {}
        """Number of tokens to drop for each row that is computed again."""
        self._calls: dict[int, PendingCall] = {}
        self._num_calls = 0
        self._stats = FleetStats(count)
        self.num_restarts = [0] * count
        self._starting: dict[int, dict[str, Any] | None] = {}
        """Restarted engines that do not have the state of the others yet; their infos once they are ready."""
        self._stale: set[int] = set()
        """Restarted engines with the checkpoint's weights while others have newer ones. They get no requests until all
        weights have been replaced once more."""
        self._to_restart: list[int] = []
        """Lost engines to start again, between two calls and once the others are awake with complete weights."""
        for number, info in enumerate(infos):
            self._join(number, info)

    def _join(self, number: int, info: dict[str, Any]) -> None:
        """Lets an engine have requests. A single engine has no limit, since its own scheduler knows better."""
        self._router.join(number, NO_BOUND if self._is_alone else info["num_kvcache_blocks"])

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Number of unfinished requests."""
        return len(self._live)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the engines that are running or starting."""
        return sorted(self._reachable)

    def has_begun(self) -> bool:
        """Whether any request was sent to an engine."""
        return any(flight.engine is not None for flight in self._live.values())

    def add(self, request_id: int, prompt: Prompt, params: dict[str, Any], known: Sequence[int] = ()) -> None:
        """Queues a request; `bind` sends it."""
        n = params.get("n", 1)
        tokens = [list(known) for _ in range(n)]
        flight = Flight(request_id, prompt, params, len(known), tokens, [[] for _ in range(n)])
        self._live[request_id] = flight
        if self._keeps_tokens:
            for index in range(n):
                self._rows[request_id + index] = tokens[index]
                self._flights[request_id + index] = flight
        self._queue(flight)

    def _queue(self, flight: Flight, first: bool = False) -> None:
        """Queues a request at the router; `first`: in front of those that wait."""
        known = len(flight.tokens[0]) if flight.can_continue else flight.num_given
        length = len(flight.prompt) + known
        total = min(self.max_total, len(flight.prompt) + flight.most_tokens)
        hashes = self._hashes(flight, flight.tokens[0][:known])
        self._router.add(Load(flight.request_id, hashes, length, max(0, total - length), flight.n), first)

    def _hashes(self, flight: Flight, output: list[int]) -> list[bytes]:
        """Prefix keys for the router; empty if it has no use for them."""
        if not self._hashes_wanted:
            return []
        return prefix_keys(flight.prompt.token_ids + output, self._block_size, flight.prompt.extras)

    def bind(self) -> None:
        """Sends the requests that engines have room for. Those of an engine are sent at once, because requests that
        arrive one by one would begin in as many small steps."""
        batches: dict[int, list[wire.Down]] = {}
        for number, request_id in self._router.bind():
            batches.setdefault(number, []).append(self._bound(number, self._live[request_id]))
        for number, batch in batches.items():
            self._send(number, batch)

    def _bound(self, number: int, flight: Flight) -> wire.Add:
        flight.engine = number
        flight.num_engines += 1
        known = flight.tokens[0] if flight.can_continue else flight.tokens[0][: flight.num_given]
        for index, tokens in enumerate(flight.tokens):
            if (count := len(tokens) - len(known)) or index in flight.ended:
                self._skips[flight.request_id + index] = ENDED if index in flight.ended else count
            if self._keeps_tokens:
                flight.note_version(index, self._states[number].weight_version)
        params, most = flight.params, self.max_total - len(flight.prompt)
        if not self._is_alone and flight.most_tokens > most:
            # Another engine that may have to continue it may have a smaller KV cache.
            params = {**params, "max_tokens": most, "min_tokens": min(most, params.get("min_tokens", 0))}
        return wire.Add.of(flight.request_id, flight.prompt, params, known)

    def abort(self, request_id: int) -> None:
        """Ends a request early; unknown ones are ignored."""
        if (flight := self._live.get(request_id)) is None:
            return
        flight.is_aborted = True
        if flight.engine is None:
            self._router.withdraw(request_id)
            self._drop(flight)
        else:
            self._send(flight.engine, [wire.Abort(request_id)])

    def _drop(self, flight: Flight, why: str | None = None) -> None:
        """Ends a request's unfinished completions with reason "abort" and stop reason `why`."""
        step = wire.aborted(flight.request_id, flight.n)
        step.finishes = [end for end in step.finishes if end.row - flight.request_id not in flight.ended]
        for end in step.finishes:
            end.weight_versions, end.stop_reason = flight.spans(end.row - flight.request_id), why
        self._forget(flight)
        self.out.append(step)

    def _forget(self, flight: Flight) -> None:
        del self._live[flight.request_id]
        for row in range(flight.request_id, flight.request_id + flight.n):
            self._rows.pop(row, None)
            self._flights.pop(row, None)
            self._skips.pop(row, None)

    # -- frames of engines --------------------------------------------------------------------------------------

    def take(self, number: int, frame: wire.Up) -> None:
        """Handles a frame of an engine; results for the owner of the requests are added to `out`."""
        if isinstance(frame, wire.Step):
            self._take_step(number, frame)
        elif isinstance(frame, wire.Answer):
            self._take_answer(number, frame)
        elif isinstance(frame, wire.Refused):
            if (flight := self._live.get(frame.request_id)) is not None:
                self._finish(number, flight)
                self.out.append(frame)
        elif isinstance(frame, wire.Bucket):
            if (pending := self._calls.get(frame.number)) is not None:
                self._relay(pending, frame)
        elif isinstance(frame, wire.Ready):
            self._starting[number] = frame.info
            self._catch_up(number)

    def _take_step(self, number: int, step: wire.Step) -> None:
        """A loop over all rows of a step: kept lean."""
        if step.stats is not None:
            self._stats.take(number, step.stats, step.computed)
            step.stats = self.stats()
        if self._keeps_tokens:
            if self._skips:
                step = without_repeated(step, self._skips)
            known = self._rows
            for row, token in zip(step.rows, step.tokens, strict=True):
                if (tokens := known.get(row)) is not None:
                    tokens.append(token)
            for end in step.finishes:
                self._note_end(end)
        self.out.append(step)
        if step.done:
            for done in step.done:
                if (flight := self._live.get(done.request_id)) is not None:
                    self._finish(number, flight)
            self.bind()

    def _note_end(self, end: wire.Finish) -> None:
        if (tokens := self._rows.get(end.row)) is None:
            return
        if end.token is not None:
            tokens.append(end.token)
        flight = self._flights[end.row]
        index = end.row - flight.request_id
        flight.ended.add(index)
        if flight.num_engines > 1:
            end.weight_versions = flight.spans(index)

    def _finish(self, number: int, flight: Flight) -> None:
        count = sum(map(len, flight.tokens))
        left = [digest for tokens in flight.tokens for digest in self._hashes(flight, tokens[:-1])]
        self._router.finish(number, flight.request_id, count, left)
        self._forget(flight)

    def stats(self) -> EngineStats:
        """Counters of all engines, summed up."""
        return self._stats.total(self.numbers, self._router.num_waiting)

    def computed(self) -> tuple[int, int]:
        """See FleetStats.computed."""
        return self._stats.computed()

    # -- calls --------------------------------------------------------------------------------------------------

    def call(self, name: str, options: dict[str, Any], takes_weights: bool = False) -> PendingCall:
        """Begins a call of engine/calls.py on all engines. `takes_weights`: its weights follow by `send_bucket`."""
        spec = CALLS[name]
        numbers = self._wanted(spec, options)
        if spec.counts_version and options.get("weight_version") is None and self._keeps_tokens:
            options = {**options, "weight_version": self.state.weight_version + 1}
        pending = self._begin(spec, name, options, numbers, takes_weights)
        if spec.in_flight(options)[1] == "abort":
            for flight in [each for each in self._live.values() if each.engine is None]:
                self.abort(flight.request_id)
        return pending

    def _begin(
        self, spec: CallSpec, name: str, options: dict[str, Any], numbers: list[int], takes_weights: bool = False
    ) -> PendingCall:
        self._num_calls += 1
        pending = PendingCall(self._num_calls, spec, name, numbers, spec.replaces_weights(options))
        relayed = spec.relayed_as(options) if len(numbers) > 1 else None
        call = others = wire.Call(pending.number, name, options, takes_weights, relays=relayed is not None)
        if relayed is not None:
            pending.relay_to, others = {*numbers[1:]}, wire.Call(pending.number, relayed, {}, takes_weights=True)
        if numbers:
            self._calls[pending.number] = pending
        for number in numbers:
            self._send(number, [call if number == numbers[0] else others])
        return pending

    def _wanted(self, spec: CallSpec, options: dict[str, Any]) -> list[int]:
        """Engines that run a call."""
        numbers = [number for number in self.numbers if not (spec.compares and number in self._stale)]
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
        before, self._states[number] = self._states[number], answer.state
        if (version := answer.state.weight_version) != before.weight_version:
            for flight in self._live.values() if self._keeps_tokens else ():
                if flight.engine == number:
                    for index in set(range(flight.n)) - flight.ended:
                        flight.note_version(index, version)
        if (pending := self._calls.get(answer.number)) is not None:
            if pending.replaces_weights and answer.kind is None:
                self._stale.discard(number)
            self._settle_call(pending, number, answer)

    def _settle_call(self, pending: PendingCall, number: int, answer: wire.Answer | None) -> None:
        if not pending.settle(number, answer):
            return
        del self._calls[pending.number]
        self._sum_states(() if self._reachable else [each.state for each in pending.answers.values()])
        if pending.spec.empties_cache:
            self._router.forget_cached()
        pending.on_done()
        for started in list(self._starting):
            self._catch_up(started)
        self._start_lost()

    def _sum_states(self, last_states: Sequence[EngineState] = ()) -> None:
        """Updates `state` from all engines that have caught up. `last_states`: answered states, if no engine is
        left."""
        states = [self._states[number] for number in self.numbers if number not in self._starting]
        if states or last_states:
            self.state.sum_up(states or last_states)

    # -- engines that are lost ----------------------------------------------------------------------------------

    def lose(self, number: int, reason: str) -> None:
        """Handles the loss of an engine: its requests continue on others, before those that wait."""
        self._reachable.discard(number)
        self._states[number] = EngineState()
        self._starting.pop(number, None)
        self._stale.discard(number)
        bound = self._router.leave(number)
        self._stats.restart(number)
        if self._restart is None:
            self.ended = reason
        elif self.num_restarts[number] < MOST_RESTARTS:
            self.num_restarts[number] += 1
            when = ", and computes once all weights have been replaced again" if self.state.weights_replaced else ""
            logger.warning("replica %d was lost and is being restarted%s: %s", number, when, reason)
            self._to_restart.append(number)
        else:
            logger.warning("replica %d was lost; the others continue without it: %s", number, reason)
        for request_id in reversed(bound):
            flight = self._live[request_id]
            losses = flight.note_loss()
            if flight.is_aborted:
                self._drop(flight)
            elif losses == MOST_LOSSES:
                self._drop(flight, f"{losses} replicas were lost while they computed this request: {reason}")
            else:
                self._queue(flight, first=True)
        for pending in list(self._calls.values()):
            if number in pending.waiting - pending.relay_to:  # perhaps it received weights for the others
                why = f"replica {number}, which received them, was lost: {reason}"
                self._relay(pending, wire.Bucket(pending.number, None, why))
            self._settle_call(pending, number, None)
        self._start_lost()
        if not self._reachable - self._stale:
            self.ended = self.ended or f"no replica is left: replica {number}: {reason}"
        self.bind()

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
        ready, has the weights, and runs no call."""
        info = self._starting[number]
        if info is None or number in self._stale or any(number in each.waiting for each in self._calls.values()):
            return
        own, others = self._states[number], self.state
        calls = [(spec, name, options) for name, spec in CALLS.items() for options in spec.missed(own, others)]
        if not calls:
            del self._starting[number]
            self._join(number, info)
            self._sum_states()
            self.bind()
        for spec, name, options in calls:
            pending = self._begin(spec, name, options, [number])
            pending.on_done = partial(self._note_caught_up, number, pending)

    def _note_caught_up(self, number: int, pending: PendingCall) -> None:
        """Handles the end of a call that an engine had missed; an engine on which it failed is given up."""
        if number in self._starting:
            try:
                pending.result()
            except Exception as error:
                self._starting[number] = None
                self._give_up(number, f"could not catch up with the others: {pending.name}: {error}")
