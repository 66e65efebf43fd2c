"""HTTP/1.1: uvicorn's httptools protocol with bounds on what a client may send and how long it may take."""

import re
from asyncio import TimerHandle
from email.utils import formatdate
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from nanovllm.serve import limits
from nanovllm.serve.errors import ApiError
from nanovllm.serve.metrics import Metrics

_OFFER = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
"""The header by which clients offer another protocol, as Java's do. With it the parser would leave out the body."""
_CUT = re.compile(rb"(\r(\n(\r|u(p(g(r(a(de?)?)?)?)?)?)?)?)?\Z", re.IGNORECASE)
"""What may go on as that, or as the end of all headers, in another read."""


class SharedState(ServerState):
    """What the connections of a server share: counters, and the Date header of their answers."""

    _dated = float("-inf")

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self.metrics = metrics
        self.body_bytes = 0
        """Of all bodies that are on their way."""

    def refresh(self, now: float) -> None:
        if now - self._dated >= 1.0:
            self._dated = now
            self.default_headers = [(b"date", formatdate(usegmt=True).encode())]


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `scope["connection"]` is this object: streams write to its transport directly (request.py)."""

    server_state: SharedState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._received = 0
        """Bytes of the headers at hand, or since they ended."""
        self._cut = b""
        """Those of them that wait for what follows."""
        self._held_bytes = 0
        """Of the request's body, until it is whole or answered."""
        self._timer: TimerHandle | None = None
        self._unread: TimerHandle | None = None
        """Runs while the write buffer is full."""
        self._refused = False
        self._running: RequestResponseCycle | None = None
        """The request that is being answered."""
        self.on_disconnect: Any = None
        """Called once when the client leaves before the response is complete."""
        self.on_writable: Any = None
        """Called when the write buffer has been drained after it was full."""

    # -- the connection -----------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch(limits.HEADER_SECONDS, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._end_unread()
        self._end_body()
        self.pipeline.clear()
        self.give_up()
        super().connection_lost(exc)
        gone, self.on_disconnect = self.on_disconnect, None
        if gone is not None:
            gone()

    def give_up(self) -> None:
        """Nothing more is sent: the client is gone, or its answer cannot be completed."""
        if self._running is not None:
            self._running.disconnected = True  # uvicorn knows of the latest request, which may be a later one
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_unread()
        if self.on_writable is not None:
            self.on_writable()

    def _watch_reader(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(limits.SLOW_SECONDS, self._check_reader, size)

    def _check_reader(self, size: int) -> None:
        """`size`: of the write buffer when this was asked for."""
        if self.transport.get_write_buffer_size() < size:
            self._watch_reader()
        else:
            self.let_go()

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def let_go(self) -> None:
        """The client does not read what it is sent."""
        self.server_state.metrics.slow_clients += 1
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        counted = data
        if self._in_headers:
            head, end, rest = (self._cut + data).partition(b"\r\n\r\n")
            self._cut = b"" if end else head[_CUT.search(head).start() :]  # type: ignore[union-attr]
            counted = head.removesuffix(self._cut)
            data = _OFFER.sub(b"\r\nx-upgrade:", counted) + end + rest
        self._received += len(counted)
        if self._received > 2 * limits.BODY_BYTES:  # what frames its chunks, and follows them
            self.refuse(_body_too_large())
            return
        super().data_received(data)
        if self._in_headers and self._received > limits.HEADER_BYTES:
            self.refuse(_headers_too_large())

    def _stop_parsing(self, error: ApiError) -> None:
        """From a callback of the parser: answers, and makes the parser give up."""
        self.refuse(error)
        raise error

    def send_400_response(self, msg: str) -> None:
        self.refuse(ApiError(400, msg.rstrip("."), "invalid_http"))

    def refuse(self, error: ApiError) -> None:
        """Answers without the application, and closes."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._unwatch()
        running = self._running
        if running is None or running.response_complete:
            is_unanswered = self._in_headers
        else:
            is_unanswered = running is self.cycle and not running.response_started
        if is_unanswered:
            body = error.body()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    # -- one request --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.server_state.refresh(self.loop.time())
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]
        self._watch(limits.HEADER_SECONDS, None)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers, which may follow a body, say nothing to us
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > limits.HEADER_BYTES or len(self.headers) > limits.HEADER_COUNT:
            self._stop_parsing(_headers_too_large())
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if len(length) > 12 or int(length) > limits.BODY_BYTES:
            self._stop_parsing(_body_too_large())
        self._in_headers, self._received = False, 0
        super().on_headers_complete()
        self._watch(limits.BODY_SECONDS, _body_too_slow())

    def on_body(self, body: bytes) -> None:
        if not self.cycle.response_complete:
            self._held_bytes += len(body)
            self.server_state.body_bytes += len(body)
            if self._held_bytes > limits.BODY_BYTES:
                self._stop_parsing(_body_too_large())
            if self.server_state.body_bytes > limits.BODIES_BYTES:
                self._stop_parsing(ApiError(503, "the server is receiving too much at once", "server_overloaded"))
        super().on_body(body)
        if self._timer is not None and self.loop.time() > self._timer.when() - limits.BODY_SECONDS + 1.0:
            self._watch(limits.BODY_SECONDS, _body_too_slow())

    def on_message_complete(self) -> None:
        self._unwatch()
        self._end_body()
        self._in_headers, self._received = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._end_body()
        super().on_response_complete()

    def _end_body(self) -> None:
        self.server_state.body_bytes -= self._held_bytes
        self._held_bytes = 0

    # -- patience -----------------------------------------------------------------------------------------------

    def _unset_keepalive_if_required(self) -> None:
        """An idle client has sent something, of which the parser may say nothing yet."""
        if self.timeout_keep_alive_task is not None:
            self._watch(limits.HEADER_SECONDS, None)
        super()._unset_keepalive_if_required()

    def _watch(self, seconds: float, error: ApiError | None) -> None:
        """Ends the connection after so many seconds, with an error if there is one to send."""
        self._unwatch()
        self._timer = self.loop.call_later(seconds, self._time_is_up, seconds, error)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self, seconds: float, error: ApiError | None) -> None:
        if self.flow.read_paused:  # it is us who are late
            self._watch(seconds, error)
        elif error is not None:
            self.refuse(error)
        elif not self.transport.is_closing():
            self.transport.close()


def _headers_too_large() -> ApiError:
    bound = f"{limits.HEADER_BYTES} bytes and {limits.HEADER_COUNT} headers"
    return ApiError(431, f"the request's headers exceed {bound}", "headers_too_large")


def _body_too_large() -> ApiError:
    return ApiError(413, f"the request's body exceeds {limits.BODY_BYTES} bytes", "body_too_large")


def _body_too_slow() -> ApiError:
    return ApiError(408, "the rest of the body did not come in time", "request_timeout")
