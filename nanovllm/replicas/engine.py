"""The front of several replicas: an engine whose steps others compute.

It owns request numbers, and so seeds, the tokens so far, and which replica computes what. A request therefore gains the
same tokens on any number of replicas, and goes on elsewhere when its replica is lost.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import prefix_hashes
from nanovllm.engine.sequence import Sequence as Row
from nanovllm.engine.sequence import SequenceStatus
from nanovllm.errors import ReplicaError
from nanovllm.model_config import ModelConfig
from nanovllm.outputs import EngineStats, StepColumns
from nanovllm.replicas.control import ReplicaControl
from nanovllm.replicas.inbox import Inbox
from nanovllm.replicas.link import Lost, ReplicaLink, close_links
from nanovllm.replicas.messages import Answer, Completed, Counted, Gained, Ready, Refused
from nanovllm.replicas.ranks import ReplicaRanks
from nanovllm.replicas.request import RequestState, Sent
from nanovllm.replicas.router import Load, Router
from nanovllm.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MOST_RESTARTS = 3  # of each replica that was lost; then the others go on without it
_LOOK_SECONDS = 0.1  # the longest that a step waits for any replica
_SPIN_SECONDS, _SPIN_REQUESTS = 0.008, 4  # on a GPU: a first token is awaited without a pause, where so few run


class ReplicatedEngine(ReplicaControl):
    """LLMEngine's interface over replicas. One thread at a time may step; add_request and abort from any."""

    def __init__(
        self, links: Sequence[ReplicaLink], restart: Callable[[int, int], ReplicaLink],
        inbox: Inbox, ready: Sequence[Ready], config: EngineConfig, model_config: ModelConfig,
        tokenizer: Tokenizer,
    ) -> None:  # fmt: skip
        """`ready`: of each link, which is this engine's to close from here on. `restart`: (number, num_kvcache_blocks)
        -> a new link to a replica that was lost. `config`: as the user gave it."""
        num_blocks = min(one.num_kvcache_blocks for one in ready)
        resolved = replace(
            ready[0].config, data_parallel_size=len(links), ray_address=config.ray_address,
            data_parallel_backend=config.data_parallel_backend or "local",
        )  # fmt: skip
        assert resolved.kvcache_block_size
        router = Router(len(links), resolved.kvcache_block_size, num_blocks, resolved.max_num_seqs)
        for number in range(len(links)):
            router.join(number)
        ranks = ReplicaRanks(resolved, num_blocks, self._ask)
        super().__init__(links, inbox, router, ranks, model_config, tokenizer)
        self._restart = restart
        self._infos = [one.info for one in ready]
        self._num_restarts = [0] * len(links)
        self._live: dict[int, RequestState] = {}
        self._plain: dict[int, Row] = {}
        """Rows of requests in flight that do nothing but gain tokens, until their end."""
        self._stats: dict[ReplicaLink, EngineStats] = {}
        """The last of each link, those of lost ones too: counters go on."""
        self._computed: dict[ReplicaLink, tuple[int, int]] = {}
        self._spin_until = 0.0
        self.at_close = ExitStack()
        """What ends with the replicas."""

    # -- requests -----------------------------------------------------------------------------------------------

    def add_request(self, *args: Any, **options: Any) -> int:
        """See LLMEngine.add_request."""
        if not self._live and (link := self._links[0]) is not None:
            link.rouse()
        return super().add_request(*args, **options)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do or to report."""
        return bool(self._inbox or self._live or self._unreported.request_ids)

    def is_busy(self) -> bool:
        """See LLMEngine.is_busy."""
        if self._inbox or self._unreported.request_ids:
            return True
        if not self.is_paused and (self.has_begun() if self.scheduler.holds_new else self._live):
            return True
        return self._events.has_events()

    def has_begun(self) -> bool:
        """Whether any unfinished request was sent to a replica."""
        return any(request.replica is not None for request in list(self._live.values()))

    @property
    def num_waiting(self) -> int:
        """Requests that do not run, as far as replicas have said."""
        stats = [self._stats[link] for link in list(self._links) if link in self._stats]  # type: ignore[index]
        return sum(one.num_waiting for one in stats) + self._router.num_waiting + len(self._inbox)

    def _drain_inbox(self, columns: StepColumns) -> None:
        while self._inbox:
            kind, seqs = self._inbox.popleft()
            if kind == "resume":
                if not self.is_paused:
                    self._send_all(("resume",))
                continue
            request_id = seqs[0].request_id
            if kind == "add":
                self._live[request_id] = RequestState(seqs, seqs[0].num_output_tokens)
                self._queue(request_id, seqs)
                continue
            request = self._live.get(request_id)
            if request is None:
                continue
            request.is_aborted = True
            if request.replica is None:
                self._router.withdraw(request_id)
                self._drop(columns, request_id, request)
            else:
                self._send(request.replica, ("abort", request_id))

    def _queue(self, request_id: int, seqs: list[Row], first: bool = False) -> None:
        """`first`: before all that wait."""
        seq, goes_on = seqs[0], self._live[request_id].goes_on
        known = seq.token_ids[: seq.num_tokens if goes_on else seq.num_prompt_tokens]
        most = max(each.max_total_tokens - len(known) for each in seqs)
        self._router.add(Load(request_id, self._hashes(seq, known), len(known), most, len(seqs)), first)

    def _hashes(self, seq: Row, token_ids: list[int]) -> list[bytes]:
        """What the router goes by; nothing where it has no choice."""
        if not self.config.enable_prefix_caching or len(self._links) == 1:
            return []
        assert self.config.kvcache_block_size
        return prefix_hashes(token_ids, self.config.kvcache_block_size, seq.params.cache_salt)

    def _bind(self) -> None:
        """Sends what replicas have room for; in one message as much as a step may compute, since requests that come one
        by one begin in as many small steps."""
        if self.scheduler.holds_new or self.is_paused:
            return
        batches: dict[int, list[Sent]] = {}
        num_tokens = [0] * len(self._links)
        for number, request_id in self._router.bind():
            request = self._live[request_id]  # type: ignore[index]
            batches.setdefault(number, []).append(request.bind(number))
            num_tokens[number] += request.seqs[0].num_tokens
            if num_tokens[number] >= self.config.max_num_batched_tokens:
                self._send(number, ("add", batches.pop(number)))
                num_tokens[number] = 0
        for number, batch in batches.items():
            self._send(number, ("add", batch))
            if len(self._live) <= _SPIN_REQUESTS and self.config.device == "cuda":
                self._spin_until = time.monotonic() + _SPIN_SECONDS

    # -- the loop -----------------------------------------------------------------------------------------------

    def step(self) -> StepColumns:
        """Takes in what replicas have gained; waits a moment where that is nothing."""
        self.check_can_step()
        try:
            gained = self.take_unreported()
            self._drain_inbox(gained)
            self._bind()
            waits = not len(gained) and bool(self._live) and not self.is_paused
            self._take_events_in(gained, waits)
            self._drain_inbox(gained)
            self._bind()
            return gained
        except BaseException as error:
            self._error = error
            raise

    def _take_events_in(self, columns: StepColumns, waits: bool) -> None:
        for event in self._events.take(_LOOK_SECONDS if waits else 0.0, self._spin_until if waits else 0.0):
            self._take_in(event, columns)

    def _take_in(self, event: Any, columns: StepColumns) -> None:
        link, message = event
        if link is None or self._links[link.number] is not link:
            return  # of a replica that is given up
        if isinstance(message, Gained):
            self._take_gained(message, columns)
        elif isinstance(message, Counted):
            self._take_counted(link, message)
        elif isinstance(message, Lost):
            self._lose(link, str(message), columns)
        elif isinstance(message, Ready):
            self._infos[link.number] = message.info
            self._router.join(link.number)
        elif isinstance(message, Refused):
            self._refuse(message, columns)
        elif isinstance(message, Answer) and message.number == self._num_calls:
            self._answers[link] = message

    def _take_counted(self, link: ReplicaLink, message: Counted) -> None:
        self._stats[link] = message.stats
        before = self._computed.get(link, (0, 0))
        self._computed[link] = now_computed = message.num_prefill_tokens, message.num_decode_tokens
        self.num_prefill_tokens += now_computed[0] - before[0]
        self.num_decode_tokens += now_computed[1] - before[1]

    def _take_gained(self, message: Gained, columns: StepColumns) -> None:
        """A loop over all rows of a step: kept lean."""
        now, plain, ended, count = time.perf_counter(), self._plain, message.ended, 0
        self._spin_until = 0.0
        ids, indices, tokens = columns.request_ids, columns.indices, columns.token_ids
        numbers = memoryview(message.columns).cast("q")
        size = len(numbers) // 3
        for entry, (request_id, index, token_id) in enumerate(
            zip(numbers[:size], numbers[size : 2 * size], numbers[2 * size :], strict=True)
        ):
            seq = plain.get(request_id)
            if seq is None or entry in ended:
                self._take_entry(columns, request_id, index, token_id, message.scores.get(entry), ended.get(entry), now)
                continue
            seq.token_ids.append(token_id)
            seq.num_tokens += 1
            seq.metrics.token_times.append(now)
            ids.append(request_id)
            indices.append(0)
            tokens.append(token_id)
            count += 1
        self._num_generated += count

    def _take_entry(
        self, columns: StepColumns, request_id: int, index: int, token_id: int, words: Any,
        completed: Completed | None, now: float,
    ) -> None:  # fmt: skip
        """`words`: the token's line of log-probabilities."""
        request = self._live.get(request_id)
        if request is None or (seq := request.seqs[index]).status is SequenceStatus.FINISHED:
            return  # before its first replica was lost
        if token_id >= 0 and request.to_skip[index]:
            request.to_skip[index] -= 1  # type: ignore[index]
            if completed is None:
                return
            token_id = -1  # it ends with a token that is known
        if token_id >= 0:
            self._gain(seq, token_id, words, now)
            if seq.sampling is None and request.goes_on:
                self._plain[request_id] = seq
        entry = columns.add(request_id, index, token_id)
        if seq.sampling is not None and (rows := seq.sampling.logprob_rows) is not None and token_id >= 0:
            columns.logprobs[entry] = rows, len(rows) - 1
        if completed is not None:
            self._complete(columns, entry, request, seq, completed, now)

    def _gain(self, seq: Row, token_id: int, words: Any, now: float) -> None:
        metrics = seq.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        metrics.token_times.append(now)
        seq.token_ids.append(token_id)
        seq.num_tokens += 1
        self._num_generated += 1
        if (row := seq.sampling) is None:
            return
        if words is not None and row.logprob_rows is not None:
            row.logprob_rows.append(words[None], 0)
        if row.text is not None and token_id not in seq.stop_token_ids:
            row.text.push(token_id, watch=seq.num_output_tokens >= seq.params.min_tokens)

    def _complete(
        self, columns: StepColumns, entry: int, request: RequestState, seq: Row, completed: Completed, now: float
    ) -> None:
        """A completion has ended, and with the last of them the request."""
        seq.finish_reason, seq.stop_reason = completed.reason, completed.stop_reason
        if seq.num_prompt_cached_tokens is None:
            seq.num_prompt_cached_tokens = completed.num_cached_tokens
        if seq.metrics.first_scheduled_time is None and completed.queued is not None:
            seq.metrics.first_scheduled_time = request.bound_at + completed.queued
        if (row := seq.sampling) is not None:
            row.kept_ids = completed.kept_ids
            if completed.prompt_words is not None:
                for position, words in enumerate(completed.prompt_words):
                    if words is not None:
                        row.take_prompt_logprobs(position, words[None], [0])
        self._finish(columns, entry, request, seq, now)

    def _finish(self, columns: StepColumns, entry: int, request: RequestState, seq: Row, now: float) -> None:
        seq.status = SequenceStatus.FINISHED
        columns.endings[entry] = self._end(seq, now)
        if any(each.status is not SequenceStatus.FINISHED for each in request.seqs):
            return
        del self._live[seq.request_id]
        self._plain.pop(seq.request_id, None)
        if request.replica is not None:
            seqs = request.seqs
            count = sum(each.num_output_tokens for each in seqs)
            left = [digest for each in seqs for digest in self._hashes(each, each.token_ids[: each.num_tokens - 1])]
            self._router.finish(request.replica, seq.request_id, count, left)

    def _drop(self, columns: StepColumns, request_id: int, request: RequestState, why: str | None = None) -> None:
        """Ends all of a request's completions that have not ended."""
        now = time.perf_counter()
        for seq in request.seqs:
            if seq.status is not SequenceStatus.FINISHED:
                seq.finish_reason, seq.stop_reason = "abort", why
                self._finish(columns, columns.add(request_id, seq.index, -1), request, seq, now)

    def _refuse(self, message: Refused, columns: StepColumns) -> None:
        request = self._live.get(message.request_id)
        if request is not None:
            self._drop(columns, message.request_id, request, None if request.is_aborted else message.text)

    # -- replicas that are lost ---------------------------------------------------------------------------------

    def _start_again(self, number: int) -> None:
        try:
            self._links[number] = self._restart(number, self.executor.num_kvcache_blocks)
        except OSError as error:  # what took a replica, a lack of memory say, may keep a process from starting
            logger.warning("replica %d cannot be started, and the others go on without it: %s", number, error)

    def _lose(self, link: ReplicaLink, reason: str, columns: StepColumns) -> None:
        """Its requests go on elsewhere, behind the tokens that they have, before all that wait."""
        number = link.number
        self._links[number] = None
        link.close(patience=0)
        bound = self._router.leave(number)
        if self._num_restarts[number] < MOST_RESTARTS and not self._closed:
            self._num_restarts[number] += 1
            when = " with the next weights" if self._weights_replaced else ""
            logger.warning("replica %d was lost and is started again%s: %s", number, when, reason)
            self._lost.append(number)
            self._start_lost()
        else:
            logger.warning("replica %d was lost, and the others go on without it: %s", number, reason)
        if not any(self._links) and (self._weights_replaced or not self._lost):
            self._error = ReplicaError(f"no replica is left: replica {number}: {reason}")
            raise self._error
        for request_id in reversed(bound):
            request = self._live[request_id]  # type: ignore[index]
            request.replica = None
            if request.is_aborted:
                self._drop(columns, request.seqs[0].request_id, request)
            else:
                self._queue(request.seqs[0].request_id, request.seqs, first=True)

    # -- the rest -----------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The sum over replicas; kv_cache_usage is their mean."""
        there = [link for link in list(self._links) if link in self._stats]
        every = list(self._stats.values())
        now = [self._stats[link] for link in there if link is not None]
        total: dict[str, Any] = {
            each.name: sum(getattr(one, each.name) for one in every) for each in fields(EngineStats) if each.type is int
        }
        buckets = [one.iteration_tokens for one in every] or [tuple(self._iterations)]
        return EngineStats(**{
            **total,
            "num_running": sum(one.num_running for one in now),
            "num_waiting": self.num_waiting,
            "kv_cache_usage": sum(one.kv_cache_usage for one in now) / max(1, len(now)),
            "generation_tokens": self._num_generated,
            "finished": dict(self._num_finished),
            "iteration_tokens": tuple(map(sum, zip(*buckets, strict=True))),
        })  # fmt: skip

    def info(self) -> dict[str, Any]:
        """What the first replica runs on and with, KV blocks of all, and each replica's own."""
        there = [info for info, link in zip(self._infos, self._links, strict=True) if link is not None]
        return {
            **(there or self._infos)[0],
            "startup_seconds": round(self.startup_seconds, 2),
            "num_kvcache_blocks": sum(info["num_kvcache_blocks"] for info in there),
            "data_parallel_size": len(self._links),
            "num_replicas": len(there),
            "num_restarts": sum(self._num_restarts),
            "replicas": there,
        }

    def close(self) -> None:
        """Ends all replicas. Does nothing the second time."""
        self._closed = True
        self.wake()
        close_links([link for link in self._links if link is not None])
        self._links = [None] * len(self._links)
        self._events.close()
        self.at_close.close()
