"""An engine: requests come in, are checked and queued; the loop (loop.py) computes them."""

import time
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from nanovllm.engine.control import EngineControl
from nanovllm.engine.sampling.requests import RequestSampling
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.trace import Trace
from nanovllm.errors import QueueFull, shown
from nanovllm.logprobs import LogprobRows
from nanovllm.model_config import ModelConfig
from nanovllm.outputs import RequestMetrics
from nanovllm.sampling_params import SamplingParams
from nanovllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.executor.local import LocalExecutor

_SEED_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive request numbers land far apart


def _only_prompt(params: SamplingParams) -> SamplingParams:
    """What matters of a request whose one token is dropped."""
    return SamplingParams(
        n=params.n, temperature=0, max_tokens=0, ignore_eos=True, prompt_logprobs=params.prompt_logprobs,
        prompt_logprob_start=params.prompt_logprob_start, cache_salt=params.cache_salt,
    )  # fmt: skip


class LLMEngine(EngineControl):
    """Rank 0: owns the scheduler and, through the executor, all ranks. Token ids in, token ids out.

    add_request and abort may be called from any thread; what they ask for happens at the start of the next step. One
    thread at a time may step.
    """

    def __init__(
        self, executor: "LocalExecutor", model_config: ModelConfig, tokenizer: Tokenizer, trace: Trace | None = None
    ) -> None:
        """`executor`: started, and from here on this engine's to close."""
        super().__init__(executor, model_config, trace)
        self.tokenizer = tokenizer
        self.request_sampling = RequestSampling(tokenizer, model_config, self.config)
        self._num_requests = 0
        self.startup_seconds = 0.0

    # -- requests -----------------------------------------------------------------------------------------------

    def check_request(
        self, prompt_token_ids: list[int], params: SamplingParams, output_token_ids: Iterable[int] = ()
    ) -> None:
        """Raises ValueError naming what is wrong with a request, whose ids are integers (inputs.py), and the bound."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params: must be SamplingParams, found {type(params).__name__}")
        length, limit = len(prompt_token_ids), self.max_total_tokens
        if length == 0:
            raise ValueError("prompt: must have at least one token")
        if length + min(1, params.most_tokens) > limit:
            name, value = self._length_limit()
            raise ValueError(f"prompt of {length} tokens: must be shorter than {name}={value} (one token is generated)")
        vocab = self.model_config.vocab_size
        low, high = min(prompt_token_ids), max(prompt_token_ids)
        if low < 0 or high >= vocab:
            bad = low if low < 0 else high
            raise ValueError(f"prompt: token id {shown(bad)} must be in 0..{vocab - 1} (vocab_size={vocab})")
        self.request_sampling.check(params)
        if output_token_ids:
            self._check_output(length, [*output_token_ids], params)

    def _check_output(self, num_prompt_tokens: int, token_ids: list[int], params: SamplingParams) -> None:
        """What an output begins with that goes on."""
        name = "output_token_ids"
        most = self._max_total_tokens(num_prompt_tokens, params.most_tokens) - num_prompt_tokens
        if params.n > 1:
            raise ValueError(f"{name}: needs n=1, found n={params.n}")
        if len(token_ids) >= most or params.max_tokens == 0:
            raise ValueError(f"{name}: {len(token_ids)} given, must be fewer than the {most} that the output may have")
        if min(token_ids) < 0 or max(token_ids) >= self.model_config.vocab_size:
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
                request_id, [*prompt_token_ids, *(output_token_ids or ())], params,
                num_prompt_tokens=len(prompt_token_ids), seed=self._seed(params, request_id, index),
                stop_token_ids=stop_ids,
                max_total_tokens=self._max_total_tokens(len(prompt_token_ids), params.most_tokens),
                metrics=RequestMetrics(arrival_time=now), index=index, sampling=row,
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
        self.wake()
        return request_id

    def _check_queue(self) -> None:
        limit = self.config.max_queued_requests
        waiting = self.num_waiting
        if limit is not None and waiting >= limit:
            raise QueueFull(f"max_queued_requests={limit}: {waiting} requests wait already")

    @property
    def num_waiting(self) -> int:
        """Rows that wait, and calls of other threads that the next step takes in: about so many requests do not run."""
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
        self.wake()

    def knows(self, request_id: int) -> bool:
        return request_id in self._completions

    def is_finished(self, request_id: int) -> bool:
        """Whether all completions of a known request have ended."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self._completions[request_id])

    def forget(self, request_id: int) -> list[Sequence]:
        """Drops a finished request; returns its completions."""
        with self._work:
            return self._completions.pop(request_id, [])

    def prompt_logprobs(self, request_id: int) -> LogprobRows | None:
        """Of a known request that asked for them; all are there from its first token on."""
        first = self._completions[request_id][0]
        return None if first.sampling is None else first.sampling.prompt_logprob_rows

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
