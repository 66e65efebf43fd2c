"""Results of a fleet's engines, written into the rows of a book of requests."""

import time
from collections.abc import Sequence as Items

import numpy as np

from nanovllm.engine.request_book import RequestBook
from nanovllm.engine.sequence import Sequence
from nanovllm.host import wire
from nanovllm.outputs import StepColumns


class FleetRows:
    """Rows that engines compute."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book
        self._live: dict[int, Sequence] = {}
        """Unfinished rows by their number."""
        self._plain: dict[int, Sequence] = {}
        """Unfinished rows with a first token that need no more than to append tokens."""
        self.num_generated = 0
        self.num_finished = {"stop": 0, "length": 0, "abort": 0}

    def open(self, seqs: list[Sequence]) -> None:
        """Adds the rows of a request."""
        self._live |= {seq.number: seq for seq in seqs}

    def take(self, frame: wire.Up, columns: StepColumns) -> None:
        """Writes a frame into its rows, and adds it to `columns`."""
        if isinstance(frame, wire.Step):
            self._take_step(frame, columns)
        elif isinstance(frame, wire.Refused):
            number = frame.request_id
            while (seq := self._live.get(number)) is not None and seq.request_id == frame.request_id:
                number += 1
                end = wire.Finish(seq.number, None, "abort", frame.message)
                self._end(seq, columns.add(seq.request_id, seq.index, -1), end, columns, time.perf_counter())

    def _take_step(self, step: wire.Step, columns: StepColumns) -> None:
        """A loop over all rows of a step: kept lean."""
        now, plain = time.perf_counter(), self._plain
        lines: dict[int, list[bytes]] = {}
        for number, line in step.logprobs:
            lines.setdefault(number, []).append(line)
        for request_id, words in step.prompts:
            self._take_prompt(request_id, words)
        for number, kept in step.kept:
            if (seq := self._live.get(number)) is not None:
                assert seq.sampling is not None and seq.sampling.kept_ids is not None
                seq.sampling.kept_ids.append_ids(np.frombuffer(kept, np.int32))
        ids, indices, tokens = columns.request_ids, columns.indices, columns.token_ids
        for number, token in zip(step.rows, step.tokens, strict=True):
            seq = plain.get(number)
            if seq is None:
                if (seq := self._live.get(number)) is None:
                    continue
                self._gain(seq, token, lines, now)
                entry = columns.add(seq.request_id, seq.index, token)
                if seq.sampling is None:
                    plain[number] = seq
                elif (rows := seq.sampling.logprob_rows) is not None:
                    columns.logprobs[entry] = rows, len(rows) - 1
                continue
            seq.token_ids.append(token)
            seq.num_tokens += 1
            seq.metrics.token_times.append(now)
            ids.append(seq.request_id)
            indices.append(seq.index)
            tokens.append(token)
            self.num_generated += 1
        ended = []
        for end in step.finishes:
            if (seq := self._live.get(end.row)) is None:
                continue
            token = -1 if end.token is None else end.token
            if token >= 0:
                self._gain(seq, token, lines, now)
            entry = columns.add(seq.request_id, seq.index, token)
            if seq.sampling is not None and (rows := seq.sampling.logprob_rows) is not None and token >= 0:
                columns.logprobs[entry] = rows, len(rows) - 1
            ended.append((seq, entry, end))
        for done in step.done:
            self._take_done(done, now)
        for seq, entry, end in ended:
            self._end(seq, entry, end, columns, now)

    def _gain(self, seq: Sequence, token_id: int, lines: dict[int, list[bytes]], now: float) -> None:
        """Adds a token to a row. `lines`: log-probabilities by row that have not been taken yet."""
        metrics = seq.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        metrics.token_times.append(now)
        seq.token_ids.append(token_id)
        seq.num_tokens += 1
        self.num_generated += 1
        if (row := seq.sampling) is None:
            return
        if row.logprob_rows is not None and (own := lines.get(seq.number)):
            row.logprob_rows.append(np.frombuffer(own.pop(0), np.int32)[None], 0)
        if row.text is not None and token_id not in seq.stop_token_ids:
            row.text.push(token_id, watch=seq.num_output_tokens >= seq.params.min_tokens)

    def _take_prompt(self, request_id: int, lines: Items[bytes | None]) -> None:
        seqs = self._book.rows.get(request_id)
        if seqs is None or (row := seqs[0].sampling) is None:
            return
        for position, line in enumerate(lines):
            if line is not None:
                row.take_prompt_logprobs(position, np.frombuffer(line, np.int32)[None], [0])

    def _take_done(self, done: wire.Done, now: float) -> None:
        """Takes what is known when all completions of a request have ended."""
        for seq in self._book.rows.get(done.request_id, []):
            if seq.num_prompt_cached_tokens is None:
                seq.num_prompt_cached_tokens = done.num_cached_tokens
            if seq.metrics.first_scheduled_time is None:
                begin = now - done.prefill - done.decode
                seq.metrics.first_scheduled_time = max(seq.metrics.arrival_time, begin)

    def _end(self, seq: Sequence, entry: int, end: wire.Finish, columns: StepColumns, now: float) -> None:
        seq.metrics.finished_time = now
        if end.weight_versions:
            seq.version_starts = [(version, start) for version, start, _ in end.weight_versions]
        del self._live[seq.number]
        self._plain.pop(seq.number, None)
        self.num_finished[end.reason] += 1
        if end.pooled is not None:
            seq.pooled = np.frombuffer(end.pooled, np.float32)
        seq.end(end.reason, end.stop_reason)
        assert seq.ending is not None
        columns.endings[entry] = seq.ending
