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
from typing import TYPE_CHECKING, Any, Protocol

from nanovllm.engine.calls import CALLS, Steps
from nanovllm.engine.step import Step, aborted
from nanovllm.host import wire
from nanovllm.host.slow_checks import SlowChecks
from nanovllm.host.step_clock import StepClock
from nanovllm.host.watchdog import CALL_SECONDS, Watchdog, step_watchdog

if TYPE_CHECKING:
    import torch

    from nanovllm.engine.llm_engine import LLMEngine

_STATS_SECONDS = 0.1  # between two frames with counters, while the engine is busy
_IDLE_LOOK = 1.0  # seconds between two looks at the ranks, while there is no work
_AWAKE_SECONDS = 0.001
_TAKE_IN_SECONDS = 0.03
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
        self._fresh: dict[int, bool] = {}
        """Requests without a token, and whether they want log-probabilities of their prompts."""
        self._detailed: dict[int, list[int]] = {}
        """Requests that want log-probabilities or sampling masks: how many tokens of each completion have theirs."""
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
                is_called = self._calls or self._running is not None
                idle = not is_busy and not is_called and time.monotonic() > self._awake_until
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
            known = frame.known_ids()
            if (params.logprobs is not None or params.sampling_mask) and params.most_tokens:
                self._detailed[frame.request_id] = [len(known)] * params.n
            self._fresh[frame.request_id] = params.prompt_logprobs is not None
            engine.add_request(prompt, params, frame.request_id, known)
        except Exception as error:  # concerns this request only
            self._fresh.pop(frame.request_id, None)
            self._detailed.pop(frame.request_id, None)
            is_users = isinstance(error, (ValueError, TypeError))
            if not is_users:
                traceback.print_exc()
            self._send(wire.Refused(frame.request_id, str(error) if is_users else None))

    def abort(self, request_id: int) -> None:
        """Ends a request, even if it is still being checked."""
        for checks in self._slow.values():
            if (request := checks.withdraw(request_id)) is not None:
                self._send(aborted(request_id, request.params.get("n", 1)))
        self._engine.abort(request_id)

    # -- calls --------------------------------------------------------------------------------------------------

    def _advance_calls(self) -> None:
        """Runs calls in order, until one has to wait for steps. A `resume` behind it ends that wait."""
        while self._running or self._calls:
            if self._running is None:
                call = self._calls.popleft()
                self._running = call, self._steps(call)
            if not self._go_on(*self._running):
                if CALLS[self._running[0].name].runs_beside or all(each.name != "resume" for each in self._calls):
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
        self._send(self._with_stats(Step()))

    def _with_stats(self, step: Step) -> Step:
        """Adds the current counters, so that they include every request whose end the driver has seen."""
        self._stats_due = time.monotonic() + _STATS_SECONDS
        step.stats, step.computed = self._engine.stats(), self._engine.computed
        return step

    def _send_gained(self, step: Step) -> None:
        if not step:
            return
        if self._fresh:
            self._add_begun(step)
        for request_id, sent in self._detailed.copy().items():  # threads add to it
            self._add_details(step, request_id, sent)
        for done in step.done:
            self._engine.book.forget(done.request_id)
            self._detailed.pop(done.request_id, None)
        self._send(self._with_stats(step) if step.finishes else step)

    def _add_begun(self, step: Step) -> None:
        """Adds what is known of a prompt with its first token, or its end."""
        book = self._engine.book
        found = {seq.request_id for number in step.numbers if (seq := book.by_number.get(number)) is not None}
        for request_id in found & self._fresh.keys():
            if self._fresh.pop(request_id):
                rows = book.prompt_logprobs(request_id)
                words = [] if rows is None else [rows.words(position) for position in range(len(rows))]
                step.prompts.append((request_id, [None if each is None else each.tobytes() for each in words]))
            step.begun.append((request_id, book.rows[request_id][0].num_prompt_cached_tokens or 0))

    def _add_details(self, step: Step, request_id: int, sent: list[int]) -> None:
        """Adds what was asked for beside tokens, of those that have come since the last step."""
        for seq in self._engine.book.rows.get(request_id, ()):
            begin, end, row = sent[seq.index], seq.num_output_tokens, seq.sampling
            assert row is not None
            sent[seq.index] = end
            if row.logprob_rows is not None:
                lines = map(row.logprob_rows.words, range(begin, end))
                step.logprobs += [(seq.number, line.tobytes()) for line in lines if line is not None]
            if row.kept_ids is not None:
                kept = row.kept_ids[begin:end]
                step.kept += [(seq.number, ids.astype("int32").tobytes()) for ids in kept if ids is not None]
