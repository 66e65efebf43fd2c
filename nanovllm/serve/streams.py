"""All requests in flight, and the hot path: a step's tokens become text, chunks and bytes on their sockets in one
callback, without a task or a queue for each stream."""

import logging
from collections import Counter
from collections.abc import Callable

from nanovllm.engine.step import Done, Finish, Step
from nanovllm.serve import limits
from nanovllm.serve.errors import ApiError, server_error
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.request import Completion, Request

logger = logging.getLogger("nanovllm.serve")


class Streams:
    """All requests that the engine works on."""

    def __init__(self, metrics: Metrics, abort: Callable[[int], None]) -> None:
        """`abort`: tells the engine that one of its requests is no longer wanted."""
        self._metrics, self._abort = metrics, abort
        self._rows: dict[int, Completion] = {}
        """Completions by the engine's number, until their prompt's have all ended."""
        self.requests: set[Request] = set()
        self._touched: dict[Request, None] = {}
        """Requests that the current steps have results for."""
        self._turn = 0
        self._next_id = 0
        self.rows_by_key: Counter[int | None] = Counter()
        """Completions in flight of each API key."""

    @property
    def num_rows(self) -> int:
        """Completions in flight."""
        return self.rows_by_key.total()

    def add(self, request: Request) -> list[int]:
        """Takes a request in; returns the engine's id for each of its prompts."""
        first = self._next_id
        self._next_id += len(request.completions)
        for row, completion in enumerate(request.completions, first):
            self._rows[row] = completion
            completion.row = row
            completion.last_time = request.arrival
        request.parts.update(range(first, self._next_id, request.n))
        self.requests.add(request)
        self.rows_by_key[request.key] += len(request.completions)
        return sorted(request.parts)

    # -- a step -------------------------------------------------------------------------------------------------

    def take(self, step: Step, now: float) -> None:
        """Takes a step's tokens in; `flush` sends what came of them."""
        rows, touched = self._rows, self._touched
        gaps: dict[float, int] = {}
        for row, line in step.logprobs:
            if (completion := rows.get(row)) is not None and completion.lines is not None:
                completion.lines.append(line)
        for row, ids in step.kept:
            if (completion := rows.get(row)) is not None:
                completion.kept.append(ids)
        for request_id, lines in step.prompts:
            if (first := rows.get(request_id)) is not None:
                first.request.prompt_lines[first.prompt_index] = lines
        for request_id, count in step.begun:
            if (first := rows.get(request_id)) is not None:
                first.num_cached_tokens = count
        for row, token in zip(step.rows, step.tokens, strict=True):
            completion = rows.get(row)
            if completion is None:
                continue  # aborted
            try:
                if text := completion.push(token):
                    completion.pieces.append(text)
            except Exception:
                self._give_up(completion.request)
                continue
            if completion.ids is not None:
                completion.ids.append(token)
            if completion.num_tokens:
                gaps[completion.last_time] = gaps.get(completion.last_time, 0) + 1
            completion.num_tokens += 1
            completion.last_time = now
            request = completion.request
            request.ready[completion] = touched[request] = None
        for end in step.finishes:
            self._finish(end, now)
        for gap, count in gaps.items():
            self._metrics.inter_token.observe(now - gap, count)
        for part in step.done:
            self._end_part(part, now)
        if step.stats is not None:
            self._metrics.engine = step.stats

    def _finish(self, end: Finish, now: float) -> None:
        completion = self._rows.get(end.row)
        if completion is None:
            return
        if end.reason == "abort" and end.stop_reason is not None:  # it could not go on, with a grammar say
            self.fail(completion.request, ApiError(400, str(end.stop_reason), "generation_aborted"))
            return
        try:
            completion.finish(end)
        except Exception:
            self._give_up(completion.request)
            return
        if completion.num_tokens > 1:
            self._metrics.inter_token.observe(now - completion.last_time)
        completion.last_time = now
        self._metrics.count_completion(completion)
        self.rows_by_key[completion.request.key] -= 1
        completion.request.ready[completion] = self._touched[completion.request] = None

    def _end_part(self, part: Done, now: float) -> None:
        if (first := self._rows.get(part.request_id)) is None:
            return
        request = first.request
        request.parts.discard(part.request_id)
        own = [self._rows.pop(row) for row in range(first.row, first.row + request.n)]
        first.num_cached_tokens = part.num_cached_tokens
        request.queued, request.prefill = max(request.queued, part.queued), max(request.prefill, part.prefill)
        request.decode = max(request.decode, part.decode)
        self._metrics.count_part(part, own, len(request.prompts[first.prompt_index]), now - request.arrival)
        self._touched[request] = None

    def flush(self, now: float) -> None:
        """Writes to every stream that has gained something; each turn begins with another one. A stream stays in
        `requests` until its client has taken its end."""
        requests, self._touched = [*self._touched], {}
        if not requests:
            return
        self._turn += 1
        start = self._turn % len(requests)
        for request in requests[start:] + requests[:start] if start else requests:
            if request.first_token is None and request.num_output_tokens:
                request.first_token = now
                self._metrics.first_token.observe(now - request.arrival)
            if request.is_streamed:
                self.write(request, now)
            elif not request.parts:
                request.complete()
                self._remove(request)

    def write(self, request: Request, now: float) -> None:
        """Writes what a stream has to send, if its client reads."""
        try:
            request.flush(now)
        except Exception:
            self._give_up(request)
        if request.is_over:
            self._remove(request)

    def abort_all(self, wanted: Callable[[Request], bool]) -> int:
        """Ends requests with what they have, and not as mistakes; returns how many."""
        found = [request for request in self.requests if wanted(request)]
        for request in found:
            self._abort_parts(request)
        return len(found)

    # -- early ends ---------------------------------------------------------------------------------------------

    def refuse(self, request_id: int, error: ApiError) -> None:
        """The engine did not take a request's prompt."""
        if (first := self._rows.get(request_id)) is not None:
            first.request.parts.discard(request_id)
            first.request.explain(error)
            self.fail(first.request, error)

    def fail(self, request: Request, error: ApiError) -> None:
        """Ends a request with an error."""
        if request in self.requests:
            self._abort_parts(request)
            self._remove(request)
            try:
                request.fail(error)
            except Exception:
                self._give_up(request)

    def fail_all(self, error: ApiError) -> None:
        """Ends all requests with an error."""
        for request in list(self.requests):
            self.fail(request, error)

    def _give_up(self, request: Request) -> None:
        """A mistake of ours with one request is the end of that one alone."""
        logger.exception("request %s failed", request.id)
        self._abort_parts(request)
        if request.connection is None:
            request.fail(server_error())
        else:
            request.leave()
            request.connection.transport.abort()
        self._remove(request)

    def leave(self, request: Request) -> None:
        """Ends a request whose client is gone."""
        if request in self.requests:
            self._abort_parts(request)
            request.leave()
            self._remove(request, "abort")

    def _abort_parts(self, request: Request) -> None:
        for part in request.parts:
            self._abort(part)

    def _remove(self, request: Request, reason: str = "error") -> None:
        """`reason`: that counts for completions which have not ended."""
        if request not in self.requests:
            return
        self.requests.discard(request)
        known = [each for each in request.completions if self._rows.pop(each.row, None) is not None]
        gone = sum(each.finish_reason is None for each in known)
        self.rows_by_key[request.key] -= gone
        self._metrics.finished[reason] += gone

    def sweep(self, now: float, request_timeout: float | None) -> None:
        """Shows signs of life on silent streams, and ends those that pile up or take too long; called once a second."""
        for request in list(self.requests):
            if request.is_unread and _waiting(request) > limits.PENDING_BYTES:
                assert request.connection is not None
                request.connection.drop()
                self.leave(request)
            elif request_timeout is not None and now - request.arrival > request_timeout:
                self.fail(request, ApiError(408, f"no end within {request_timeout} s", "request_timeout"))
            elif request.is_streamed:
                is_due = request.counts_events and request.connection is None
                if now - request.last_write > (limits.BEGIN_SECONDS if is_due else limits.PING_SECONDS):
                    request.ping(now)


def _waiting(request: Request) -> int:
    """About how many bytes an answer has that were not sent."""
    pieces = sum(len(piece) for each in request.ready for piece in each.pieces)
    ids = sum(len(each.ids or ()) for each in request.ready)
    numbers = sum(len(line) // 4 for each in request.ready for line in each.lines or ())
    return pieces + limits.ID_BYTES * ids + limits.LOGPROB_BYTES * numbers
