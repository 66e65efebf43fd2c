"""Requests of a fleet: assigns them to engines, keeps their tokens, and moves those of a lost engine to others. Pure.

A completion can continue on another engine after the tokens it has, because tokens are sampled by seed and position. If
a request has several, each of them continues by itself.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nanovllm.engine.engine_stats import EngineStats
from nanovllm.engine.prefix_keys import prefix_keys
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.step import Done, Finish, Step, aborted
from nanovllm.host import wire
from nanovllm.host.fleet_stats import FleetStats
from nanovllm.host.flight import NO_BOUND, Completion, Flight
from nanovllm.host.router import Load, Router
from nanovllm.wire.state import PageGroup

MOST_LOSSES = 3  # of engines in a row while they compute a request, without a new token: it may be what crashes them

Send = Callable[[int, list[wire.Down]], None]
"""Sends frames to an engine: (its number, frames)."""


class FleetRequests:
    """Unfinished requests of several engines."""

    def __init__(self, infos: Sequence[dict[str, Any]], send: Send, keeps_tokens: bool) -> None:
        """`infos`: of each engine (program.describe). `keeps_tokens`: whether requests can move to other engines."""
        self._send, self._keeps_tokens = send, keeps_tokens
        self._block_size, count = infos[0]["block_size"] or 1, len(infos)
        self.max_total = min(info["max_model_len"] for info in infos)
        """Tokens of the longest text that every engine can hold."""
        self._is_alone = count == 1
        self._hashes_wanted = count > 1 and infos[0].get("prefix_caching", True)
        rows = NO_BOUND if self._is_alone else infos[0]["max_num_seqs"]
        groups = tuple(PageGroup(*group) for group in infos[0]["page_groups"])
        self.router = Router(count, self._block_size, rows, groups)
        self._versions = [0] * count
        """Version of the weights of each engine."""
        self.out: list[wire.Up] = []
        """Results for the owner of the requests, who takes them out."""
        self._live: dict[int, Flight] = {}
        """Unfinished requests and parts of requests, by their id for engines."""
        self._split: dict[int, set[int]] = {}
        """Unfinished parts of each request that was split: request id -> ids for engines."""
        self._rows: dict[int, Completion] = {}
        """Completions of unfinished requests by row, if tokens are kept."""
        self._stats = FleetStats(count)
        for number, info in enumerate(infos):
            self.join(number, info)

    # -- engines ------------------------------------------------------------------------------------------------

    def join(self, number: int, info: dict[str, Any], adapters: Iterable[str] = ()) -> None:
        """Lets an engine have requests, but for those with others than these adapters. A single engine has no limit,
        since its own scheduler knows better."""
        lacks = {*self.adapters()}.difference(adapters)
        self.router.join(number, NO_BOUND if self._is_alone else info["num_kvcache_blocks"], lacks)
        self._end_stranded()

    def _end_stranded(self) -> None:
        """Ends the requests whose adapter has no name any more, and that no engine holds."""
        for row in self.router.stranded():
            self.router.withdraw(row)
            self._drop(self._live[row], "its adapter was removed or replaced, and the replicas that held it were lost")

    def leave(self, number: int, reason: str) -> None:
        """Moves the requests of a lost engine to others, before those that wait."""
        self._versions[number] = 0
        self._stats.restart(number)
        for lost in reversed(self.router.leave(number)):
            flight = self._live[lost]
            losses = flight.note_loss()
            if flight.is_aborted:
                self._drop(flight)
            elif losses == MOST_LOSSES:
                self._drop(flight, f"{losses} replicas were lost while they computed this request: {reason}")
            else:
                for part in reversed(self._split_up(flight)):
                    self._queue(part, first=True)
        self._end_stranded()

    def _split_up(self, flight: Flight) -> list[Flight]:
        """Puts the parts of a request in its place (Flight.split)."""
        parts = flight.split()
        if parts != [flight]:
            del self._live[flight.row]
            self._split[flight.request_id] = {part.row for part in parts}
            self._live.update((part.row, part) for part in parts)
        return parts

    def note_version(self, number: int, version: int) -> None:
        """Notes that the next tokens of an engine come from weights of this version."""
        if version == self._versions[number]:
            return
        self._versions[number] = version
        for flight in self._live.values() if self._keeps_tokens else ():
            for completion in flight.completions if flight.engine == number else ():
                if not completion.has_ended:
                    completion.note_version(version)

    def stats(self) -> EngineStats:
        """Counters of all engines, summed up."""
        return self._stats.total(self.router.numbers, self.router.num_waiting)

    def computed(self) -> tuple[int, int]:
        """See FleetStats.computed."""
        return self._stats.computed()

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Number of unfinished requests."""
        return len(self._live)

    def adapters(self) -> list[str]:
        """Digests of the adapters of unfinished requests, sorted."""
        return sorted({found for flight in self._live.values() if (found := flight.prompt.adapter) is not None})

    def has_begun(self) -> bool:
        """Whether any request was sent to an engine."""
        return any(flight.engine is not None for flight in self._live.values())

    def add(self, request_id: int, prompt: Prompt, params: dict[str, Any], known: Sequence[int] = ()) -> None:
        """Queues a request; `bind` sends it."""
        completions = [Completion(list(known)) for _ in range(params.get("n", 1))]
        self._live[request_id] = flight = Flight(request_id, request_id, prompt, params, completions)
        if self._keeps_tokens:
            self._rows.update(enumerate(completions, request_id))
        self._queue(flight)
        self._end_stranded()

    def _queue(self, flight: Flight, first: bool = False) -> None:
        """Queues a request at the router; `first`: in front of those that wait."""
        length = len(flight.prompt) + len(flight.known)
        total = min(self.max_total, len(flight.prompt) + flight.most_tokens)
        hashes = self._hashes(flight, flight.known)
        load = Load(flight.row, hashes, length, max(0, total - length), flight.n, flight.prompt.adapter)
        self.router.add(load, first)

    def _hashes(self, flight: Flight, output: list[int]) -> list[bytes]:
        """Prefix keys for the router; empty if it has no use for them."""
        if not self._hashes_wanted:
            return []
        return prefix_keys(flight.prompt.token_ids + output, self._block_size, flight.prompt.extras)

    def bind(self) -> None:
        """Sends the requests that engines have room for. Those of an engine are sent at once, because requests that
        arrive one by one would begin in as many small steps."""
        batches: dict[int, list[wire.Down]] = {}
        for number, bound in self.router.bind():
            batches.setdefault(number, []).append(self._bound(number, self._live[bound]))
        for number, batch in batches.items():
            self._send(number, batch)

    def _bound(self, number: int, flight: Flight) -> wire.Add:
        flight.engine = number
        for completion in flight.completions if self._keeps_tokens else ():
            completion.num_engines += 1
            completion.note_version(self._versions[number])
        params, most = flight.params, self.max_total - len(flight.prompt)
        if not self._is_alone and flight.most_tokens > most:
            # Another engine that may have to continue it may have a smaller KV cache.
            params = {**params, "max_tokens": most, "min_tokens": min(most, params.get("min_tokens", 0))}
        return wire.Add.of(flight.row, flight.prompt, params, flight.known)

    def abort(self, request_id: int) -> None:
        """Ends a request early; unknown ones are ignored."""
        for part in sorted(self._split.get(request_id, (request_id,))):
            if (flight := self._live.get(part)) is not None:
                self._abort(flight)

    def _abort(self, flight: Flight) -> None:
        flight.is_aborted = True
        if flight.engine is None:
            self.router.withdraw(flight.row)
            self._drop(flight)
        else:
            self._send(flight.engine, [wire.Abort(flight.row)])

    def abort_waiting(self) -> None:
        """Ends the requests that no engine has."""
        for flight in [each for each in self._live.values() if each.engine is None]:
            self._abort(flight)

    def _drop(self, flight: Flight, why: str | None = None) -> None:
        """Ends unfinished completions with reason "abort" and stop reason `why`."""
        step = aborted(flight.row, flight.n, why)
        ends, step.finishes = step.finishes, []
        for end, completion in zip(ends, flight.completions, strict=True):
            if not completion.has_ended:
                end.weight_versions = completion.spans()
                step.finishes.append(end)
        step.done = self._end(flight, step.done[0])
        self.out.append(step)

    def _end(self, flight: Flight, done: Done) -> list[Done]:
        """Forgets a request, or a part of one. Returns `done` if that is the end of the request, else nothing."""
        del self._live[flight.row]
        for row in range(flight.row, flight.row + flight.n):
            self._rows.pop(row, None)
        if (rest := self._split.get(flight.request_id)) is not None:
            rest.discard(flight.row)
            if rest:
                return []
            del self._split[flight.request_id]
        done.request_id = flight.request_id
        return [done]

    # -- results ------------------------------------------------------------------------------------------------

    def refuse(self, number: int, refused: wire.Refused) -> None:
        """Ends a request that its engine does not take."""
        if (flight := self._live.get(refused.request_id)) is None:
            return
        self._release(number, flight)
        if flight.request_id in self._split:  # its owner has had tokens of it
            self._drop(flight, refused.message or "internal error; see the log")
        else:
            self._end(flight, Done(flight.row))
            self.out.append(refused)

    def take_step(self, number: int, step: Step) -> None:
        """Takes in results of an engine. A loop over all rows of a step: kept lean."""
        if step.stats is not None:
            self._stats.take(number, step.stats, step.computed)
        if self._keeps_tokens:
            known = self._rows
            for row, token in zip(step.rows, step.tokens, strict=True):
                if (completion := known.get(row)) is not None:
                    completion.tokens.append(token)
            for end in step.finishes:
                self._note_end(end)
        if self._split:
            live = self._live
            step.prompts = [(live[part].request_id, lines) for part, lines in step.prompts if part in live]
            step.begun = [(live[part].request_id, count) for part, count in step.begun if part in live]
        self.out.append(step)
        if step.done:
            ended, step.done = step.done, []
            for done in ended:
                if (flight := self._live.get(done.request_id)) is not None:
                    self._release(number, flight)
                    step.done += self._end(flight, done)
            self.bind()

    def _note_end(self, end: Finish) -> None:
        if (completion := self._rows.get(end.row)) is None:
            return
        if end.token is not None:
            completion.tokens.append(end.token)
        completion.has_ended = True
        if completion.num_engines > 1:
            end.weight_versions = completion.spans()

    def _release(self, number: int, flight: Flight) -> None:
        """Tells the router that an engine has ended what it computed."""
        left = [digest for each in flight.completions for digest in self._hashes(flight, each.tokens[:-1])]
        self.router.finish(number, flight.row, flight.num_tokens, left)
