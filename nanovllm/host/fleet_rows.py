"""Results of a fleet's engines, written into the rows of a book of requests."""

import time

import numpy as np

from nanovllm.engine.request_book import RequestBook
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Done, Step


class FleetRows:
    """Rows that engines compute."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book
        self._plain: dict[int, Sequence] = {}
        """Unfinished rows with a first token that need no more than to append tokens, by number."""
        self.num_generated = 0
        self.num_finished = {"stop": 0, "length": 0, "abort": 0}

    def take(self, step: Step) -> None:
        """Writes a step into its rows. A loop over all of them: kept lean."""
        now, plain, known = time.perf_counter(), self._plain, self._book.by_number
        for number, line in step.logprobs:
            if (seq := known.get(number)) is not None:
                assert seq.sampling is not None and seq.sampling.logprob_rows is not None
                seq.sampling.logprob_rows.append(np.frombuffer(line, np.int32)[None], 0)
        for number, kept in step.kept:
            if (seq := known.get(number)) is not None:
                assert seq.sampling is not None and seq.sampling.kept_ids is not None
                seq.sampling.kept_ids.append_ids(np.frombuffer(kept, np.int32))
        for request_id, lines in step.prompts:
            if (seq := known.get(request_id)) is not None and (row := seq.sampling) is not None:
                for position, words in enumerate(lines):
                    if words is not None:
                        row.take_prompt_logprobs(position, np.frombuffer(words, np.int32)[None], [0])
        for number, token in zip(step.rows, step.tokens, strict=True):
            if (seq := plain.get(number)) is not None:
                seq.token_ids.append(token)
                seq.num_tokens += 1
                seq.metrics.token_times.append(now)
            elif (seq := known.get(number)) is not None:
                self._gain(seq, token, now)
        self.num_generated += len(step.rows)
        for end in step.finishes:
            if (seq := known.get(end.row)) is not None and seq.ending is None:
                if end.token is not None:
                    self._gain(seq, end.token, now)
                    self.num_generated += 1
                seq.metrics.finished_time = now
                if end.weight_versions:
                    seq.version_starts = [(version, start) for version, start, _ in end.weight_versions]
                if end.pooled is not None:
                    seq.pooled = np.frombuffer(end.pooled, np.float32)
                self.num_finished[end.reason] += 1
                seq.end(end.reason, end.stop_reason)
            plain.pop(end.row, None)  # also of a request that its book has forgotten
        for done in step.done:
            self._take_done(done, now)

    def _gain(self, seq: Sequence, token_id: int, now: float) -> None:
        metrics = seq.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        metrics.token_times.append(now)
        seq.token_ids.append(token_id)
        seq.num_tokens += 1
        if (row := seq.sampling) is None:
            self._plain[seq.number] = seq
        elif row.text is not None and token_id not in seq.stop_token_ids:
            row.text.push(token_id, watch=seq.num_output_tokens >= seq.params.min_tokens)

    def _take_done(self, done: Done, now: float) -> None:
        """Takes what is known when all completions of a request have ended."""
        for seq in self._book.rows.get(done.request_id, []):
            if seq.num_prompt_cached_tokens is None:
                seq.num_prompt_cached_tokens = done.num_cached_tokens
            if seq.metrics.first_scheduled_time is None:
                begin = now - done.prefill - done.decode
                seq.metrics.first_scheduled_time = max(seq.metrics.arrival_time, begin)
