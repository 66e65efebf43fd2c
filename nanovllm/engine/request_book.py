"""The requests that an engine knows, on the side of who asks for them."""

import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from copy import copy
from itertools import chain
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.sampling.requests import RequestSampling
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import Step
from nanovllm.errors import QueueFull, shown
from nanovllm.logprobs import LogprobRows
from nanovllm.model_config import ModelConfig
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput, StepOutput
from nanovllm.sampling_params import SamplingParams, wrap_seed
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.wire.step import SlotConstants

_SEED_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: consecutive request numbers land far apart
_NO_OUTPUT = {
    "temperature": 0, "ignore_eos": True, "stop": (), "stop_token_ids": (), "presence_penalty": 0,
    "frequency_penalty": 0, "repetition_penalty": 1, "logprobs": None, "sampling_mask": False, "logit_bias": {},
    "bad_words": (), "allowed_token_ids": None, "structured_outputs": None,
}  # fmt: skip


def _only_prompt(params: SamplingParams) -> SamplingParams:
    """Parameters for max_tokens=0, where the prompt is computed and the one sampled token is dropped: those given,
    without what shapes the output."""
    found = copy(params)
    vars(found).update(_NO_OUTPUT)  # frozen, and checked: but nobody else has this one
    return found


class RequestBook:
    """Ids, seeds and checks of requests, and the rows that hold their tokens, texts and log-probabilities until they
    are forgotten. From any thread."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, tokenizer: Tokenizer, capacity_tokens: int,
        state: EngineState,
    ) -> None:  # fmt: skip
        """`config`: with nothing left open. `capacity_tokens`: most tokens that one request can have in the KV
        cache."""
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        self._capacity_tokens, self._eos = capacity_tokens, frozenset(model_config.eos_token_ids)
        self._state = state
        self._sampling = RequestSampling(tokenizer, model_config, config)
        self._lock = threading.Lock()
        self.rows: dict[int, list[Sequence]] = {}
        """Rows, one for each completion, of every known request by its id."""
        self.by_number: dict[int, Sequence] = {}
        """The same rows by their numbers."""
        self.num_requests = 0
        """Number of ids given so far."""

    # -- checks -------------------------------------------------------------------------------------------------

    def check(self, prompt: Prompt, params: SamplingParams, output_token_ids: Iterable[int] = ()) -> None:
        """Raises ValueError naming what is wrong with a request, and the bound."""
        if self.model_config.pooling is not None and (params.max_tokens != 0 or not params.is_plain):
            raise ValueError("runner='pooling': the engine computes embeddings (LLM.embed) and generates no text")
        self._state.require_adapter(prompt.adapter)
        token_ids, limit = prompt.token_ids, self.max_total_tokens
        length = len(token_ids)
        if length == 0:
            raise ValueError("prompt: must have at least one token")
        if length + min(1, params.most_tokens) > limit:
            name, value = self._length_limit()
            bound = f"must be shorter than {name}={value} (one token is generated)"
            if params.max_tokens == 0:
                bound = f"must be at most {name}={value}"
            raise ValueError(f"prompt of {length} tokens: {bound}")
        vocab = self.model_config.vocab_size
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= vocab:
            bad = low if low < 0 else high
            raise ValueError(f"prompt: token id {shown(bad)} must be in 0..{vocab - 1} (vocab_size={vocab})")
        self._sampling.check(params)
        if output_token_ids:
            self._check_output(length, [*output_token_ids], params)

    def _check_output(self, num_prompt_tokens: int, token_ids: list[int], params: SamplingParams) -> None:
        """Checks tokens that an output is to begin with. Raises ValueError."""
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
        """Longest prompt + output that can be served, in tokens."""
        return self._length_limit()[1]

    def _length_limit(self) -> tuple[str, int]:
        assert self.config.max_model_len
        if self._capacity_tokens < self.config.max_model_len:
            return "KV cache tokens (by num_kvcache_blocks and kvcache_block_size)", self._capacity_tokens
        return "max_model_len", self.config.max_model_len

    def knows_grammar(self, wanted: Mapping[str, Any]) -> bool:
        """Whether a constraint, the one field of StructuredOutput that is given, was compiled already."""
        return self._sampling.is_compiled(wanted)

    def close(self) -> None:
        """Ends what checks requests in another process."""
        self._sampling.close()

    # -- requests -----------------------------------------------------------------------------------------------

    def reserve_ids(self, params: Iterable[SamplingParams]) -> list[int]:
        """Reserves ids, ascending, for requests with these parameters, which add_request may take in any order."""
        return [self._reserve(param.n) for param in params]

    def _reserve(self, num_rows: int) -> int:
        with self._lock:
            request_id = self.num_requests
            self.num_requests += num_rows
        return request_id

    def open(
        self, prompt: Prompt, params: SamplingParams, request_id: int | None = None,
        output_token_ids: list[int] | None = None, *, num_waiting: Callable[[], int],
        queue: Callable[[list[Sequence]], None],
    ) -> int:  # fmt: skip
        """Makes the rows of a new request, hands them to `queue` and returns its id. `output_token_ids`: the output
        begins with these. `request_id`: id that was reserved, for a request that was checked.

        Without `request_id` the request is checked here: raises ValueError as `check` does, and QueueFull where as many
        requests wait, by `num_waiting`, as max_queued_requests allows."""
        if request_id is None:
            self.check(prompt, params, output_token_ids or [])
        if params.max_tokens == 0:
            params = _only_prompt(params)
        eos = frozenset() if params.ignore_eos else self._eos
        given_ids = frozenset(params.stop_token_ids)
        stop_ids, known = eos | given_ids, output_token_ids or []
        rows = self._sampling.rows(params, stop_ids, prompt.token_ids, known)
        max_total_tokens = self._max_total_tokens(len(prompt), params.most_tokens)
        now = time.perf_counter()
        if request_id is None:
            limit = self.config.max_queued_requests
            if limit is not None and (waiting := num_waiting()) >= limit:
                raise QueueFull(f"max_queued_requests={limit}: {waiting} requests wait already")
            request_id = self._reserve(params.n)
        seqs = [
            Sequence(
                request_id, prompt, params,
                constants=SlotConstants(params.temperature, self._seed(params, request_id, index)),
                stop_token_ids=stop_ids, max_total_tokens=max_total_tokens,
                metrics=RequestMetrics(arrival_time=now), index=index, sampling=row,
                reported_stop_ids=given_ids - eos, known_ids=known,
            )
            for index, row in enumerate(rows)
        ]  # fmt: skip
        with self._lock:
            self._state.require_adapter(prompt.adapter)  # again: it is kept for the rows that are here from now on
            for seq in seqs:
                seq.siblings = seqs
                seq.note_version(self._state.weight_version)
                self.by_number[seq.number] = seq
            self.rows[request_id] = seqs
            queue(seqs)  # with the lock: no abort of another thread's comes before it
        return request_id

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
        return wrap_seed(number)

    def set_version(self, version: int) -> None:
        """Tokens from here on come from weights of this version."""
        with self._lock:
            self._state.weight_version = version
            for seq in (seq for seqs in self.rows.values() for seq in seqs):
                if seq.status is not SequenceStatus.FINISHED:
                    seq.note_version(version)

    def rows_of(self, request_id: int) -> list[Sequence] | None:
        """Rows of a known request, which are queued by then; None for others."""
        with self._lock:
            return self.rows.get(request_id)

    def is_finished(self, request_id: int) -> bool:
        """Whether all completions of a known request have ended."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self.rows[request_id])

    def unfinished(self) -> dict[int, list[Sequence]]:
        """Rows of the known requests of which a completion has not ended, by id."""
        with self._lock:
            return {request_id: rows for request_id, rows in self.rows.items() if not self.is_finished(request_id)}

    def adapters(self) -> set[str]:
        """Digests of the adapters of rows that have not ended."""
        return {found for rows in self.unfinished().values() if (found := rows[0].prompt.adapter) is not None}

    def forget(self, request_id: int) -> list[Sequence]:
        """Drops a request; returns its rows, none if it is not known."""
        with self._lock:
            for seq in (seqs := self.rows.pop(request_id, [])):
                del self.by_number[seq.number]
        return seqs

    def outputs(self, step: Step, left_out: Container[int] = ()) -> list[StepOutput]:
        """Outputs of known rows in a step, which is the last one until now. `left_out`: numbers of others."""
        found: dict[int, StepOutput] = {}
        ends = ((end.row, end.token) for end in step.finishes)
        for number, token_id in chain(zip(step.rows, step.tokens, strict=True), ends):
            if (output := found.get(number)) is None:
                if number in left_out or (seq := self.by_number.get(number)) is None:
                    continue
                output = found[number] = StepOutput(seq.request_id, [], index=seq.index)
            if token_id is not None:
                output.new_token_ids.append(token_id)
        for number, output in found.items():
            seq = self.by_number[number]
            if (end := seq.ending) is not None:
                output.finished, output.finish_reason, output.stop_reason = True, end.reason, end.stop_reason
                output.pooled = seq.pooled
            if seq.sampling is not None and (rows := seq.sampling.logprob_rows) is not None and output.new_token_ids:
                output.logprobs = rows.view(range(len(rows) - len(output.new_token_ids), len(rows)))
        return list(found.values())

    def take(self, request_id: int) -> RequestOutput:
        """Drops a finished request; returns its output."""
        rows = self.prompt_logprobs(request_id)
        seqs = self.forget(request_id)
        first = seqs[0]
        return RequestOutput(
            request_id, first.prompt.text, first.prompt.token_ids, [self.completion(seq) for seq in seqs],
            num_cached_tokens=first.num_prompt_cached_tokens or 0, metrics=first.metrics,
            prompt_logprobs=None if rows is None else rows.view(), pooled=first.pooled,
        )  # fmt: skip

    def completion(self, seq: Sequence) -> CompletionOutput:
        """Output of a row that has ended."""
        ending, row = seq.ending, seq.sampling
        assert ending is not None
        rows, kept = (None, None) if row is None else (row.logprob_rows, row.kept_ids)
        return CompletionOutput(
            seq.index, self._text(seq), seq.output_token_ids, ending.reason, ending.stop_reason,
            None if rows is None else rows.view(), seq.metrics, kept, seq.weight_versions,
        )  # fmt: skip

    def _text(self, seq: Sequence) -> str:
        """The output's text: up to a stop string, and without the token of stop_token_ids or end of text that ended it,
        unless include_stop_str_in_output asks for them."""
        params, ids = seq.params, seq.output_token_ids
        if not params.detokenize:
            return ""
        text = seq.sampling.text if seq.sampling is not None else None
        assert seq.ending is not None
        by_token = seq.ending.reason == "stop" and ids[-1] in seq.stop_token_ids
        if text is not None:
            if by_token and params.include_stop_str_in_output:
                text.push(ids[-1], watch=False)
            return text.finish()
        if by_token and not params.include_stop_str_in_output:
            ids = ids[:-1]
        return self.tokenizer.own.decode(ids, params.skip_special_tokens, seq.prompt.token_ids)

    def prompt_logprobs(self, request_id: int) -> LogprobRows | None:
        """Prompt log-probabilities of a known request that asked for them; all are there from its first token on."""
        first = self.rows[request_id][0]
        return None if first.sampling is None else first.sampling.prompt_logprob_rows
