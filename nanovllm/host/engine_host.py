"""Loop around one engine that a driver controls by frames: it steps while there is work, and runs calls between two
steps."""

import pickle
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from copy import copy
from functools import partial
from operator import add
from typing import TYPE_CHECKING, Any, Protocol

from nanovllm.engine.calls import CALLS, Steps
from nanovllm.host import wire
from nanovllm.host.slow_checks import SlowChecks
from nanovllm.host.step_clock import StepClock
from nanovllm.host.watchdog import CALL_SECONDS, Watchdog, step_watchdog

if TYPE_CHECKING:
    import torch

    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.outputs import StepColumns

_STATS_SECONDS = 0.1  # between two frames with counters, while the engine is busy
_IDLE_LOOK = 1.0  # seconds between two looks at the ranks, while there is no work
_AWAKE_SECONDS = 0.001
_TAKE_IN_SECONDS = 0.05
"""Seconds of frames that are taken in between two steps: some hundred requests of usual size."""
_SLOW_OPTIONS = {"structured_outputs": 32, "bad_words": 1}
"""Options whose check may be slow, and how many threads each has for its checks. Those of grammars wait for the process
that compiles them; fewer may be there for long than there are threads."""


class Intake(Protocol):
    """Source of the driver's frames."""

    def next(self, seconds: float) -> wire.Down | None:
        """Returns the next frame, or None after `seconds` or `wake`. Raises EOFError if the driver has left."""

    def wake(self) -> None:
        """Ends a wait in `next`. From any thread."""


class EngineHost:
    """An engine and its connection to the driver."""

    def __init__(self, engine: "LLMEngine", send: Callable[[wire.Up], None], intake: Intake) -> None:
        """`send` is called from several threads."""
        self._engine, self._send, self._intake = engine, send, intake
        engine.loop.rests = True
        self._calls: deque[wire.Call] = deque()
        """Calls that have not begun."""
        self._running: tuple[wire.Call, Steps] | None = None
        """The call that has begun and waits for steps."""
        self._buckets: deque[wire.Bucket] = deque()
        self._call_watch = Watchdog(CALL_SECONDS, "call")
        self._prompts_due: set[int] = set()
        """Requests whose prompt log-probabilities have not been sent yet."""
        self._fresh: set[int] = set()
        """Requests without a token."""
        self._masks_sent: dict[int, list[int]] = {}
        """Number of sampling masks that were sent for each completion of the requests that want them."""
        self._slow = {
            name: SlowChecks(f"nanovllm-{name}", num_threads, self._add_slow, engine.abort)
            for name, num_threads in _SLOW_OPTIONS.items()
        }
        self._awake_until = self._stats_due = 0.0

    def run(self) -> None:
        """Serves until the driver leaves. Raises the error of an engine that has failed."""
        engine, was_busy = self._engine, False
        clock = StepClock() if engine.config.device == "cuda" and engine.config.uses("late_scheduling") else None
        watch = step_watchdog(engine.config)
        with suppress(EOFError):
            while True:
                self._advance_calls()
                is_busy = engine.is_busy()
                if (is_busy and time.monotonic() >= self._stats_due) or (was_busy and not is_busy):
                    self._send_stats()
                was_busy = is_busy
                if is_busy:
                    if clock is not None and engine.loop.running_step is not None:
                        clock.wait(engine.executor.has_result)
                        self._take_in(0.0)
                    with watch:
                        gained = engine.step()
                    if clock is not None:
                        clock.note(engine.loop.running_step)
                    self._send_gained(gained)
                elif engine.executor.failed:
                    engine.executor.check()  # raises
                idle = not is_busy and not self._calls and time.monotonic() > self._awake_until
                self._take_in(_IDLE_LOOK if idle else 0.0)

    def _take_in(self, seconds: float) -> None:
        """Takes in what has come, after a wait of at most `seconds`. If there is much of it, the rest waits for a step
        of the requests that run."""
        frame = self._intake.next(seconds)
        end = time.monotonic() + _TAKE_IN_SECONDS
        while frame is not None:
            self.handle(frame)
            frame = self._intake.next(0.0) if time.monotonic() < end else None

    def handle(self, frame: wire.Down) -> None:
        """Queues the request or call of a frame."""
        if isinstance(frame, wire.Add):
            self._take_request(frame)
        elif isinstance(frame, wire.Abort):
            self.abort(frame.request_id)
        elif isinstance(frame, wire.Call):
            self._calls.append(frame)
        elif isinstance(frame, wire.Bucket):
            self._buckets.append(frame)
        elif isinstance(frame, wire.Rouse):
            self._awake_until = time.monotonic() + _AWAKE_SECONDS

    # -- requests -----------------------------------------------------------------------------------------------

    def _take_request(self, frame: wire.Add) -> None:
        slow = next((name for name in _SLOW_OPTIONS if name in frame.params), None)
        if slow is None or (slow == "structured_outputs" and self._is_compiled(frame)):
            self._add(frame)
        else:
            self._slow[slow].put(frame)

    def _is_compiled(self, frame: wire.Add) -> bool:
        """Whether the request's grammar is compiled already, so that it need not wait behind others."""
        return "bad_words" not in frame.params and self._engine.book.knows_grammar(frame.params["structured_outputs"])

    def _add_slow(self, frame: wire.Add) -> None:
        self._add(frame)
        self._intake.wake()

    def _add(self, frame: wire.Add) -> None:
        engine = self._engine
        try:
            prompt, params = frame.prompt(), wire.sampling_params(frame.params)
            engine.book.check(prompt, params)  # compiles its grammar
            if params.prompt_logprobs is not None:
                self._prompts_due.add(frame.request_id)
            known = frame.known_ids()
            if params.sampling_mask and params.most_tokens:
                self._masks_sent[frame.request_id] = [len(known)] * params.n
            self._fresh.add(frame.request_id)
            engine.add_request(prompt, params, frame.request_id, known)
        except Exception as error:  # concerns this request only
            self._prompts_due.discard(frame.request_id)
            self._fresh.discard(frame.request_id)
            self._masks_sent.pop(frame.request_id, None)
            is_users = isinstance(error, (ValueError, TypeError))
            if not is_users:
                traceback.print_exc()
            self._send(wire.Refused(frame.request_id, str(error) if is_users else None))

    def abort(self, request_id: int) -> None:
        """Ends a request, even if it is still being checked."""
        for checks in self._slow.values():
            if (request := checks.withdraw(request_id)) is not None:
                self._send(wire.aborted(request_id, request.params.get("n", 1)))
        self._engine.abort(request_id)

    # -- calls --------------------------------------------------------------------------------------------------

    def _advance_calls(self) -> None:
        """Runs calls in order, until one has to wait for steps. A `resume` behind it ends that wait."""
        while self._running or self._calls:
            if self._running is None:
                call = self._calls.popleft()
                self._running = call, self._steps(call)
            if not self._go_on(*self._running):
                if all(each.name != "resume" for each in self._calls):
                    return
                call, steps = self._running
                steps.close()
                self._answer(call, kind="RuntimeError", message=f"{call.name}: resumed before it was done")
            self._running = None

    def _steps(self, call: wire.Call) -> Steps:
        options = dict(call.options)
        if CALLS[call.name].in_flight(options)[1] == "abort":
            for request_id in [number for checks in self._slow.values() for number in checks.waiting]:
                self.abort(request_id)
        if call.takes_weights:
            options["weights"] = self._weights(call.number)
        if call.relays:
            from nanovllm.host.weights import sent

            options["relay"] = partial(sent, send=lambda data: self._send(wire.Bucket(call.number, data)))
        made = CALLS[call.name].run(self._engine, **options)
        return (yield from made) if isinstance(made, Generator) else made

    def _go_on(self, call: wire.Call, steps: Steps) -> bool:
        """Runs the call as far as possible without a step; returns whether it is done."""
        try:
            with self._call_watch:
                next(steps)
        except StopIteration as end:
            self._answer(call, end.value)
        except Exception as error:
            kind = wire.kind_of(error)
            if kind is None:
                traceback.print_exc()
            self._answer(call, None, kind or "", str(error))
            if self._engine.executor.failed:
                raise
        else:
            return False
        return True

    def _answer(self, call: wire.Call, value: Any = None, kind: str | None = None, message: str = "") -> None:
        """Sends the answer, after all tokens that were computed before it."""
        engine = self._engine
        if call.takes_weights:
            with suppress(RuntimeError):
                deque(self._weights(call.number), 0)  # drops what the call has not read
        if call.relays:
            self._send(wire.Bucket(call.number, None, None if kind is None else "the first engine did not take them"))
        if not engine.executor.failed:
            engine.loop.settle()
            self._send_gained(engine.loop.take_unreported())
            self._send_stats()
        self._send(wire.Answer(call.number, value, copy(engine.state), kind, message))

    def _weights(self, number: int) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yields (checkpoint name, tensor) from the buckets of a call, up to the last one."""
        while True:
            while not self._buckets:
                if (frame := self._intake.next(_IDLE_LOOK)) is not None:
                    self.handle(frame)
            bucket = self._buckets.popleft()
            if bucket.number != number:
                continue
            if bucket.data is None:
                self._buckets.appendleft(bucket)  # for the next reader
                if bucket.error is not None:
                    raise RuntimeError(bucket.error)
                return
            yield from pickle.loads(bucket.data)

    # -- results ------------------------------------------------------------------------------------------------

    def _send_stats(self) -> None:
        self._send(self._with_stats(wire.Step([], [])))

    def _with_stats(self, step: wire.Step) -> wire.Step:
        """Adds the current counters, so that they include every request whose end the driver has seen."""
        self._stats_due = time.monotonic() + _STATS_SECONDS
        step.stats, step.computed = self._engine.stats(), self._engine.computed
        return step

    def _send_gained(self, gained: "StepColumns") -> None:
        if len(gained):
            kept = self._new_masks() if self._masks_sent else []
            begun = self._begun(gained) if self._fresh else []
            step = self._step(gained)
            step.kept, step.begun = kept, begun
            if step.finishes:
                self._with_stats(step)
            self._send(step)

    def _step(self, gained: "StepColumns") -> wire.Step:
        engine = self._engine
        if not gained.endings and not gained.logprobs:  # the usual step
            return wire.Step(list(map(add, gained.request_ids, gained.indices)), gained.token_ids)
        frame = wire.Step([], [])
        for entry, (request_id, index, token) in enumerate(
            zip(gained.request_ids, gained.indices, gained.token_ids, strict=True)
        ):
            row = request_id + index
            if (found := gained.logprobs.get(entry)) is not None:
                lines, position = found
                if (words := lines.words(position)) is not None:
                    frame.logprobs.append((row, words.tobytes()))
                if request_id in self._prompts_due:
                    self._send_prompt(request_id, frame)
            if (ending := gained.endings.get(entry)) is None:
                frame.rows.append(row)
                frame.tokens.append(token)
                continue
            last = token if token >= 0 else None
            versions = ending.weight_versions if any(version for version, *_ in ending.weight_versions) else []
            pooled = None if ending.pooled is None else ending.pooled.tobytes()
            frame.finishes.append(wire.Finish(row, last, ending.reason, ending.stop_reason, versions, pooled))
            if engine.book.knows(request_id) and engine.book.is_finished(request_id):  # the last of n reports it
                if request_id in self._prompts_due:
                    self._send_prompt(request_id, frame)
                self._masks_sent.pop(request_id, None)
                frame.done.append(_done(request_id, engine.book.forget(request_id)))
        return frame

    def _begun(self, gained: "StepColumns") -> list[tuple[int, int]]:
        """Requests that have their first token, or their end: see wire.Step.begun."""
        found = self._fresh.intersection(gained.request_ids)
        self._fresh -= found
        rows = self._engine.book.rows
        return [(number, rows[number][0].num_prompt_cached_tokens or 0) for number in found if number in rows]

    def _new_masks(self) -> list[tuple[int, bytes]]:
        """Sampling masks of the tokens since the last call: see wire.Step.kept."""
        found: list[tuple[int, bytes]] = []
        for request_id, sent in list(self._masks_sent.items()):
            for seq in self._engine.book.rows.get(request_id, []):
                assert seq.sampling is not None and seq.sampling.kept_ids is not None
                new = seq.sampling.kept_ids[sent[seq.index] :]
                sent[seq.index] += len(new)
                found += [(request_id + seq.index, ids.astype("int32").tobytes()) for ids in new if ids is not None]
        return found

    def _send_prompt(self, request_id: int, frame: wire.Step) -> None:
        """Adds the prompt's log-probabilities."""
        rows = self._engine.book.prompt_logprobs(request_id)
        words = [] if rows is None else [rows.words(position) for position in range(len(rows))]
        frame.prompts.append((request_id, [None if each is None else each.tobytes() for each in words]))
        self._prompts_due.discard(request_id)


def _done(request_id: int, seqs: list[Any]) -> wire.Done:
    ending = seqs[0].ending
    metrics = ending.metrics
    begin = metrics.first_scheduled_time or metrics.finished_time
    first = metrics.first_token_time or metrics.finished_time
    return wire.Done(
        request_id,
        ending.num_cached_tokens,
        queued=begin - metrics.arrival_time,
        prefill=first - begin,
        decode=metrics.finished_time - first,
    )
