"""One HTTP request and its response."""

import asyncio
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote
from uuid import uuid4

import httptools
import msgspec

from nanovllm.serve.errors import ApiError, bad_request

JSON = b"application/json"
STATUS_LINES = {each.value: b"HTTP/1.1 %d %b\r\n" % (each.value, each.phrase.encode()) for each in HTTPStatus}
_GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_JSON_TYPE = re.compile(r"application/(?:[\w.-]+\+)?json\s*(?:;|$)", re.IGNORECASE)
_LARGE = 1 << 20
"""Bytes of an answer that take a while to copy."""


class Client(Protocol):
    """The connection of a call, as far as its answer needs it (see connection.py)."""

    transport: Any
    is_full: bool
    """Whether the client has to take something before more is written."""

    @property
    def date(self) -> bytes:
        """The Date header, with its end of line."""

    def end_answer(self, call: "Call") -> None:
        """The response to `call` is written."""

    def drop(self) -> None:
        """The client does not read what it is sent."""


class Call:
    """HTTP request as a handler gets it, and the way to answer it."""

    def __init__(
        self, connection: Client, method: str, url: bytes, headers: list[tuple[bytes, bytes]], stays: bool,
        knows_chunks: bool = True,
    ) -> None:  # fmt: skip
        """`headers`: names in lower case; `stays`: whether the connection is kept for further requests; `knows_chunks`:
        whether a body may come in chunks, as of HTTP/1.1. Raises httptools' error for a URL that is none."""
        self.connection, self.method, self._headers, self.stays = connection, method, headers, stays
        self._knows_chunks = knows_chunks
        parsed = httptools.parse_url(url)
        self.path = unquote((parsed.path or b"/").decode("latin-1"))
        self.query = (parsed.query or b"").decode("latin-1")
        self.status = 0
        """Status of the response, once it has begun."""
        self.is_over = False
        """Whether all of the response is written."""
        self.key: int | None = None
        """Index of the API key that it came with, if the server asks for keys."""
        self.notes: list[tuple[bytes, bytes]] = []
        """Headers that any response gets."""
        given = self.header(b"x-request-id")
        self.given_id = given if given is not None and _GIVEN_ID.fullmatch(given) else None
        self.request_id = self.given_id or uuid4().hex
        self.size = 0
        """Bytes of the body, once it is whole."""
        self._pieces: list[bytes] = []
        self._came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when the body is whole; an error, where the client has left before."""

    def name(self, request_id: str) -> None:
        """The id that the request has in its body. Raises ApiError where it is none."""
        if not _GIVEN_ID.fullmatch(request_id):
            raise bad_request(f"request_id={request_id[:200]!r}: must be 1 to 128 letters, digits, '.', '_' or '-'")
        self.given_id = self.request_id = request_id

    @property
    def is_gone(self) -> bool:
        """Whether the client has left."""
        return bool(self.connection.transport.is_closing())

    @property
    def is_full(self) -> bool:
        """Whether the client has to take something before more is written."""
        return self.connection.is_full

    def header(self, name: bytes) -> str | None:
        return next((value.decode("latin-1") for key, value in self._headers if key == name), None)

    @property
    def trace_headers(self) -> dict[str, str]:
        """Headers of W3C Trace Context."""
        found = {name: self.header(name.encode()) for name in ("traceparent", "tracestate")}
        return {name: value for name, value in found.items() if value is not None}

    # -- the body -----------------------------------------------------------------------------------------------

    def take(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def end_body(self) -> None:
        if not self._came.done():
            self._came.set_result(None)

    def disconnect(self) -> None:
        """The connection has ended."""
        if not self._came.done():
            self._came.set_exception(ConnectionResetError())
            self._came.exception()  # seen: nobody may be waiting for it

    async def receive(self, or_empty: bool = False) -> None:
        """Waits until the body is whole; `or_empty`: there may be none. Raises ApiError: 415 where it is not said to be
        JSON, or is compressed. A page of another origin can send any other type without asking."""
        given = self.header(b"content-type") or ""
        if not _JSON_TYPE.match(given) and not (or_empty and not self._announces_body):
            found = f"content-type={given[:100]!r}" if given else "content-type"
            raise ApiError(415, f"{found}: must be application/json", "unsupported_media_type")
        if (coding := self.header(b"content-encoding")) is not None and coding.lower() != "identity":
            raise ApiError(415, f"content-encoding={coding[:100]!r}: must be absent", "unsupported_media_type")
        if not self._came.done() and (self.header(b"expect") or "").lower() == "100-continue":
            self.connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await self._came
        self.size = sum(map(len, self._pieces))

    def body(self) -> bytes:
        """The body that was received, once; to join a large one takes a while."""
        body = b"".join(self._pieces)
        self._pieces.clear()
        return body

    @property
    def _announces_body(self) -> bool:
        length = self.header(b"content-length")
        return self.header(b"transfer-encoding") is not None if length is None else int(length) > 0

    # -- the response -------------------------------------------------------------------------------------------

    def begin(self, status: int, content_type: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Sends status and headers of a body that follows in chunks, or until the connection ends where the client
        knows none. Raises ConnectionError where the client is gone, as `end` and `respond`."""
        framing = [(b"transfer-encoding", b"chunked")] if self._knows_chunks else []
        self.connection.transport.write(self._head(status, content_type, [*headers, *framing]))

    def write(self, data: bytes) -> None:
        """Sends a part of such a body."""
        self.connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._knows_chunks else data)

    def end(self) -> None:
        """Sends the end of the chunks."""
        self._end([b"0\r\n\r\n"] if self._knows_chunks else [])

    async def respond(
        self, body: bytes, status: int = 200, content_type: bytes = JSON, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        head = self._head(status, content_type, [(b"content-length", b"%d" % len(body)), *headers])
        self._end([head, body] if body and self.method != "HEAD" else [head])

    async def respond_json(self, value: Any, status: int = 200) -> None:
        await self.respond(msgspec.json.encode(value), status)

    def require_client(self) -> None:
        """Raises ConnectionError where the client is gone: some event loops refuse writes to it."""
        if self.is_gone:
            raise ConnectionResetError

    def _head(self, status: int, content_type: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
        self.require_client()
        own = [(b"content-type", content_type), (b"x-request-id", self.request_id.encode())]
        lines = [b"%b: %b\r\n" % header for header in (*own, *self.notes, *headers)]
        if not self.stays:
            lines.append(b"connection: close\r\n")
        self.status = status
        return b"".join([STATUS_LINES[status], self.connection.date, *lines, b"\r\n"])

    def _end(self, pieces: list[bytes]) -> None:
        self.require_client()
        transport = self.connection.transport
        if sum(map(len, pieces)) > _LARGE:
            for piece in pieces:
                transport.write(memoryview(piece))  # of lists and of bytes, asyncio makes two copies more
        elif pieces:  # some event loops do not take an empty list
            transport.writelines(pieces)
        self.is_over = True
        self.connection.end_answer(self)
