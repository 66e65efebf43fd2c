"""One connection: HTTP/1.1 read by httptools, with bounds on what a client may send and how long it may take."""

import asyncio
import logging
from asyncio import TimerHandle
from collections import deque
from email.utils import formatdate
from ipaddress import IPv6Address
from typing import Any

import httptools

from nanovllm.serve import limits
from nanovllm.serve.errors import ApiError
from nanovllm.serve.http.app import App
from nanovllm.serve.http.call import STATUS_LINES, Call

logger = logging.getLogger("nanovllm.serve")


class Shared:
    """State that all connections of a server share."""

    def __init__(self, app: App, most: int) -> None:
        """`most`: connections that may be open at once."""
        self.app, self.most = app, most
        self.connections: set[Connection] = set()
        self._by_address: dict[str, dict[Connection, None]] = {}
        """Connections of each address, in the order in which they last began or ended a request."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Tasks, one for each request that is being answered."""
        self.body_bytes = 0
        """Bytes of all bodies that are on their way."""
        self.date = b""
        """The Date header of answers, with its end of line."""
        self._dated = self._warned = float("-inf")

    def refresh(self, now: float) -> None:
        if now - self._dated >= 1.0:
            self._dated = now
            self.date = b"date: %b\r\n" % formatdate(usegmt=True).encode()

    def add(self, connection: "Connection", now: float) -> bool:
        """Takes a connection in; returns whether there was room. Where there is none, and the log says so now and then,
        the address with most connections gives up the one that has done nothing for longest."""
        if len(self.connections) >= self.most:
            if now - self._warned >= 10.0:
                self._warned = now
                logger.warning("%d connections are open, the most that the limit of open files allows", self.most)
            most = max(self._by_address.values(), key=len)
            if (idle := next((each for each in most if not each.is_served), None)) is None:
                return False
            self.remove(idle)
            idle.transport.abort()
        self.connections.add(connection)
        self.touch(connection)
        return True

    def remove(self, connection: "Connection") -> None:
        self.connections.discard(connection)
        if (those := self._by_address.get(connection.address)) is not None:
            those.pop(connection, None)
            if not those:
                del self._by_address[connection.address]

    def touch(self, connection: "Connection") -> None:
        """Notes that a connection has begun or ended a request."""
        if connection in self.connections:
            those = self._by_address.setdefault(connection.address, {})
            those.pop(connection, None)
            those[connection] = None


class Connection(asyncio.Protocol):
    """Connection of a client, whose requests are answered one after the other. Streams write to its transport directly
    (book.py)."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._in_headers = True
        """Whether what comes next belongs to headers, or is the first byte of a request."""
        self._received = 0
        """Bytes of the headers at hand, or since they ended."""
        self._incoming: Call | None = None
        """The request whose body is on its way."""
        self._answering: Call | None = None
        self._waiting: deque[Call] = deque()
        """Requests that came before the answers to earlier ones were complete."""
        self._held_bytes = 0
        """Bytes of the incoming body, until it is whole or answered."""
        self.is_full = self._is_idle = False
        """Whether the client has to take something before more is written; whether it waits between two requests."""
        self._reads_on = True
        self._timer: TimerHandle | None = None
        self._unread: TimerHandle | None = None
        """Runs while the write buffer is full."""
        self._refused = False
        self.address = ""
        """Address of the client, or the network of 64 bits that an IPv6 address is in, which belongs to one user."""

    # -- the connection -----------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.address = _network_of(peer[0]) if isinstance(peer, tuple) else ""
        if not self.shared.add(self, self._loop.time()):
            self.refuse(ApiError(503, "the server has too many connections", "server_overloaded"))
            return
        self._watch(limits.HEADER_SECONDS, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.remove(self)
        self._unwatch()
        self._end_unread()
        self._end_body()
        self._waiting.clear()
        for call in (self._answering, self._incoming):
            if call is not None:
                call.disconnect()
        if self._answering is not None:
            self.shared.app.book.leave(self._answering)

    def pause_writing(self) -> None:
        self.is_full = True
        self._watch_reader()

    def resume_writing(self) -> None:
        self.is_full = False
        self._end_unread()
        if self._answering is None:
            self._next()
        else:
            self.shared.app.book.on_writable(self._answering)

    def _watch_reader(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._unread = self._loop.call_later(limits.SLOW_SECONDS, self._check_reader, size)

    def _check_reader(self, size: int) -> None:
        """`size`: of the write buffer when this was asked for."""
        if self.transport.get_write_buffer_size() < size:
            self._watch_reader()
        else:
            self.drop()

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def drop(self) -> None:
        self.shared.app.metrics.slow_clients += 1
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._is_idle:  # it has sent something, of which the parser may say nothing yet
            self._is_idle = False
            self._watch(limits.HEADER_SECONDS, None)
        self._received += len(data)
        if self._received > 2 * limits.BODY_BYTES:  # what frames its chunks, and follows them
            self.refuse(_body_too_large())
            return
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.refuse(_no_http())
        if self._in_headers and self._received > limits.HEADER_BYTES:
            self.refuse(_headers_too_large())
        if self._waiting and self._reads_on and not self._refused:
            self._reads_on = False
            self.transport.pause_reading()

    def _parse(self, data: bytes) -> None:
        """Feeds the parser. It takes no body for one of a request that offers another protocol, as those of Java's
        client do: such a request is read once more, without the offer."""
        while True:
            parser = self._parser
            try:
                parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                self._parser = httptools.HttpRequestParser(self)
                version = parser.get_http_version().encode()
                kept = [b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade"]
                line = b"%b %b HTTP/%b\r\n" % (parser.get_method(), self._url, version)
                data = b"".join([line, *kept, b"\r\n", data[offer.args[0] :]])

    def refuse(self, error: ApiError) -> None:
        """Answers without the application, and closes."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._unwatch()
        call = self._answering
        is_unanswered = self._in_headers if call is None else call is self._incoming and not call.status
        if is_unanswered:
            body = error.body()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINES[error.status] + head + body)
        self.transport.close()

    def _stop_parsing(self, error: ApiError) -> None:
        """Answers with an error from within a callback of the parser, and makes the parser give up."""
        self.refuse(error)
        raise error

    @property
    def is_served(self) -> bool:
        """Whether the answer to a whole request of its is to come."""
        return bool(self._waiting) or (self._answering is not None and self._answering is not self._incoming)

    # -- what the parser finds ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self._waiting) >= limits.PIPELINE:
            self._stop_parsing(ApiError(503, "too many requests wait on this connection", "server_overloaded"))
        self._url, self._headers = b"", []
        self._is_idle = False
        self.shared.touch(self)
        self._watch(limits.HEADER_SECONDS, None)

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > limits.URL_BYTES:
            self._stop_parsing(ApiError(414, f"the request's path exceeds {limits.URL_BYTES} bytes", "path_too_long"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers, which may follow a body, say nothing to us
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        headers = self._headers
        size = len(self._url) + sum(len(name) + len(value) for name, value in headers)
        if size > limits.HEADER_BYTES or len(headers) > limits.HEADER_COUNT:
            self._stop_parsing(_headers_too_large())
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        if len(length) > 12 or int(length) > limits.BODY_BYTES:
            self._stop_parsing(_body_too_large())
        parser = self._parser
        if parser.get_method() == b"CONNECT":
            self._stop_parsing(_no_http())
        if parser.should_upgrade():  # it comes once more, see _parse
            return
        is_1_1 = parser.get_http_version() == "1.1"
        stays = is_1_1 and parser.should_keep_alive()
        call = self._incoming = Call(self, parser.get_method().decode(), self._url, headers, stays, is_1_1)
        self._in_headers, self._received = False, 0
        if self._answering is None and not self._waiting and not self.is_full:
            self._start(call)
        else:
            self._waiting.append(call)
        self._watch(limits.BODY_SECONDS, _body_too_slow())

    def on_body(self, body: bytes) -> None:
        call, shared = self._incoming, self.shared
        assert call is not None
        if not call.is_over:
            self._held_bytes += len(body)
            shared.body_bytes += len(body)
            if self._held_bytes > limits.BODY_BYTES:
                self._stop_parsing(_body_too_large())
            if shared.body_bytes > limits.BODIES_BYTES and self._held_bytes > limits.SMALL_BODY:
                self._stop_parsing(ApiError(503, "the server is receiving too many bytes at once", "server_overloaded"))
            call.take(body)
        if self._timer is not None and self._loop.time() > self._timer.when() - limits.BODY_SECONDS + 1.0:
            self._watch(limits.BODY_SECONDS, _body_too_slow())

    def on_message_complete(self) -> None:
        call, self._incoming = self._incoming, None
        if call is None:  # an offer of another protocol
            return
        self._unwatch()
        self._end_body()
        self._in_headers, self._received = True, 0
        call.end_body()
        if self._answering is None:
            self._next()

    def _end_body(self) -> None:
        self.shared.body_bytes -= self._held_bytes
        self._held_bytes = 0

    # -- answers ------------------------------------------------------------------------------------------------

    @property
    def date(self) -> bytes:
        return self.shared.date

    def _start(self, call: Call) -> None:
        shared = self.shared
        shared.refresh(self._loop.time())
        self._answering = call
        task = self._loop.create_task(shared.app.answer(call))
        shared.tasks.add(task)
        task.add_done_callback(shared.tasks.discard)

    def end_answer(self, call: Call) -> None:
        self._answering = None
        self.shared.touch(self)
        if self._incoming is call:
            self._end_body()
        if not call.stays:
            self.transport.close()
        elif self._incoming is not call:  # else the rest of its body is still to come
            self._next()

    def _next(self) -> None:
        """Goes on with the next request, once the client has taken what is written."""
        if self.is_full or self._refused or self.transport.is_closing():
            return
        if self._waiting:
            self._start(self._waiting.popleft())
        elif self._incoming is None and self._timer is None:
            self._is_idle = True
            self._watch(limits.KEEP_ALIVE_SECONDS, None)
        if not self._waiting and not self._reads_on:
            self._reads_on = True
            self.transport.resume_reading()

    # -- patience -----------------------------------------------------------------------------------------------

    def _watch(self, seconds: float, error: ApiError | None) -> None:
        """Ends the connection after so many seconds, with an error if there is one to send."""
        self._unwatch()
        self._timer = self._loop.call_later(seconds, self._time_is_up, seconds, error)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self, seconds: float, error: ApiError | None) -> None:
        self._timer = None
        if not self._reads_on:  # it is us who are late
            self._watch(seconds, error)
        elif error is not None:
            self.refuse(error)
        elif not self.transport.is_closing():
            self.transport.close()


def _network_of(host: str) -> str:
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or address.packed[:8])


def _no_http() -> ApiError:
    return ApiError(400, "not an HTTP request", "invalid_http")


def _headers_too_large() -> ApiError:
    bound = f"{limits.HEADER_BYTES} bytes and {limits.HEADER_COUNT} headers"
    return ApiError(431, f"the request's headers exceed {bound}", "headers_too_large")


def _body_too_large() -> ApiError:
    return ApiError(413, f"the request's body exceeds {limits.BODY_BYTES} bytes", "body_too_large")


def _body_too_slow() -> ApiError:
    return ApiError(408, "the request's body did not arrive in time", "request_timeout")
