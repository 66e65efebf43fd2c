"""The front of several replicas: an engine whose steps others compute.

It owns request numbers, and so seeds, the tokens so far, and which replica computes what. A request therefore gains the
same tokens on any number of replicas, and goes on elsewhere when its replica is lost.
"""

import logging
import os
import queue
import time
from array import array
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nanovllm.engine.block_manager import prefix_hashes
from nanovllm.engine.control import IN_FLIGHT, WeightsIncomplete
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.errors import ReplicaError, refuse
from nanovllm.model_config import ModelConfig
from nanovllm.outputs import EngineStats, StepColumns
from nanovllm.replicas.link import Lost, ReplicaLink, close_links
from nanovllm.replicas.messages import Completed, Gained, Loaded, Ready, Refused, Start
from nanovllm.replicas.request import RequestState
from nanovllm.replicas.router import Load, Router
from nanovllm.replicas.weights import buckets
from nanovllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from nanovllm.config import EngineConfig

logger = logging.getLogger(__name__)

MOST_RESTARTS = 3  # of each replica that was lost; then the others go on without it
_WAKE = (None, None)  # an event that lets a step look that waits
_LOOK_SECONDS = 0.1  # the longest that a step waits for any replica


class _Ranks:
    """In place of an executor: what the engine asks of one, of all replicas."""

    shares_weights = failed = False

    def __init__(self, config: "EngineConfig", num_kvcache_blocks: int) -> None:
        self.config, self.num_kvcache_blocks = config, num_kvcache_blocks
        self.owner = os.getpid()


class ReplicatedEngine(LLMEngine):
    """LLMEngine's interface over replicas. One thread at a time may step; add_request and abort from any."""

    def __init__(
        self, links: list[ReplicaLink], starts: list[Start], inbox: "queue.SimpleQueue[Any]", ready: list[Ready],
        model_config: ModelConfig, tokenizer: Tokenizer,
    ) -> None:  # fmt: skip
        """`ready`: of each link, which is this engine's to close from here on."""
        num_blocks = min(one.num_kvcache_blocks for one in ready)
        config = replace(ready[0].config, data_parallel_size=len(links), data_parallel_backend="local")
        super().__init__(_Ranks(config, num_blocks), model_config, tokenizer)  # type: ignore[arg-type]
        self._links: list[ReplicaLink | None] = list(links)
        self._starts, self._events = starts, inbox
        self._infos = [one.info for one in ready]
        self._num_restarts = [0] * len(links)
        assert config.kvcache_block_size
        self._router = Router(len(links), config.kvcache_block_size, num_blocks, config.max_num_seqs)
        for number in range(len(links)):
            self._router.join(number)
        self._live: dict[int, RequestState] = {}
        self._stats: dict[ReplicaLink, EngineStats] = {}
        """The last of each link, those of lost ones too: counters go on."""
        self._computed: dict[ReplicaLink, tuple[int, int]] = {}
        self._weights_replaced = False
        self._answers: dict[ReplicaLink, Loaded] = {}

    # -- requests -----------------------------------------------------------------------------------------------

    def add_request(self, *args: Any, **options: Any) -> int:
        """See LLMEngine.add_request."""
        request_id = super().add_request(*args, **options)
        self._events.put(_WAKE)
        return request_id

    def abort(self, request_id: int) -> None:
        """See LLMEngine.abort."""
        super().abort(request_id)
        self._events.put(_WAKE)

    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do or to report."""
        return bool(self._inbox or self._live or self._unreported.request_ids)

    def is_busy(self) -> bool:
        """See LLMEngine.is_busy."""
        if not self.scheduler.holds_new:
            return self.has_unfinished_requests()
        bound = any(request.replica is not None for request in self._live.values())
        return bool(self._inbox or self._unreported.request_ids or bound)

    def _drain_inbox(self, columns: StepColumns) -> None:
        while self._inbox:
            kind, seqs = self._inbox.popleft()
            request_id = seqs[0].parent_id
            if kind == "add":
                self._live[request_id] = RequestState(seqs, seqs[0].num_tokens - seqs[0].num_prompt_tokens)
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

    def _queue(self, request_id: int, seqs: list[Sequence]) -> None:
        first = seqs[0]
        prompt = first.token_ids[: first.num_prompt_tokens]
        most = max(seq.max_total_tokens - first.num_prompt_tokens for seq in seqs)
        self._router.add(Load(request_id, self._hashes(first, prompt), len(prompt), most, len(seqs)))

    def _hashes(self, seq: Sequence, token_ids: list[int]) -> list[bytes]:
        if not self.config.enable_prefix_caching:
            return []
        assert self.config.kvcache_block_size
        return prefix_hashes(token_ids, self.config.kvcache_block_size, seq.params.cache_salt)

    def _bind(self) -> None:
        """Sends what replicas have room for."""
        if self.scheduler.holds_new:
            return
        for number, request_id in self._router.bind():
            request = self._live[request_id]  # type: ignore[index]
            seqs = request.seqs
            first = seqs[0]
            request.replica, request.bound_at = number, time.perf_counter()
            goes_on = len(seqs) == 1 and not first.params.sampling_mask
            known = first.output_token_ids if goes_on else first.output_token_ids[: request.num_given]
            request.to_skip = [seq.num_tokens - seq.num_prompt_tokens - len(known) for seq in seqs]
            prompt = array("i", first.token_ids[: first.num_prompt_tokens]).tobytes()
            self._send(number, ("add", request_id, prompt, first.params, known))

    def _send(self, number: int, message: Any) -> None:
        link = self._links[number]
        if link is not None:
            link.send(message)

    # -- the loop -----------------------------------------------------------------------------------------------

    def step(self) -> StepColumns:
        """Takes in what replicas have gained; waits a moment where that is nothing."""
        self._raise_failure()
        try:
            gained, self._unreported = self._unreported, StepColumns()
            self._drain_inbox(gained)
            self._bind()
            waits = not len(gained) and bool(self._live)
            while (event := self._next_event(waits)) is not None:
                waits = False
                self._take_in(event, gained)
            self._drain_inbox(gained)
            self._bind()
            return gained
        except BaseException as error:
            self._error = error
            raise

    def _next_event(self, waits: bool) -> Any:
        """None where there is none."""
        try:
            return self._events.get(timeout=_LOOK_SECONDS) if waits else self._events.get_nowait()
        except queue.Empty:
            return None

    def _take_in(self, event: Any, columns: StepColumns) -> None:
        link, message = event
        if link is None or self._links[link.number] is not link:
            return  # of a replica that is given up
        if isinstance(message, Gained):
            self._take_gained(link, message, columns)
        elif isinstance(message, Lost):
            self._lose(link, str(message), columns)
        elif isinstance(message, Ready):
            self._infos[link.number] = message.info
            self._router.join(link.number)
        elif isinstance(message, Refused):
            self._refuse(message, columns)
        elif isinstance(message, Loaded):
            self._answers[link] = message

    def _take_gained(self, link: ReplicaLink, message: Gained, columns: StepColumns) -> None:
        """A loop over all rows of a step: kept lean."""
        self._stats[link] = message.stats
        before = self._computed.get(link, (0, 0))
        self._computed[link] = now_computed = message.num_prefill_tokens, message.num_decode_tokens
        self.num_prefill_tokens += now_computed[0] - before[0]
        self.num_decode_tokens += now_computed[1] - before[1]
        now, live, ended, scores = time.perf_counter(), self._live, message.ended, message.scores
        for entry, (request_id, index, token_id) in enumerate(
            zip(message.request_ids, message.indices, message.token_ids, strict=True)
        ):
            request = live.get(request_id)
            if request is None:
                continue
            seq = request.seqs[index]
            if seq.status is SequenceStatus.FINISHED:  # before its first replica was lost
                continue
            completed = ended.get(entry)
            if token_id >= 0 and request.to_skip[index]:
                request.to_skip[index] -= 1  # type: ignore[index]
                if completed is None:
                    continue
                token_id = -1  # it ends with a token that is known
            if token_id >= 0:
                self._gain(seq, token_id, scores.get(entry), now)
            new = columns.add(request_id, index, token_id)
            if seq.sampling is not None and (rows := seq.sampling.logprob_rows) is not None and token_id >= 0:
                columns.logprobs[new] = rows, len(rows) - 1
            if completed is not None:
                self._complete(columns, new, request, seq, completed, now)

    def _gain(self, seq: Sequence, token_id: int, words: Any, now: float) -> None:
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
            row.text.push(token_id, watch=seq.num_tokens - seq.num_prompt_tokens >= seq.params.min_tokens)

    def _complete(
        self, columns: StepColumns, entry: int, request: RequestState, seq: Sequence, completed: Completed, now: float
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

    def _finish(self, columns: StepColumns, entry: int, request: RequestState, seq: Sequence, now: float) -> None:
        seq.status = SequenceStatus.FINISHED
        columns.endings[entry] = self._end(seq, now)
        if any(each.status is not SequenceStatus.FINISHED for each in request.seqs):
            return
        del self._live[seq.parent_id]
        if request.replica is not None:
            seqs = request.seqs
            count = sum(each.num_tokens - each.num_prompt_tokens for each in seqs)
            left = [digest for each in seqs for digest in self._hashes(each, each.token_ids[: each.num_tokens - 1])]
            self._router.finish(request.replica, seq.parent_id, count, left)

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
            self._drop(columns, message.request_id, request, message.text)

    # -- replicas that are lost ---------------------------------------------------------------------------------

    def _lose(self, link: ReplicaLink, reason: str, columns: StepColumns) -> None:
        """Its requests go on elsewhere, behind the tokens that they have."""
        number = link.number
        self._links[number] = None
        link.close(patience=0)
        bound = self._router.leave(number)
        if not self._weights_replaced and self._num_restarts[number] < MOST_RESTARTS and not self._closed:
            self._num_restarts[number] += 1
            logger.warning("replica %d was lost and is started again: %s", number, reason)
            self._links[number] = ReplicaLink(number, self._starts[number], self._events)
        else:
            logger.warning("replica %d was lost, and the others go on without it: %s", number, reason)
        if not any(self._links):
            raise ReplicaError(f"no replica is left: replica {number}: {reason}")
        for request_id in bound:
            request = self._live[request_id]  # type: ignore[index]
            request.replica = None
            if request.is_aborted:
                self._drop(columns, request.seqs[0].parent_id, request)
            else:
                self._queue(request.seqs[0].parent_id, request.seqs)

    # -- the rest -----------------------------------------------------------------------------------------------

    def load_weights(
        self, weights: "Iterable[tuple[str, torch.Tensor]] | str | Path", in_flight: str, version: int | None
    ) -> None:
        """See LLM.load_weights. A replica that is lost from here on is not started again: its checkpoint is another."""
        self._check_version(version)
        if in_flight not in IN_FLIGHT:
            refuse("in_flight", in_flight, "one of " + ", ".join(map(repr, IN_FLIGHT)))
        if not self.lacks_weights:
            self._raise_failure()
        self._weights_replaced = True
        self._router.forget_cached()
        self._answers = {}
        self._error = WeightsIncomplete("load_weights did not finish: the weights are a mixture; call it again")
        if isinstance(weights, (str, Path)):
            self._send_all(("load_weights", in_flight, str(weights)))
            self._await_answers()
        else:
            self._send_all(("load_weights", in_flight, None))
            self._send_buckets(weights)
        for answer in self._answers.values():
            if answer.kind is not None:
                raise answer.kind(answer.text)
        self._error = None
        self._note_version(version)

    def _send_buckets(self, weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """To all replicas; waits for their answers."""
        try:
            for bucket in buckets(weights):
                self._send_all(("bucket", bucket, None))
        except BaseException as error:
            self._send_all(("bucket", None, f"the weights ended: {type(error).__name__}"))
            self._await_answers()
            raise
        self._send_all(("bucket", None, None))
        self._await_answers()

    def _need_one_replica(self, *_: object) -> NoReturn:
        self.scheduler.holds_new = False  # what a pause or an update would have begun with
        raise ValueError(f"data_parallel_size={len(self._links)}: must be 1 for this; load_weights works with replicas")

    begin_update = update = finish_update = checksum = _need_one_replica  # type: ignore[assignment]
    pause_steps = check_sleep = sleep = wake_up = reset_prefix_cache = _need_one_replica  # type: ignore[assignment]

    def _send_all(self, message: Any) -> None:
        for number in range(len(self._links)):
            self._send(number, message)

    def _await_answers(self) -> None:
        """Of all replicas that are there; what they gain meanwhile is handed out by the next step."""
        while any(link is not None and link not in self._answers for link in self._links):
            if (event := self._next_event(True)) is not None:
                self._take_in(event, self._unreported)

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
            "num_waiting": sum(one.num_waiting for one in now) + self._router.num_waiting + len(self._inbox),
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
