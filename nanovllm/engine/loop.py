"""The loop: schedule, launch, collect, finish. One step is scheduled and sent while the step before it runs."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from nanovllm.engine.drafting import PlaceCost
from nanovllm.engine.embeddings import finished
from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.engine_stats import ITERATION_TOKENS, EngineStats
from nanovllm.engine.sampling.section import StepSampling, sampling_of, take_scores
from nanovllm.engine.schedule import Schedule
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import Step
from nanovllm.engine.trace import Trace
from nanovllm.engine.work import Work
from nanovllm.executor.protocol import Executor
from nanovllm.model_config import ModelConfig
from nanovllm.wire.sampling import append_section


class Launched(NamedTuple):
    """Step that was launched and not collected. `sampling`: what its rows need beyond greedy and temperature."""

    schedule: Schedule
    sampling: StepSampling | None


class EngineLoop(Work):
    """Schedules, launches and collects steps; takes in requests and aborts of other threads between them. One thread at
    a time steps."""

    def __init__(self, executor: Executor, model_config: ModelConfig, trace: Trace | None, state: EngineState) -> None:
        super().__init__()
        self.executor, self.config, self._trace, self._state = executor, executor.config, trace, state
        self._pooling = model_config.pooling
        self.scheduler = Scheduler(
            self.config, executor.state_size, model_config.moe is None, executor.tokens_per_step,
            PlaceCost.of(model_config, self.config),
        )
        self._num_sampling = 0
        """Number of unfinished rows that need more than greedy or temperature."""
        self._launched: deque[Launched] = deque()
        self.rests = False
        """Whether requests wait, and no step is launched, while memory sleeps or weights are incomplete. False: `step`
        raises then."""
        self.num_prefill_tokens = 0
        """Prompt tokens computed so far (those found in the prefix cache not counted)."""
        self.num_decode_tokens = 0
        """Tokens computed so far by rows that decode."""
        self._num_generated = 0
        self._num_finished = {"stop": 0, "length": 0, "abort": 0}
        self._iterations = [0] * (len(ITERATION_TOKENS) + 1)
        """Histogram of launched steps by their tokens, with the bounds ITERATION_TOKENS."""

    def add(self, seqs: list[Sequence]) -> None:
        """Queues a request's rows. From any thread."""
        with self._work:
            self._num_sampling += sum(seq.sampling is not None for seq in seqs)
        self.ask(("add", seqs))

    def abort(self, requests: Iterable[list[Sequence]]) -> None:
        """Ends the unfinished rows of some requests. From any thread."""
        self.ask(*(("abort", seqs) for seqs in requests))

    @property
    def num_waiting(self) -> int:
        """Approximate number of requests that do not run: rows that wait, and entries of the inbox."""
        return len(self.scheduler.waiting) + len(self._inbox)

    @property
    def is_held(self) -> bool:
        """Whether no step may be launched now: in a pause, and where `rests` says so."""
        state = self._state
        return state.pause_mode is not None or (self.rests and bool(state.asleep or state.incomplete))

    def close(self) -> None:
        """Makes every further step raise."""
        self._closed = True
        self.wake()

    def step(self) -> Step:
        """Launches a step if there is one, and takes in the results of the step before it."""
        self.raise_failure()
        if not (is_held := self.is_held):
            self._state.require_awake()
            self._state.require_weights()
        try:
            gained = self.take_unreported()
            self._drain_inbox(gained)
            schedule = None if is_held else self.scheduler.schedule()
            if schedule is not None:
                self._launch(schedule)
            depth = 1 if schedule is not None and self.config.uses("async_scheduling") else 0
            while len(self._launched) > depth:
                self._collect(gained)
            return gained
        except BaseException as error:
            self._error = error
            raise

    def _drain_inbox(self, step: Step) -> None:
        """Takes in what other threads asked for; adds the completions that were aborted to `step`."""
        while self._inbox:
            kind, seqs = self._inbox.popleft()
            for seq in seqs:
                if kind == "add":
                    self.scheduler.add(seq)
                elif seq.status is not SequenceStatus.FINISHED:
                    self.scheduler.abort(seq)
                    self._end(seq, None, step, time.perf_counter())

    def _launch(self, schedule: Schedule) -> None:
        packed = schedule.pack(self.config.max_num_seqs)
        speculates = self.executor.tokens_per_step > 1
        sampling = sampling_of(schedule, self.config.max_num_seqs, speculates) if self._num_sampling else None
        if sampling is not None:
            packed = append_section(packed, sampling.section)
        now = time.perf_counter()  # before the launch, which takes the whole step on a CPU
        for slot, digest in schedule.adapters:
            self.executor.call("adapters.place", slot, digest)
        self.executor.launch(packed)
        self._launched.append(Launched(schedule, sampling))
        self._iterations[bisect_left(ITERATION_TOKENS, schedule.num_tokens)] += 1
        self.num_decode_tokens += schedule.num_old_rows * schedule.places
        self.num_prefill_tokens += schedule.num_prefill_tokens
        if self._trace is not None:
            self._trace.launched(schedule, now)
        for seq in schedule.new_slots:
            if seq.metrics.first_scheduled_time is None:
                seq.metrics.first_scheduled_time = now

    def _collect(self, step: Step) -> None:
        """Waits for the oldest launched step, and adds what it gained to `step`. A loop over all rows: kept lean."""
        tokens, scores = self.executor.collect()
        schedule, sampling = self._launched.popleft()
        num_drafted = tokens.pop() if self.executor.tokens_per_step > 1 else None
        if scores is not None and scores.pooled is not None:
            self._take_pooled(schedule, scores.pooled)
            scores = None
        gained = self.scheduler.apply(schedule, tokens, num_drafted)
        if scores is not None:
            assert sampling is not None
            take_scores(sampling, gained, scores)
        now = time.perf_counter()
        if self._trace is not None:
            self._trace.collected(now, self.stats())
        self._num_generated += len(gained)
        finished, rows, token_ids = SequenceStatus.FINISHED, step.rows, step.tokens
        ended: dict[Sequence, int] = {}
        for seq, token_id in gained:
            metrics = seq.metrics
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            metrics.token_times.append(now)
            if seq.status is finished:  # the last of its tokens goes with its end
                last, token_id = token_id, ended.get(seq, -1)
                ended[seq] = last
            if token_id >= 0:
                rows.append(seq.number)
                token_ids.append(token_id)
        for seq, token_id in ended.items():
            if is_dropped := seq.params.max_tokens == 0:
                self._num_generated -= 1
                seq.metrics.first_token_time = None
                seq.metrics.token_times.clear()
            self._end(seq, None if is_dropped else token_id, step, now)

    def _take_pooled(self, schedule: Schedule, rows: np.ndarray) -> None:
        """Gives the rows that this step ends their embeddings. `rows`: float32 [sample rows, hidden]."""
        assert self._pooling is not None
        for seq, row in zip(schedule.seqs, rows, strict=False):
            seq.pooled = finished(row, self._pooling)

    def _end(self, seq: Sequence, token_id: int | None, step: Step, now: float) -> None:
        """Reports the end of a row, with its last token if this step brought one."""
        seq.metrics.finished_time = now
        if seq.sampling is not None:
            with self._work:  # add_request counts up in other threads
                self._num_sampling -= 1
        assert seq.ending is not None
        seq.ending.token = token_id
        self._num_finished[seq.ending.reason] += 1
        if self._trace is not None:
            self._trace.ended(seq)
        step.finishes.append(seq.ending)
        if (done := seq.done) is not None:
            step.done.append(done)

    # -- around steps -------------------------------------------------------------------------------------------

    @property
    def running_step(self) -> Schedule | None:
        """Oldest step that was launched and not collected."""
        return self._launched[0].schedule if self._launched else None

    def settle(self, then: Callable[[], None] = lambda: None) -> None:
        """Collects all launched steps, whose outputs the next step hands out, then calls `then`. If either is
        interrupted, by a second Ctrl-C say, the engine cannot go on."""
        try:
            while self._launched:
                self._collect(self._unreported)
            then()
        except BaseException as error:
            self._error = error
            raise

    def take_in(self) -> None:
        """Takes in requests and aborts of other threads without a step. The next step hands out what was aborted."""
        self.settle(lambda: self._drain_inbox(self._unreported))

    def raise_failure(self) -> None:
        super().raise_failure()
        self.executor.check()

    def has_unfinished_requests(self) -> bool:
        return bool(self._inbox or self._launched or self._unreported or self.scheduler.has_unfinished())

    def is_busy(self) -> bool:
        """Whether a step now has something to do or to report: also while requests are held back, or all are."""
        if self._inbox or self._launched or self._unreported:
            return True
        scheduler = self.scheduler
        return not self.is_held and (scheduler.has_begun() if scheduler.holds_new else scheduler.has_unfinished())

    def stats(self) -> EngineStats:
        """Gauges of now, and counters since the start. From any thread, at any time."""
        scheduler = self.scheduler
        memory, drafting = scheduler.memory, scheduler.drafting
        used = 1 - memory.num_free_blocks / memory.num_blocks
        if memory.lines is not None:  # those of kept states are free, as blocks of cached pages are
            used = max(used, len(scheduler.running) / min(memory.lines.count, self.config.max_num_seqs))
        return EngineStats(
            num_running=len(scheduler.running), num_waiting=len(scheduler.waiting),
            kv_cache_usage=used, prompt_tokens=scheduler.num_prompt_tokens,
            generation_tokens=self._num_generated,
            prefix_cache_queries=scheduler.num_prompt_tokens if self.config.enable_prefix_caching else 0,
            prefix_cache_hits=scheduler.num_prompt_cached_tokens,
            prefix_cache_state_misses=memory.cache.num_state_misses, num_preemptions=scheduler.num_preemptions,
            finished=dict(self._num_finished), iteration_tokens=tuple(self._iterations),
            iteration_tokens_sum=self.num_prefill_tokens + self.num_decode_tokens,
            spec_decode_num_drafts=drafting.num_drafts, spec_decode_num_draft_tokens=drafting.num_draft_tokens,
            spec_decode_num_accepted_tokens=sum(drafting.accepted),
            spec_decode_accepted_per_pos=tuple(drafting.accepted),
            running_adapters=self._state.adapter_names(scheduler.slots.adapters.running),
            waiting_adapters=self._state.adapter_names([*scheduler.waiting.adapters]),
        )  # fmt: skip
