"""The book of all requests in flight, which alone decides about their lives; and the hot path: a step's tokens become
text, chunks and bytes on their sockets in one callback, without a task or a queue for each stream."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

from nanovllm.engine.step import Done, Finish, Step
from nanovllm.serve import limits
from nanovllm.serve.errors import ApiError, server_error
from nanovllm.serve.http.call import Call
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.request import Request, Row
from nanovllm.serve.text_pool import TextPool

logger = logging.getLogger("nanovllm.serve")
SSE = b"text/event-stream; charset=utf-8"
_SSE_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_HEADS = 2
"""First chunks of one stream that are being written at once: the others need not wait for a long one, and a client that
does not read keeps few of them waiting."""


class Book:
    """All requests that the engine works on."""

    def __init__(self, metrics: Metrics, pool: TextPool, abort: Callable[[int], None]) -> None:
        """`pool`: writes first chunks that take long. `abort`: tells the engine that one of its requests is no longer
        wanted."""
        self._metrics, self._pool, self._abort = metrics, pool, abort
        self._rows: dict[int, Row] = {}
        """Rows by the engine's number, until their prompt's have all ended."""
        self.requests: dict[Call, Request] = {}
        """A stream is among them until its client has taken its end."""
        self._touched: dict[Request, None] = {}
        """Requests that the current steps have results for."""
        self._turn = 0
        self._next_id = 0
        self.rows_by_key: Counter[int | None] = Counter()
        """Rows in flight of each API key."""

    @property
    def num_rows(self) -> int:
        """Rows in flight."""
        return self.rows_by_key.total()

    def open(self, request: Request) -> list[int]:
        """Takes a request in; returns the engine's id for each of its prompts."""
        first = self._next_id
        self._next_id += len(request.rows)
        for number, row in enumerate(request.rows, first):
            self._rows[number] = row
            row.number, row.last_time = number, request.arrival
        request.unfinished.update(range(first, self._next_id, request.n))
        self.requests[request.call] = request
        self.rows_by_key[request.key] += len(request.rows)
        return sorted(request.unfinished)

    # -- a step -------------------------------------------------------------------------------------------------

    def take(self, step: Step, now: float) -> None:
        """Takes a step's tokens in; `flush` sends what came of them."""
        rows, touched = self._rows, self._touched
        gaps: dict[float, int] = {}
        for number, line in step.logprobs:
            if (row := rows.get(number)) is not None and row.lines is not None:
                row.lines.append(line)
        for number, ids in step.kept:
            if (row := rows.get(number)) is not None:
                row.kept.append(ids)
        for request_id, lines in step.prompts:
            if (row := rows.get(request_id)) is not None:
                row.request.prompt_lines[row.prompt_index] = lines
        for request_id, count in step.begun:
            if (row := rows.get(request_id)) is not None:
                row.num_cached_tokens = count
        for number, token in zip(step.rows, step.tokens, strict=True):
            row = rows.get(number)
            if row is None:
                continue  # aborted
            try:
                if text := row.push(token):
                    row.pieces.append(text)
            except Exception:
                self._give_up(row.request)
                continue
            if row.ids is not None:
                row.ids.append(token)
            if row.num_tokens:
                gaps[row.last_time] = gaps.get(row.last_time, 0) + 1
            row.num_tokens += 1
            row.last_time = now
            request = row.request
            request.ready[row] = touched[request] = None
        for end in step.finishes:
            self._finish(end, now)
        for gap, count in gaps.items():
            self._metrics.inter_token.observe(now - gap, count)
        for done in step.done:
            self._end_prompt(done, now)

    def _finish(self, end: Finish, now: float) -> None:
        row = self._rows.get(end.row)
        if row is None:
            return
        if end.reason == "abort" and end.stop_reason is not None:  # it could not go on, with a grammar say
            self.fail(row.request, ApiError(400, str(end.stop_reason), "generation_aborted"))
            return
        try:
            row.finish(end)
        except Exception:
            self._give_up(row.request)
            return
        if row.num_tokens > 1:
            self._metrics.inter_token.observe(now - row.last_time)
        row.last_time = now
        self._metrics.count_row(row)
        self.rows_by_key[row.request.key] -= 1
        row.request.ready[row] = self._touched[row.request] = None

    def _end_prompt(self, done: Done, now: float) -> None:
        if (first := self._rows.get(done.request_id)) is None:
            return
        request = first.request
        request.unfinished.discard(done.request_id)
        rows = [self._rows.pop(number) for number in range(first.number, first.number + request.n)]
        first.num_cached_tokens = done.num_cached_tokens
        request.queued, request.prefill = max(request.queued, done.queued), max(request.prefill, done.prefill)
        request.decode = max(request.decode, done.decode)
        self._metrics.count_end(done, rows, len(request.prompts[first.prompt_index]), now - request.arrival)
        self._touched[request] = None

    # -- bytes --------------------------------------------------------------------------------------------------

    def flush(self, now: float) -> None:
        """Writes to every stream that has gained something; each turn begins with another one."""
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
            elif not request.unfinished:
                self._close(request)

    def write(self, request: Request, now: float) -> None:
        """Writes what a stream has to send, the first of it as the response begins. A client that does not read gets it
        merged later."""
        if request.call not in self.requests:
            return
        try:
            if not self._begin(request, now):
                return
            if data := self._gained(request):
                request.call.write(data)
                request.last_write = now
        except Exception:
            self._give_up(request)
        else:
            if not request.unfinished and not request.ready:
                self._close(request)

    def _begin(self, request: Request, now: float) -> bool:
        """Begins the response where none has begun; returns whether the client takes more now."""
        call = request.call
        if not request.has_begun and not call.is_gone:
            call.connection.transport.set_write_buffer_limits(high=limits.WRITE_BUFFER)
            call.begin(200, SSE, _SSE_HEADERS)
            request.has_begun, request.last_write = True, now
        return not (call.is_full or call.is_gone)

    def _gained(self, request: Request) -> bytes:
        """Bytes of what has not been sent, and of the end where nothing more is to come."""
        out, form = [], request.format
        ready, request.ready = request.ready, {}
        for row in ready:
            if not row.has_begun:
                if (head := self._head(row)) is None:
                    request.ready[row] = None
                    continue
                row.has_begun = True
                out.append(head)
            text = "".join(row.pieces)
            row.pieces.clear()
            if text or row.end is not None or row.ids or row.lines:
                out.append(form.chunk(row, text))
        if not request.unfinished and not request.ready:
            out.append(form.end(request) if request.error is None else form.failure(request.error))
        return b"".join(out)

    def _head(self, row: Row) -> bytes | None:
        """The first chunk of a row; None: the pool writes it, after which `write` is called."""
        request, heads, form = row.request, row.request.heads, row.request.format
        if not (size := form.head_size(row)):
            return form.head(row)
        if request.error is not None:
            return b""
        if row not in heads and len(heads) < _HEADS:
            heads[row] = asyncio.create_task(self._pool.in_thread(request.call, partial(form.head, row), size))
            heads[row].add_done_callback(partial(self._on_head, request))
        return heads.pop(row).result() if row in heads and heads[row].done() else None

    def _on_head(self, request: Request, written: "asyncio.Task[bytes]") -> None:
        error = None if written.cancelled() else written.exception()
        if isinstance(error, ApiError):
            self.fail(request, error)
        else:
            self.write(request, asyncio.get_running_loop().time())

    def on_writable(self, call: Call) -> None:
        """A client that was slow takes more."""
        if (request := self.requests.get(call)) is not None and request.is_streamed:
            self.write(request, asyncio.get_running_loop().time())

    # -- ends ---------------------------------------------------------------------------------------------------

    def _close(self, request: Request, reason: str = "error", error: ApiError | None = None) -> None:
        """The only way out. `reason`: that counts for rows which have not ended. `error`: that no client has been
        told."""
        if self.requests.pop(request.call, None) is None:
            return
        for request_id in request.unfinished:
            self._abort(request_id)
        request.unfinished.clear()
        known = [row for row in request.rows if self._rows.pop(row.number, None) is not None]
        gone = sum(row.end is None for row in known)
        self.rows_by_key[request.key] -= gone
        self._metrics.finished[reason] += gone
        if request.done.done():
            return
        if error is None:
            request.done.set_result(None)
        else:
            request.done.set_exception(error)
            request.done.exception()  # seen: it may never be awaited

    def leave(self, call: Call, reason: str = "abort") -> None:
        """Ends a request whose client is gone."""
        if (request := self.requests.get(call)) is not None:
            request.has_left = True
            self._close(request, reason)

    def fail(self, request: Request, error: ApiError) -> None:
        """Ends a request with an error: the response's status where none has begun, else its last event."""
        if request.call not in self.requests:
            return
        request.error = error
        for request_id in request.unfinished:
            self._abort(request_id)
        request.unfinished.clear()
        if request.has_begun and not (request.call.is_full or request.call.is_gone):
            self.write(request, request.last_write)
            return
        if request.has_begun:
            request.call.connection.transport.abort()  # the client would never see the error
        self._close(request, error=error)

    def _give_up(self, request: Request) -> None:
        """A mistake of ours with one request is the end of that one alone."""
        logger.exception("request %s failed", request.id)
        if request.has_begun:
            request.call.connection.transport.abort()
            self.leave(request.call, "error")
        else:
            self.fail(request, server_error())

    def refuse(self, request_id: int, error: ApiError) -> None:
        """The engine did not take a request's prompt."""
        if (first := self._rows.get(request_id)) is not None:
            first.request.unfinished.discard(request_id)
            first.request.format.explain(error)
            self.fail(first.request, error)

    def fail_all(self, error: ApiError) -> None:
        """Ends all requests with an error."""
        for request in list(self.requests.values()):
            self.fail(request, error)

    def abort_all(self, wanted: Callable[[Request], bool]) -> int:
        """Ends requests with what they have, and not as mistakes; returns how many."""
        found = [request for request in self.requests.values() if wanted(request)]
        for request_id in (each for request in found for each in request.unfinished):
            self._abort(request_id)
        return len(found)

    def sweep(self, now: float, request_timeout: float | None) -> None:
        """Shows signs of life on silent streams, and ends those that pile up or take too long; called once a second."""
        for request in list(self.requests.values()):
            if request.num_bytes_waiting > limits.PENDING_BYTES:
                request.call.connection.drop()
                self.leave(request.call)
            elif request_timeout is not None and now - request.arrival > request_timeout:
                self.fail(request, ApiError(408, f"no end within {request_timeout} s", "request_timeout"))
            elif request.is_streamed:
                is_due = request.format.counts_events and not request.has_begun
                patience = limits.BEGIN_SECONDS if is_due else limits.PING_SECONDS
                if now - request.last_write > patience and self._begin(request, now):
                    request.call.write(request.format.sign_of_life(request))
                    request.last_write = now
