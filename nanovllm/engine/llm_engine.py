"""The loop: schedule, launch, collect, finish. One step is scheduled and sent while the step before it runs."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.engine.control import EngineControl, Launched
from nanovllm.engine.sampling.plan import plan_sampling, take_logprobs
from nanovllm.engine.sampling.requests import RequestSampling
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step_plan import StepPlan
from nanovllm.engine.trace import Trace
from nanovllm.errors import QueueFull, shown
from nanovllm.logprobs import LogprobRows
from nanovllm.model_config import ModelConfig
from nanovllm.outputs import ITERATION_TOKENS, Ending, EngineStats, RequestMetrics, StepColumns
from nanovllm.sampling_params import SamplingParams
from nanovllm.tokenizer import Tokenizer
from nanovllm.wire.sampling import append_section

if TYPE_CHECKING:
    from nanovllm.executor.local import LocalExecutor

_SEED_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive request numbers land far apart


def _only_prompt(params: SamplingParams) -> SamplingParams:
    """What matters of a request whose one token is dropped."""
    return SamplingParams(
        n=params.n, temperature=0, max_tokens=0, ignore_eos=True, prompt_logprobs=params.prompt_logprobs,
        prompt_logprob_start=params.prompt_logprob_start, cache_salt=params.cache_salt,
    )  # fmt: skip


def _extremes(token_ids: list[int]) -> tuple[int, int]:
    """Least and largest of the ids. Raises ValueError where they are no flat list of integers."""
    if not all(isinstance(token_id, int) for token_id in token_ids):
        raise ValueError("prompt: token ids must be a flat list of integers")
    return min(token_ids), max(token_ids)


class LLMEngine(EngineControl):
    """Rank 0: owns the scheduler and, through the executor, all ranks. Token ids in, token ids out.

    add_request and abort may be called from any thread; what they ask for happens at the start of the next step. One
    thread at a time may step.
    """

    def __init__(
        self, executor: "LocalExecutor", model_config: ModelConfig, tokenizer: Tokenizer, trace: Trace | None = None
    ) -> None:
        """`executor`: started, and from here on this engine's to close."""
        self.config = executor.config
        self.model_config, self.tokenizer, self._trace = model_config, tokenizer, trace
        self.request_sampling = RequestSampling(tokenizer, model_config, self.config.logprobs_mode)
        assert self.config.kvcache_block_size and self.config.max_model_len
        num_blocks, block_size = executor.num_kvcache_blocks, self.config.kvcache_block_size
        super().__init__(executor, Scheduler(self.config, num_blocks, block_size, is_dense=model_config.moe is None))
        self._num_sampling = 0
        """Unfinished rows that need more than greedy or temperature."""
        self._num_requests = 0
        self.num_prefill_tokens = 0
        """Prompt tokens computed so far (those found in the prefix cache not counted)."""
        self.num_decode_tokens = 0
        """Tokens computed so far by rows that had one to compute."""
        self._num_generated = 0
        self._num_finished = {"stop": 0, "length": 0, "abort": 0}
        self._iterations = [0] * (len(ITERATION_TOKENS) + 1)
        self.startup_seconds = 0.0

    # -- requests -----------------------------------------------------------------------------------------------

    def check_request(
        self, prompt_token_ids: list[int], params: SamplingParams, output_token_ids: Iterable[int] = ()
    ) -> None:
        """Raises ValueError naming what is wrong with a request and the bound it breaks."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params: must be SamplingParams, found {type(params).__name__}")
        length, limit = len(prompt_token_ids), self.max_total_tokens
        if length == 0:
            raise ValueError("prompt: must have at least one token")
        if length + min(1, params.max_tokens) > limit:
            name, value = self._length_limit()
            raise ValueError(f"prompt of {length} tokens: must be shorter than {name}={value} (one token is generated)")
        vocab = self.model_config.vocab_size
        ids = np.asarray(prompt_token_ids)
        is_flat = ids.ndim == 1 and ids.dtype.kind in "iu"
        # What numpy has no integer for stays as it is, to be named.
        low, high = (int(ids.min()), int(ids.max())) if is_flat else _extremes(prompt_token_ids)
        if low < 0 or high >= vocab:
            bad = low if low < 0 else high
            raise ValueError(f"prompt: token id {shown(bad)} must be in 0..{vocab - 1} (vocab_size={vocab})")
        self.request_sampling.check(params)
        if output_token_ids:
            self._check_output(length, [*output_token_ids], params)

    def _check_output(self, num_prompt_tokens: int, token_ids: list[int], params: SamplingParams) -> None:
        """What an output begins with that goes on."""
        name = "output_token_ids"
        most = self._max_total_tokens(num_prompt_tokens, params.max_tokens) - num_prompt_tokens
        if params.n > 1:
            raise ValueError(f"{name}: needs n=1, found n={params.n}")
        if len(token_ids) >= most or params.max_tokens == 0:
            raise ValueError(f"{name}: {len(token_ids)} given, must be fewer than the {most} that the output may have")
        low, high = _extremes(token_ids)
        if low < 0 or high >= self.model_config.vocab_size:
            raise ValueError(f"{name}: token ids must be in 0..{self.model_config.vocab_size - 1}")
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.model_config.eos_token_ids)}
        if found := ends.intersection(token_ids):
            raise ValueError(f"{name}: token {min(found)} ends the output: there is nothing to go on with")

    @property
    def max_total_tokens(self) -> int:
        """Longest prompt + output that this engine can serve, in tokens."""
        return self._length_limit()[1]

    def _length_limit(self) -> tuple[str, int]:
        assert self.config.max_model_len
        capacity = self.scheduler.capacity_tokens
        if capacity < self.config.max_model_len:
            return "KV cache tokens (num_kvcache_blocks * kvcache_block_size)", capacity
        return "max_model_len", self.config.max_model_len

    def reserve_ids(self, params: Iterable[SamplingParams]) -> list[int]:
        """Ids of requests with these parameters, ascending, for add_request to bring in any order."""
        with self._work:
            ids = [*accumulate((param.n for param in params), initial=self._num_requests)]
            self._num_requests = ids.pop()
        return ids

    def add_request(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: int | None = None,
        output_token_ids: list[int] | None = None,
    ) -> int:  # fmt: skip
        """Queues a request; returns its id. `request_id`: one that was reserved, for a request that was checked.
        `output_token_ids`: the output begins with these. From any thread.

        Raises ValueError as check_request does; QueueFull where max_queued_requests wait (reserved ids do not count).
        """
        if request_id is None:
            self.check_request(prompt_token_ids, params, output_token_ids or [])
        if params.max_tokens == 0:
            params = _only_prompt(params)
        eos = frozenset() if params.ignore_eos else frozenset(self.model_config.eos_token_ids)
        stop_ids = eos | frozenset(params.stop_token_ids)
        rows = self.request_sampling.rows(params, stop_ids, prompt_token_ids, output_token_ids or [])
        now = time.perf_counter()
        counts = request_id is None
        if request_id is None:
            [request_id] = self.reserve_ids([params])
        seqs = [
            Sequence(
                request_id + index, [*prompt_token_ids, *(output_token_ids or ())], params,
                num_prompt_tokens=len(prompt_token_ids), seed=self._seed(params, request_id, index),
                stop_token_ids=stop_ids,
                max_total_tokens=self._max_total_tokens(len(prompt_token_ids), params.max_tokens),
                metrics=RequestMetrics(arrival_time=now), parent_id=request_id, index=index, sampling=row,
            )
            for index, row in enumerate(rows)
        ]
        with self._work:
            if counts:
                self._check_queue()
            for seq in seqs:
                seq.note_version(self.weight_version)
            self._completions[request_id] = seqs
            self._num_sampling += sum(row is not None for row in rows)
            self._inbox.append(("add", seqs))
            self._work.notify_all()
        return request_id

    def _check_queue(self) -> None:
        limit = self.config.max_queued_requests
        waiting = self.num_waiting
        if limit is not None and waiting >= limit:
            raise QueueFull(f"max_queued_requests={limit}: {waiting} requests wait already")

    @property
    def num_waiting(self) -> int:
        """Requests that do not run, up to completions of n > 1."""
        return self.scheduler.num_waiting + len(self._inbox)

    def _max_total_tokens(self, num_prompt_tokens: int, max_tokens: int) -> int:
        if max_tokens == 0:
            return num_prompt_tokens + 1  # the KV of the token that is dropped is never stored
        return min(num_prompt_tokens + max_tokens, self.max_total_tokens)

    def _seed(self, params: SamplingParams, request_id: int, index: int) -> int:
        number = params.seed
        if number is None:
            number = self.config.seed + (request_id + 1) * _SEED_STRIDE
        if index:
            number += index if params.seed is not None else index * _SEED_STRIDE
        return (number + 2**63) % 2**64 - 2**63

    def abort(self, request_id: int) -> None:
        """Ends a request; its last StepOutput says "abort". Unknown and finished ids are ignored."""
        with self._work:
            seqs = self._completions.get(request_id)
            if seqs is not None:
                self._inbox.append(("abort", seqs))
                self._work.notify_all()

    def knows(self, request_id: int) -> bool:
        return request_id in self._completions

    def is_finished(self, request_id: int) -> bool:
        """Whether all completions of a known request have ended."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self._completions[request_id])

    def forget(self, request_id: int) -> list[Sequence]:
        """Drops a finished request; returns its completions."""
        return self._completions.pop(request_id, [])

    def has_unfinished_requests(self) -> bool:
        return bool(self._inbox or self._launched or self._unreported.request_ids or self.scheduler.has_unfinished())

    def wait_for_work(self, timeout: float, or_until: Callable[[], bool] = lambda: False) -> bool:
        """Sleeps until a step has something to do, `or_until` is true after a `wake`, or the engine is closed; at most
        `timeout` seconds. Returns whether it was woken."""
        with self._work:
            return self._work.wait_for(lambda: self._closed or self.is_busy() or or_until(), timeout=timeout)

    def is_busy(self) -> bool:
        """Whether a step now has something to do or to report: also while requests are held back, or all are."""
        if self._inbox or self._launched or self._unreported.request_ids:
            return True
        scheduler = self.scheduler
        return not self.is_paused and (scheduler.has_begun() if scheduler.holds_new else scheduler.has_unfinished())

    def wake(self) -> None:
        """Lets wait_for_work look again."""
        with self._work:
            self._work.notify_all()

    def stats(self) -> EngineStats:
        """Gauges of now, and counters since the start. From any thread, at any time."""
        scheduler = self.scheduler
        blocks = scheduler.block_manager
        return EngineStats(
            num_running=len(scheduler.running), num_waiting=scheduler.num_waiting,
            kv_cache_usage=1 - blocks.num_free_blocks / blocks.num_blocks, prompt_tokens=scheduler.num_prompt_tokens,
            generation_tokens=self._num_generated,
            prefix_cache_queries=scheduler.num_prompt_tokens if self.config.enable_prefix_caching else 0,
            prefix_cache_hits=scheduler.num_prompt_cached_tokens, num_preemptions=scheduler.num_preemptions,
            finished=dict(self._num_finished), iteration_tokens=tuple(self._iterations),
            iteration_tokens_sum=self.num_prefill_tokens + self.num_decode_tokens,
        )  # fmt: skip

    # -- the loop -----------------------------------------------------------------------------------------------

    def step(self) -> StepColumns:
        """Launches a step if there is one, and takes in the results of the step before it."""
        self.check_can_step()
        try:
            gained = self.take_unreported()
            self._drain_inbox(gained)
            plan = None if self.is_paused else self.scheduler.schedule()
            if plan is not None:
                self._launch(plan)
            depth = 1 if plan is not None and self.config.uses("async_scheduling") else 0
            while len(self._launched) > depth:
                self._collect(gained)
            return gained
        except BaseException as error:
            self._error = error
            raise

    def _launch(self, plan: StepPlan) -> None:
        packed = plan.pack(self.config.max_num_seqs)
        sampling = plan_sampling(plan) if self._num_sampling else None
        if sampling is not None:
            packed = append_section(packed, sampling.section)
        now = time.perf_counter()  # before the launch, which takes the whole step on a CPU
        self.executor.launch(packed)
        self._launched.append(Launched(plan, sampling))
        self._iterations[bisect_left(ITERATION_TOKENS, plan.num_tokens)] += 1
        self.num_decode_tokens += plan.num_old_rows
        self.num_prefill_tokens += plan.num_prefill_tokens
        if self._trace is not None:
            self._trace.launched(plan, now)
        for seq in plan.new_slots:
            if seq.metrics.first_scheduled_time is None:
                seq.metrics.first_scheduled_time = now

    def _collect(self, columns: StepColumns) -> None:
        """Waits for the oldest launched step, and adds what it gained to `columns`. A loop over all rows: kept lean."""
        token_ids = self.executor.collect()
        plan, sampling = self._launched.popleft()
        gained = self.scheduler.apply(plan, token_ids)
        if sampling is not None and sampling.brings_logprobs:
            take_logprobs(sampling, gained, self.executor.collect_logprobs())
        now = time.perf_counter()
        if self._trace is not None:
            self._trace.collected(now, self.stats())
        self._num_generated += len(gained)
        finished = SequenceStatus.FINISHED
        for seq, token_id in gained:
            if seq.metrics.first_token_time is None:
                seq.metrics.first_token_time = now
            seq.metrics.token_times.append(now)
            entry = columns.add(seq.parent_id, seq.index, token_id)
            if seq.sampling is not None and (rows := seq.sampling.logprob_rows) is not None:
                columns.logprobs[entry] = rows, len(rows) - 1
            if seq.status is finished:
                if seq.params.max_tokens == 0:
                    columns.token_ids[entry] = -1
                    self._num_generated -= 1
                columns.endings[entry] = self._end(seq, now)

    def _end(self, seq: Sequence, now: float) -> Ending:
        seq.metrics.finished_time = now
        prompt_rows = None
        if seq.sampling is not None:
            prompt_rows = seq.sampling.prompt_logprob_rows
            with self._work:  # add_request counts up in other threads
                self._num_sampling -= 1
        if seq.finish_reason == "stop" and seq.stop_reason is None:
            last, params = seq.token_ids[-1], seq.params
            if last in params.stop_token_ids and (params.ignore_eos or last not in self.model_config.eos_token_ids):
                seq.stop_reason = last
        assert seq.finish_reason is not None
        self._num_finished[seq.finish_reason] += 1
        if self._trace is not None:
            self._trace.ended(seq)
        return Ending(
            seq.finish_reason, seq.stop_reason, seq.num_prompt_tokens, seq.num_prompt_cached_tokens or 0,
            seq.num_tokens - seq.num_prompt_tokens, seq.metrics, None if prompt_rows is None else prompt_rows.view(),
            seq.weight_versions,
        )  # fmt: skip

    def prompt_logprobs(self, request_id: int) -> LogprobRows | None:
        """Of a known request that asked for them; all are there from its first token on."""
        first = self._completions[request_id][0]
        return None if first.sampling is None else first.sampling.prompt_logprob_rows

    def _drain_inbox(self, columns: StepColumns) -> None:
        """Takes in what other threads asked for; adds the completions that were aborted to `columns`."""
        while self._inbox:
            kind, seqs = self._inbox.popleft()
            if kind == "add":
                for seq in seqs:
                    self.scheduler.add(seq)
                continue
            for seq in seqs:
                if seq.status is not SequenceStatus.FINISHED:
                    self.scheduler.abort(seq)
                    entry = columns.add(seq.parent_id, seq.index, -1)
                    columns.endings[entry] = self._end(seq, time.perf_counter())

    # -- the rest -----------------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """What this engine runs on and with: for logs and benchmarks."""
        return {**self.executor.info(), "startup_seconds": round(self.startup_seconds, 2)}

    def close(self) -> None:
        """Ends the workers and frees the devices. Does nothing the second time."""
        self._closed = True
        self.wake()
        if self._trace is not None:
            self._trace.close()
        self.executor.close()
